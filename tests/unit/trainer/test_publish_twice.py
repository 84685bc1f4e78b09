"""Several exporters in one root: what is being written stays, what dead ones have left goes."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from evald.trainer.publish import Draft, PublishError, publish, sweep_leftovers
from evald.trainer.publish.names import write_atomically


def build(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_leftovers_of_all_steps_are_swept_but_not_what_is_being_written(tmp_path: Path) -> None:
    for name in (".tmp-step_2.0123abcd", ".tmp-step_3.00000000", ".tmp-other_4.00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_bytes(b"1")
    with Draft(tmp_path, 1) as alive:
        sweep_leftovers(tmp_path, "step_{step}")
        assert names(tmp_path) == {alive.directory.name, ".tmp-other_4.00000000"}


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_what_another_exporter_is_writing_stays(tmp_path: Path) -> None:
    before = descriptors()
    first, second = Draft(tmp_path, 1), Draft(tmp_path, 1)
    with first, second:
        build(first.directory)
        (second.directory / "half").write_bytes(b"1")
        target = first.seal()
        with pytest.raises(PublishError, match="step 1: another process has published it"):
            second.seal()
    assert names(target) == {"config.json", "model.safetensors", ".complete"}
    assert names(tmp_path) == {"step_1"}
    assert descriptors() == before


def test_snapshot_without_its_marker_is_not_taken_away_from_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(root: Path, path: Path, content: dict[str, Any]) -> Path:
        with pytest.raises(PublishError, match="another process is publishing it right now"):
            Draft(tmp_path, 1).open()
        return write_atomically(root, path, content)

    monkeypatch.setattr("evald.trainer.publish.draft.write_atomically", late)
    assert (publish(build, tmp_path, 1) / ".complete").exists()
    assert names(tmp_path) == {"step_1"}


@pytest.mark.parametrize(
    ("size", "sentence"),
    [(7, "lost was written and is gone"), (8, "model.safetensors has 7 bytes")],
)
def test_seal_demands_every_file_that_was_written(tmp_path: Path, size: int, sentence: str) -> None:
    known = {"model.safetensors": {"size": size}, "lost": {"size": 1}}
    with Draft(tmp_path, 1) as draft:
        build(draft.directory)
        with pytest.raises(PublishError, match=sentence):
            draft.seal(known=known)
    assert names(tmp_path) == set()


def test_directory_that_came_back_is_not_published(tmp_path: Path) -> None:
    with Draft(tmp_path, 1) as draft:
        build(draft.directory)
        draft.directory.rename(tmp_path / "gone")
        draft.directory.mkdir()
        build(draft.directory)
        with pytest.raises(PublishError, match="was replaced while it was being written"):
            draft.seal()
    assert names(tmp_path) == {"gone"}


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unknown)
    (tmp_path / ".tmp-step_1.dead").mkdir()
    (tmp_path / ".tmp-step_2.00000000").mkdir()
    sweep_leftovers(tmp_path, "step_{step}")  # may be alive
    publish(build, tmp_path, 1)
    publish(build, tmp_path, 1)
    assert names(tmp_path) == {"step_1", ".tmp-step_2.00000000"}
