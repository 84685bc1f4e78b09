"""What dead writers leave in a staging root."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from evald.staging.leftovers import MIN_AGE_S, sweep_leftovers
from evald.trainer.publish import Draft

TRASH = ".evald/trash"


def old(path: Path) -> Path:
    then = time.time() - MIN_AGE_S - 10
    for one in (*path.rglob("*"), path):
        os.utime(one, (then, then), follow_symlinks=False)
    return path


def leftover(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x" * 100)
    return path


def test_old_ones_that_nobody_holds_go(tmp_path: Path) -> None:
    (tmp_path / "root" / ".evald").mkdir(parents=True)
    root = tmp_path / "root"
    gone = [
        old(leftover(root / ".tmp-step_1.0123abcd")),
        old(leftover(root / "run" / ".tmp-step_1.0123abcd")),
    ]
    word = root / ".tmp-step_3.skip.0123abcd"
    word.touch()
    old(word)
    young = leftover(root / ".tmp-step_2.0123abcd")
    written = leftover(root / ".tmp-step_4.0123abcd")
    old(written)
    (written / "model.safetensors").touch()
    others = [old(leftover(root / name)) for name in (".tmp-mine", "step_5", ".hidden.0123abcd")]
    linked = root / "link"
    linked.symlink_to(tmp_path / "outside")
    outside = old(leftover(tmp_path / "outside" / ".tmp-step_1.0123abcd"))
    swept = sweep_leftovers(root, TRASH)
    assert sorted(swept) == [
        ".tmp-step_1.0123abcd",
        ".tmp-step_3.skip.0123abcd",
        "run/.tmp-step_1.0123abcd",
    ]
    assert not any(path.exists() for path in (*gone, word))
    assert all(path.exists() for path in (young, written, *others, outside))
    assert list((root / TRASH).iterdir()) == []


def test_what_a_living_writer_holds_stays(tmp_path: Path) -> None:
    with Draft(tmp_path, 1) as draft:
        (draft.directory / "model.safetensors").touch()
        old(draft.directory)
        assert sweep_leftovers(tmp_path, TRASH) == []
        assert draft.directory.exists()
        os.rename(draft.directory, kept := tmp_path / ".tmp-step_1.00000000")  # noqa: PTH104
    assert sweep_leftovers(tmp_path, TRASH) == [kept.name]


def test_one_that_cannot_be_deleted_costs_no_other(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a file that even its owner may not delete needs root")
    held = old(leftover(tmp_path / ".tmp-step_1.00000000"))
    other = old(leftover(tmp_path / ".tmp-step_2.00000000"))
    descriptor = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        assert sweep_leftovers(tmp_path, TRASH) == [other.name]
    finally:
        os.close(descriptor)
    assert sweep_leftovers(tmp_path, TRASH) == [held.name]
