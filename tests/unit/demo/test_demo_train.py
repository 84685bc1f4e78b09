from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from evald.demo import train as training
from evald.demo.model import END_ID, PAD_ID, build_base_model
from evald.demo.train import batches, learning_rate_share


def test_learning_rate_warms_up_and_ends_at_a_tenth() -> None:
    assert learning_rate_share(0, 1800) == pytest.approx(0.01)
    assert learning_rate_share(99, 1800) == pytest.approx(1.0, abs=0.01)
    assert learning_rate_share(1799, 1800) == pytest.approx(0.1, abs=0.001)
    assert learning_rate_share(900, 1800) == pytest.approx(0.55)


def test_loss_is_on_the_answer_only() -> None:
    batch = next(batches(0))
    assert batch.ids.shape == batch.labels.shape
    assert batch.ids.shape[0] == training.BATCH_SIZE
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        learned = [token for token in labels if token != -100]
        assert learned[-1] == END_ID
        start = labels.index(learned[0])
        assert labels[start : start + len(learned)] == ids[start : start + len(learned)]
        assert set(ids[start + len(learned) :]) <= {PAD_ID}
        assert set(labels[:start]) == {-100}


def run(monkeypatch: pytest.MonkeyPatch, base: Path, root: Path, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--base", str(base), "--root", str(root), *options])
    training.main()


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_trains_publishes_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, root = build_base_model(tmp_path / "base"), tmp_path / "root"
    run(monkeypatch, base, root, "--steps", "5", "--every", "2")
    assert {path.name for path in root.iterdir()} == {"step_2", "step_4", "step_5", "run.end"}
    assert json.loads((root / "run.end").read_bytes()) == {"last_step": 5}
    finals = [
        json.loads((root / f"step_{n}" / ".complete").read_bytes())["final"] for n in (2, 4, 5)
    ]
    assert finals == [False, False, True]
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"):
        assert (root / "step_5" / name).stat().st_size > 0
    weights = [(root / f"step_{n}" / "model.safetensors").read_bytes() for n in (2, 4)]
    assert weights[0] != weights[1] != (base / "model.safetensors").read_bytes()
    said = events(capsys)
    assert [e["event"] for e in said] == [
        "start", "published", "published", "progress", "published", "end",
    ]  # fmt: skip
    assert math.isfinite(said[3]["loss"])
    assert said[3]["step"] == 5


def test_full_root_costs_the_snapshot_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    base, root = build_base_model(tmp_path / "base"), tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(training, "publish", full)
    run(monkeypatch, base, root, "--steps", "1")
    assert {path.name for path in root.iterdir()} == {"step_1.skip", "run.end"}
    assert [e["event"] for e in events(capsys)] == ["start", "progress", "skipped", "end"]


def test_other_faults_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    base = build_base_model(tmp_path / "base")
    monkeypatch.setattr(training, "publish", denied)
    with pytest.raises(PermissionError):
        run(monkeypatch, base, tmp_path, "--steps", "1")


def test_steps_must_be_positive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, tmp_path, "--steps", "0")
