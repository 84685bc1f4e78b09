"""`evald check` finds nothing wrong with any config that ships, once its files are there."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from evald.cli import main
from evald.testing import write_base_model

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the configs' variables name."""
    data, demo = tmp_path / "data", tmp_path / "demo"
    model = write_base_model(tmp_path / "model", max_position_embeddings=65536)
    demo.mkdir()
    (demo / "base").symlink_to(model)
    sets = {
        data: ["aime", "gpqa", "gsm8k", "math"],
        demo / "data": ["copy", "reverse", "sort", "max", "add"],
    }
    for directory, names in sets.items():
        directory.mkdir(exist_ok=True)
        for name in names:
            row = {"id": "1", "prompt": "Which letter? Answer with A.", "label": "A"}
            (directory / f"{name}.jsonl").write_text(json.dumps(row))
    yaml = f"eval: {{datasets: [{{name: aime, path: {data}/aime.jsonl, rm_type: deepscaler}}]}}\n"
    (tmp_path / "eval.yaml").write_text(yaml)
    variables = {
        "EVALD_MODEL": "model",
        "EVALD_DATA": "data",
        "EVALD_DEMO_DIR": "demo",
        "EVALD_EVAL_YAML": "eval.yaml",
        "EVALD_ROOT": "root",
        "EVALD_DEMO_ROOT": "root",
        "EVALD_LM_EVAL_ROOT": "root",
        "EVALD_CHECKPOINTS": "root",
        "EVALD_RESULTS": "results",
        "EVALD_LM_EVAL_RESULTS": "results",
    }
    for name, path in variables.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    return tmp_path


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_check_finds_nothing_wrong(
    name: str, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(CONFIGS / name)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "config is good"
    # it touches nothing
    assert not (node / "results").exists()
    warnings = [line for line in said if line.startswith("WARNING") and "no GPU" not in line]
    assert not warnings


def test_the_nodes_have_the_engines_that_they_promise(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del node
    for name, engines, gpus in (("node-tp1.toml", 8, 1), ("node-tp2.toml", 4, 2)):
        assert main(["check", str(CONFIGS / name)]) == 0
        said = capsys.readouterr().out
        lines = [line for line in said.splitlines() if line.startswith("engine engine-")]
        assert len(lines) == engines
        assert all(len(line.partition(" on GPU ")[2].split(",")) == gpus for line in lines)


def test_each_says_what_it_is_for() -> None:
    for path in CONFIGS.glob("*.toml"):
        text = path.read_text()
        assert text.startswith("# "), path
        tomllib.loads(text)
