"""The code of the README and of docs/ is tried as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sink_cases import Book, ended

from evald.config import Config
from evald.config_load import build_config
from evald.engines.plan import engine_plan
from evald.point import Outcome, SkipReason
from evald.results.records import AnyRecord, PointRecord
from evald.testing import FakeDaemon, write_snapshot

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return found


def block(language: str, words: str) -> str:
    """The one block of code with these words in it."""
    (found,) = [text for text in blocks(language) if words in text]
    return found


def test_the_config_is_good() -> None:
    text = block("toml", 'run = "qwen3-4b-rl"')
    config = build_config(tomllib.loads(text), base=Path("/etc/evald"), environ={})
    assert config.fleet is not None
    assert (config.fleet.engines, config.fleet.gpus_per_engine) == (4, 2)
    assert [s.grader for s in config.eval] == ["boxed_math", "choice"]
    assert {plan.context_len for plan in engine_plan(config.fleet)} == {16384}


def build(text: str) -> Config:
    """Complete a part of a config."""
    rest = 'run = "r"\n[staging]\nroot = "/s"\n[results]\ndir = "/r"\n'
    rest += '[[eval]]\nname = "a"\npath = "a.jsonl"\n'
    return build_config(tomllib.loads(rest + text), base=Path("/e"), environ={})


def test_the_inheriting_fleet_is_good() -> None:
    assert build(block("toml", "[fleet.inherit]")).engine_count == 6


def test_the_alerts_are_good() -> None:
    config = build(block("toml", "[[alert]]") + '[fleet]\nmodel = "/m"\ngpus = 1\n')
    assert [rule.kind for rule in config.alert] == ["drop"]
    assert config.webhook is not None


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    n_links = 0
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            n_links += 1
            assert path.exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
                assert anchor in slugs, (page, target)
    assert n_links > 10


class Model:
    """Saves the fake model as transformers would."""

    def save_pretrained(self, path: Any) -> None:
        write_snapshot(Path(path), marker=None)


@pytest.mark.parametrize("words", ["tokenizer.save_pretrained", "from evald.trainer.publish"])
def test_the_trainers_code_runs(words: str, tmp_path: Path) -> None:
    code = block("python", words).replace("/dev/shm/evald", str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    by_hand = words.startswith("tokenizer")
    imports = "import os, pathlib\n" if by_hand else ""
    exec(imports + code, {"model": Model(), "tokenizer": Model(), "step": 40})  # noqa: S102
    assert (tmp_path / "root" / "step_40" / ".complete").exists()
    if not by_hand:
        skip = json.loads((tmp_path / "root" / "step_41.skip").read_text())
        assert skip["reason"] == "export_failed"
        assert json.loads((tmp_path / "root" / "run.end").read_text())["last_step"] == 1800


def test_the_dispatchers_code_runs(tmp_path: Path, tiny_model: Path) -> None:
    root = tmp_path / "root"
    daemon = FakeDaemon(root, tmp_path / "results", base_dir=tiny_model)
    daemon.start()
    job = tmp_path / "job.py"
    code = block("python", 'EvalDispatcher(\n    "/dev/shm/evald"')
    job.write_text(
        "import sys\nfrom safetensors.torch import load_file\n"
        "base, n = sys.argv[1], 60\nmodel = load_file(base + '/model.safetensors')\n"
        + code.replace("/dev/shm/evald", str(root))
    )
    try:
        subprocess.run([sys.executable, job, tiny_model], check=True, timeout=100)
    finally:
        daemon.stop()
    points = [record for record in daemon.records() if isinstance(record, PointRecord)]
    assert [(point.kind, point.step) for point in points] == [
        ("baseline", 0),
        ("step", 50),
        ("step", 60),
    ]
    assert {point.outcome for point in points} == {"ok"}


class Logger:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)


def test_the_loggers_code_runs(tmp_path: Path) -> None:
    book = Book(tmp_path / "results")
    book.add(ended(40, a=0.5))
    code = block("python", "import follow").replace("/var/lib/evald/qwen3-4b-rl", str(book.path))
    code = code.replace('"my-logger"', f'"{tmp_path}/my-logger", once=True')
    logger = Logger()
    for _ in range(2):
        exec(code, {"logger": logger})  # noqa: S102
    assert logger.logged == [{"eval/step": 40, "eval/a": 0.5}]


def test_every_record_type_outcome_and_reason_is_explained() -> None:
    types = [kind.__struct_config__.tag for kind in AnyRecord.__args__]
    for word in [*types, *Outcome, *SkipReason]:
        assert f"`{word}`" in TEXT, word
