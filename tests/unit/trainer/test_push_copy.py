"""Pushing onto a shared file system: plain copies, read back; cuts, wrong bytes, full disks."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evald.trainer.contract import NoSpace, PushError
from evald.trainer.publish import publish, skip
from evald.trainer.push import PushCarrier, carrier_for
from evald.trainer.push.copy import CopyFar
from evald.trainer.push.far import STALE_MINUTES, StillHeld, Where
from evald.trainer.push.manifest import SourceFile
from evald.trainer.push.plan import Parcel, pack


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "spool"
    path.mkdir()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def build(content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "sub").mkdir(mode=0o700)
        (directory / "sub" / "a").write_bytes(content * 1000)
        (directory / "b").write_bytes(content * 2000)
        (directory / "b").chmod(0o600)

    return write


def export(spool: Path, content: bytes = b"1", *, hashes: bool = True) -> Path:
    return publish(build(content), spool, 3, hashes=hashes)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Watched(CopyFar):
    """Notes what was sent and spoils what is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, streams=2)
        self.root = root
        self.sent: list[list[str]] = []
        self.spoil: list[str] = []

    def send(
        self, parcel: Parcel, files: Sequence[SourceFile], deadline: float, *, again: bool
    ) -> None:
        self.sent.append(sorted(file.name for file in files))
        super().send(parcel, files, deadline, again=again)

    def differences(self, parcel: Parcel, where: Where, deadline: float) -> set[str]:
        if self.spoil:
            with (self.root / parcel.temporary / self.spoil.pop()).open("r+b") as file:
                file.write(b"X")
        return super().differences(parcel, where, deadline)


@pytest.mark.parametrize("hashes", [True, False])
def test_a_snapshot_arrives_with_open_modes(spool: Path, root: Path, *, hashes: bool) -> None:
    step = export(spool, hashes=hashes)
    carrier_for(str(root), root=spool).carry(step)
    assert contents(root / "step_3") == contents(step)
    assert names(root) == ["step_3"]
    for path in (root / "step_3").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


def test_words(spool: Path, root: Path) -> None:
    (spool / "run").mkdir()
    word = skip(spool / "run", 4, "busy")
    carrier_for(str(root), root=spool).carry(word)
    assert (root / "run" / "step_4.skip").read_bytes() == word.read_bytes()
    assert names(root) == ["run"]
    with pytest.raises(PushError, match="No such file"):
        carrier_for(str(root), root=spool).carry(spool / "gone.skip")


@pytest.mark.parametrize("hashes", [True, False])
def test_spoiled_bytes_are_sent_once_more(spool: Path, root: Path, *, hashes: bool) -> None:
    step = export(spool, hashes=hashes)
    far = Watched(root)
    far.spoil = ["sub/a"]
    PushCarrier(far, root=spool).carry(step)
    assert far.sent == [["b", "sub/a"], ["sub/a"]]
    assert contents(root / "step_3") == contents(step)


def test_spoiled_twice_is_never_marked_and_then_goes_on(spool: Path, root: Path) -> None:
    step = export(spool)
    far = Watched(root)
    far.spoil = ["b", "b"]
    carrier = PushCarrier(far, root=spool)
    with pytest.raises(PushError, match="b arrived with other bytes twice; look at the memory"):
        carrier.carry(step)
    (left,) = root.iterdir()
    assert left.name.startswith(".push-step_3.")
    written = (left / "sub" / "a").stat().st_mtime_ns
    carrier.carry(step)
    assert (root / "step_3" / "sub" / "a").stat().st_mtime_ns == written  # not copied once more
    assert contents(root / "step_3") == contents(step)


def test_a_source_that_changed_since_its_manifest_does_not_pass(spool: Path, root: Path) -> None:
    step = export(spool)
    (step / "b").write_bytes(b"2" * 2000)
    with pytest.raises(PushError, match="its manifest does not fit, b has other bytes"):
        carrier_for(str(root), root=spool).carry(step)
    assert names(root) == []


def test_given_up_pushes_are_discarded_or_swept(spool: Path, root: Path) -> None:
    far = Watched(root)
    far.spoil = ["b", "b"]
    carrier = PushCarrier(far, root=spool)
    step = export(spool)
    with pytest.raises(PushError):
        carrier.carry(step)
    carrier.discard(step)
    assert names(root) == []
    for name, age_minutes in (("old", STALE_MINUTES + 1), ("young", STALE_MINUTES - 5)):
        left = root / f".push-{name}"
        left.mkdir()
        then = time.time() - 60 * age_minutes
        os.utime(left, (then, then))
    carrier.carry(step)
    assert names(root) == [".push-young", "step_3"]


def test_other_bytes_replace_equal_ones_do_not(spool: Path, root: Path) -> None:
    far = Watched(root)
    carrier = PushCarrier(far, root=spool)
    carrier.carry(export(spool))
    marker = (root / "step_3" / ".complete").stat()
    carrier.carry(export(spool))  # the same bytes, a manifest of another time
    assert os.path.samestat((root / "step_3" / ".complete").stat(), marker)
    new = export(spool, b"2")
    carrier.carry(new)
    assert contents(root / "step_3") == contents(new)
    (root / "step_3" / ".complete").unlink()
    far.sent.clear()
    carrier.carry(new)  # cut off between name and marker
    assert (far.sent, contents(root / "step_3")) == ([], contents(new))
    assert names(root) == ["step_3"]


def test_a_full_file_system_is_no_space_and_keeps_nothing(
    spool: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = export(spool)
    carrier = carrier_for(str(root), root=spool)
    real = os.statvfs(root)
    with monkeypatch.context() as patch:
        small = os.statvfs_result((*real[:3], 0, 0, *real[5:]))
        patch.setattr(os, "statvfs", lambda _path: small)
        with pytest.raises(NoSpace, match="it has 3000 bytes, and 0 are free there"):
            carrier.carry(step)
    assert names(root) == []

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpace, match="No space left on device") as fault:
            carrier.carry(step)
    assert (fault.value.reason, names(root)) == ("no_space", [])


def test_deadline_missing_root_and_a_root_that_cannot_be_written(
    spool: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = export(spool)
    with pytest.raises(PushError, match="there is no such directory, or this user may not enter"):
        carrier_for(str(root / "none"), root=spool).carry(step)
    with pytest.raises(PushError, match="there is no such directory"):
        carrier_for(str(root / "none"), root=spool).carry(skip(spool, 4, "busy"))
    with pytest.raises(PushError, match="not read within the timeout"):
        carrier_for(str(root), root=spool, timeout_s=1e-9).carry(step)
    with pytest.raises(PushError, match="not done within the timeout"):
        carrier_for(str(root), root=spool, timeout_s=1e-9).deliver(
            pack(step, "step_3", marker=".complete")
        )

    def denied(*_: object, **__: object) -> io.BufferedReader:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(PushError, match=r"cannot push to .*: Permission denied \(x\)"):
        carrier_for(str(root), root=spool).carry(step)


def board(root: Path, beat: int, **points: str) -> None:
    """Write the status of a daemon that has step 3 of these runs running."""
    running = [
        {"run": run, "step": 3, "revision": 0, "kind": "step", "state": "x", "since_s": 1}
        for run in points.values()
    ]
    status = {"version": "1", "pid": 1, "beat": beat, "time": 1, "uptime_s": 1, "state": "serving"}
    status |= {"run": "r", "results": "/r", "cap": 2, "running": running}
    (root / ".evald").mkdir(exist_ok=True)
    (root / ".evald" / "status.json").write_text(json.dumps(status))


@pytest.mark.parametrize("second", [{"run": "two"}, {"run": "one", "final": True}, {}])
def test_equal_bytes_of_another_point_get_its_marker(
    spool: Path, root: Path, second: dict[str, Any]
) -> None:
    far = Watched(root)
    carrier = PushCarrier(far, root=spool, busy_timeout_s=0.1)
    carrier.carry(publish(build(b"1"), spool, 3, run="one"))
    before = (root / "step_3" / "b").stat()
    step = publish(build(b"1"), spool, 3, **second)
    board(root, 1, of="one")
    with pytest.raises(StillHeld):
        carrier.carry(step)
    board(root, 2, of="another")
    if second:  # a manifest without a run may be of any
        far.sent.clear()
        carrier.carry(step)
        assert (far.sent, contents(root / "step_3")) == ([], contents(step))
        assert (root / "step_3" / "b").stat() == before


def test_two_pushes_of_one_directory_at_once(spool: Path, root: Path) -> None:
    step = export(spool)
    results: list[str] = []

    class Meets(Watched):
        def differences(self, parcel: Parcel, where: Where, deadline: float) -> set[str]:
            try:
                carrier_for(str(root), root=spool).carry(step)
            except PushError as error:
                results.append(str(error))
            carrier_for(str(root), root=spool).discard(step)  # nor does a clean-up take it away
            return super().differences(parcel, where, deadline)

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - its own descriptor is one of them
    PushCarrier(Meets(root), root=spool).carry(step)
    (said,) = results
    assert "another process is pushing the same snapshot there right now; let one do it" in said
    assert contents(root / "step_3") == contents(step)
    assert names(root) == ["step_3"]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_without_locks_a_second_push_never_makes_a_file_shorter(
    spool: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unknown)
    step = export(spool)
    far = Watched(root)
    parcel, deadline = pack(step, "step_3", marker=".complete"), time.monotonic() + 60
    assert far.prepare(parcel, deadline, replace=False) == "absent"
    far.send(parcel, parcel.files, deadline, again=False)
    sizes: list[int] = []
    real = os.fsync

    def look(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    watched = root / parcel.temporary / "b"
    opened = os.open

    def open_and_look(path: Any, *rest: Any) -> int:
        descriptor = opened(path, *rest)
        if Path(path) == watched:
            sizes.append(watched.stat().st_size)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_look)
    monkeypatch.setattr(os, "fsync", look)
    far.send(parcel, parcel.files, deadline, again=True)
    assert set(sizes) == {1000, 2000}


def test_a_hidden_directory_that_is_a_link_is_not_followed(
    tmp_path: Path, spool: Path, root: Path
) -> None:
    step = export(spool)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / pack(step, "step_3", marker=".complete").temporary).symlink_to(elsewhere)
    with pytest.raises(PushError, match="is a symbolic link, which no push makes; remove it"):
        carrier_for(str(root), root=spool).carry(step)
    assert names(elsewhere) == []


def test_a_marker_that_is_a_folder_makes_way(spool: Path, root: Path) -> None:
    carrier = carrier_for(str(root), root=spool)
    carrier.carry(export(spool))
    (root / "step_3" / ".complete").unlink()
    (root / "step_3" / ".complete").mkdir()
    with pytest.raises(PushError, match=r"Is a directory"):
        carrier.carry(export(spool))
    new = export(spool, b"2")
    carrier.carry(new)
    assert contents(root / "step_3") == contents(new)
