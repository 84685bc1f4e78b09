"""Pushing onto a shared file system: plain copies, read back; cuts, wrong bytes, full disks."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from evald.cli import main
from evald.trainer.contract import NoSpace, PushError
from evald.trainer.publish import publish, skip
from evald.trainer.push import PushCarrier, carrier_for
from evald.trainer.push.copy import CopyFar
from evald.trainer.push.far import STALE_MINUTES, Where
from evald.trainer.push.plan import Parcel, SourceFile


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


def export(spool: Path, content: bytes = b"1", *, hashes: bool = True) -> Path:
    def build(directory: Path) -> None:
        (directory / "sub").mkdir(mode=0o700)
        (directory / "sub" / "a").write_bytes(content * 1000)
        (directory / "b").write_bytes(content * 2000)
        (directory / "b").chmod(0o600)

    return publish(build, spool, 3, hashes=hashes)


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
    with pytest.raises(PushError, match="b arrived with other bytes twice"):
        carrier_for(str(root), root=spool).carry(step)


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
    assert (root / "step_3" / ".complete").stat() == marker
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
    with pytest.raises(PushError, match="not done within the timeout"):
        carrier_for(str(root), root=spool, timeout_s=1e-9).carry(step)

    def denied(*_: object, **__: object) -> io.BufferedReader:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(PushError, match=r"cannot push to .*: Permission denied \(x\)"):
        carrier_for(str(root), root=spool).carry(step)


def test_evald_push(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "weights").write_bytes(b"12345")
    assert main(["push", str(out), str(root)]) == 1
    assert "no step number is in it; give --name step_40" in capsys.readouterr().err
    command = ["push", str(out), str(root), "--name", "run/step_40", "--marker", "STABLE"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"pushed run/step_40 to {root}: 1 files, 5 bytes, checked, in ")
    assert b"xxh3" in (root / "run" / "step_40" / "STABLE").read_bytes()
    assert names(out) == ["weights"]
    assert main(command) == 0
    assert "nothing to push of run/step_40" in capsys.readouterr().out
    assert main(["push", str(out), "h:x", "--name", "step_1"]) == 1
    assert "cannot push to 'h:x'" in capsys.readouterr().err
    assert main(["push", str(tmp_path / "none"), str(root), "--name", "step_1"]) == 1
    assert "is not there" in capsys.readouterr().err
