"""``evald push`` as a person uses it: what it says, and what it does not take along."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from evald.cli import main
from evald.status.view import StagingView, StatusView


def write(directory: Path, **files: bytes) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_bytes(content)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def status(staging: StagingView) -> StatusView:
    return StatusView(
        version="1",
        pid=1,
        beat=1,
        time=1.0,
        uptime_s=1.0,
        state="serving",
        run="r",
        results="/r",
        cap=2,
        staging=staging,
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_evald_push(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write(tmp_path / "model", config__json=b"12345")
    assert main(["push", str(out), str(root)]) == 1
    assert "no step number is in it; give --name step_40" in capsys.readouterr().err
    command = ["push", str(out), str(root), "--name", "run/step_40", "--marker", "STABLE"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"pushed run/step_40 to {root}: 1 files, 5 bytes, checked, in ")
    assert said.err == ""
    assert b"xxh3" in (root / "run" / "step_40" / "STABLE").read_bytes()
    assert names(out) == ["config.json"]
    assert main(command) == 0
    assert "nothing to push of run/step_40" in capsys.readouterr().out
    assert main(["push", str(out), "h:x", "--name", "step_1"]) == 1
    assert "cannot push to 'h:x'" in capsys.readouterr().err
    assert main(["push", str(tmp_path / "none"), str(root), "--name", "step_1"]) == 1
    assert "is not there" in capsys.readouterr().err


def test_what_a_trainer_keeps_to_resume_from_stays_here(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"optimizer__pt": b"123456", "rng_state__pth": b"1", "trainer_state__json": b"{}"}
    out = write(tmp_path / "checkpoint-40", model__safetensors=b"1", scheduler__pt=b"1", **state)
    assert main(["push", str(out), str(root)]) == 0
    assert names(root / "checkpoint-40") == [".complete", "model.safetensors"]
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        "left out optimizer.pt, rng_state.pth, scheduler.pt and 1 more (10 bytes), which no "
        "evaluation needs; --all sends everything"
    )
    assert main(["push", str(out), str(root), "--name", "step_40", "--all"]) == 0
    assert names(root / "step_40") == [".complete", *names(out)]
    assert "left out" not in capsys.readouterr().out


def test_a_name_that_the_node_does_not_take(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = write(tmp_path / "epoch3", config__json=b"{}")
    assert main(["push", str(out), str(root), "--pattern", "step_{step}"]) == 1
    assert capsys.readouterr().err == (
        "evald: cannot push as epoch3: the node's pattern step_{step} does not fit it; give --name "
        "step_40\n"
    )
    assert main(["push", str(out), str(root)]) == 0
    assert (
        "evald: no usual pattern fits epoch3 (broadcasts/step_{step}, " in capsys.readouterr().err
    )
    assert main(["push", str(out), str(root), "--pattern", "epoch{step}"]) == 0
    assert capsys.readouterr().err == ""
    view = StagingView(
        root="", used_bytes=0, free_bytes=0, snapshots=0, pattern="checkpoint-{step}"
    )
    (root / ".evald").mkdir()
    (root / ".evald" / "status.json").write_bytes(msgspec.json.encode(status(view)))
    assert main(["push", str(out), str(root)]) == 1
    assert "the node's pattern checkpoint-{step} does not fit it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-mb-s", "nan"], "argument --max-mb-s: nan is no number above 0"),
        (["--max-mb-s", "fast"], "argument --max-mb-s: fast is no number above 0"),
        (["--timeout", "0"], "argument --timeout: 0 is no number above 0"),
        (["--ssh", ""], "argument --ssh: it is empty; write ssh, or ssh with options"),
        (["--ssh", "'"], 'argument --ssh: "\'" is no command: No closing quotation'),
        (["--pattern", "step"], "argument --pattern: step lacks {step}"),
    ],
)
def test_arguments_that_cannot_be(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["push", str(root), str(root), *words])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
