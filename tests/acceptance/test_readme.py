"""The README's code is tried as it stands."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from evald.config_load import build_config
from evald.engines.plan import engine_plan
from evald.point import Outcome, SkipReason
from evald.results.records import AnyRecord
from evald.testing import write_snapshot

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_the_config_is_good() -> None:
    text = blocks("toml")[0]
    config = build_config(tomllib.loads(text), base=Path("/etc/evald"), environ={})
    assert config.fleet is not None
    assert (config.fleet.engines, config.fleet.gpus_per_engine) == (4, 2)
    assert [s.grader for s in config.eval] == ["boxed_math", "choice"]
    assert {plan.context_len for plan in engine_plan(config.fleet)} == {16384}


def test_the_inheriting_fleet_is_good() -> None:
    rest = 'run = "r"\n[staging]\nroot = "/s"\n[results]\ndir = "/r"\n'
    rest += '[[eval]]\nname = "a"\npath = "a.jsonl"\n'
    config = build_config(tomllib.loads(rest + blocks("toml")[1]), base=Path("/e"), environ={})
    assert config.engine_count == 6


class Model:
    """Saves the fake model as transformers would."""

    def save_pretrained(self, path: Any) -> None:
        write_snapshot(Path(path), marker=None)


@pytest.mark.parametrize("number", [0, 1])
def test_the_trainers_code_runs(number: int, tmp_path: Path) -> None:
    code = blocks("python")[number].replace("/dev/shm/evald", str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    imports = "import os, pathlib\n" if number == 0 else ""
    exec(imports + code, {"model": Model(), "tokenizer": Model(), "step": 40})  # noqa: S102
    assert (tmp_path / "root" / "step_40" / ".complete").exists()
    if number == 1:
        skip = json.loads((tmp_path / "root" / "step_41.skip").read_text())
        assert skip["reason"] == "export_failed"
        assert json.loads((tmp_path / "root" / "run.end").read_text())["last_step"] == 1800


def test_every_record_type_outcome_and_reason_is_explained() -> None:
    text = README.read_text()
    types = [kind.__struct_config__.tag for kind in AnyRecord.__args__]
    for word in [*types, *Outcome, *SkipReason]:
        assert f"`{word}`" in text, word
