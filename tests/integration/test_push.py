"""Pushing over ssh: real rsync, a real sshd on loopback, cuts, wrong bytes, full file systems."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from far_host import FarHost, NearHost, far_host
from push_cases import carrier, contents, export, hidden, meddling, nothing, visible
from rig import until

from evald.engines.guard import descendants, read_stat
from evald.trainer.contract import NoSpace, PushError
from evald.trainer.publish import skip
from evald.trainer.push import carrier_for
from evald.trainer.push import plan as push_plan
from evald.trainer.push.plan import Parcel

pytest_plugins = ["push_places"]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarHost]:
    with far_host(tmp_path_factory.mktemp("far")) as host:
        yield host


def test_a_snapshot_arrives_whole_readable_and_its_marker_last(
    far: FarHost, spool: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_plan, "MIN_SHARE_BYTES", 1)  # several streams for little
    step = export(spool)
    for path in step.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    expected = contents(step)
    seen: list[set[str]] = []
    stop = threading.Event()

    def watch() -> None:
        last = False
        while not last:
            last = stop.is_set()  # one more look at what it has come to
            with contextlib.suppress(FileNotFoundError):
                found = set(contents(root / "step_3"))
                if found and (not seen or seen[-1] != found):
                    seen.append(found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        carrier(far, spool, root, streams=3).carry(step)
    finally:
        stop.set()
        watcher.join()
    assert contents(root / "step_3") == expected
    assert not (root / "step_3" / "linked").is_symlink()
    # under its name it was never less than whole, and the marker came after that
    assert seen == [set(expected) - {".complete"}, set(expected)] or seen == [set(expected)]
    assert visible(root) == ["step_3"]
    assert hidden(root) == []
    for path in (root / "step_3", *(root / "step_3").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_a_group_that_may_write_in_the_root_may_delete(
    near: NearHost, spool: Path, root: Path
) -> None:
    root.chmod(0o2775)
    step = export(spool / "run", marker="adapter/STABLE")
    carrier(near, spool, root, marker="adapter/STABLE").carry(step)
    assert contents(root / "run" / "step_3") == contents(step)
    for path in (root / "run", root / "run" / "step_3", root / "run" / "step_3" / "adapter"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o2775, path


def test_words_arrive_at_once(far: FarHost, spool: Path, root: Path) -> None:
    word = skip(spool, 41, "export_failed", 'it\'s "so" $HOME')
    carrier(far, spool, root).carry(word)
    assert (root / "step_41.skip").read_bytes() == word.read_bytes()
    assert hidden(root) == []
    assert visible(root) == ["step_41.skip"]


def test_a_push_that_was_killed_goes_on_where_it_stopped(
    far: FarHost, spool: Path, root: Path
) -> None:
    step = export(spool, big_bytes=24 << 20)
    command = [sys.executable, "-m", "evald", "push", str(step), far.destination(root)]
    command += ["--all", "--ssh", " ".join(far.ssh)]
    pushing = subprocess.Popen([*command, "--max-mb-s", "6"])

    def partial() -> Path | None:
        found = list(root.glob(".push-step_3.*/big.bin"))
        return found[0] if found and found[0].stat().st_size > 4 << 20 else None

    begun = until(partial, "a part of the large file is there")
    children = [pid for pid in descendants(pushing.pid) if pid != pushing.pid]
    assert len(children) >= 2, "rsync and ssh run"
    pushing.send_signal(signal.SIGKILL)
    pushing.wait(10)
    until(lambda: not any(alive(pid) for pid in children), "nothing goes on by itself", 10)
    assert begun.stat().st_size < 24 << 20
    assert visible(root) == []
    inode = begun.stat().st_ino
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "checked" in done.stdout
    assert contents(root / "step_3") == contents(step)
    # the same file was added to, not begun anew
    assert (root / "step_3" / "big.bin").stat().st_ino == inode
    assert hidden(root) == []


def alive(pid: int) -> bool:
    state = read_stat(pid)
    return state is not None and state.state != "Z"


def test_a_push_over_its_deadline_ends_and_leaves_no_process(
    near: NearHost, spool: Path, root: Path
) -> None:
    step = export(spool, big_bytes=64 << 20)
    slow = carrier(near, spool, root, max_bytes_s=2 << 20, timeout_s=3.0)
    begun = time.monotonic()
    with pytest.raises(PushError, match=r"not done within the timeout; what has arrived stays"):
        slow.carry(step)
    assert time.monotonic() - begun < 20
    assert descendants(os.getpid()) == [os.getpid()] or not [
        pid for pid in descendants(os.getpid()) if "rsync" in Path(f"/proc/{pid}/comm").read_text()
    ]
    assert len(hidden(root)) == 1
    slow.discard(step)
    assert hidden(root) == []


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def test_bytes_that_change_on_their_way_are_sent_again(
    near: NearHost, spool: Path, root: Path
) -> None:
    step = export(spool)
    end, pusher = meddling(near, spool, root)
    checks: list[str] = []

    def flip_once(parcel: Parcel) -> None:
        checks.append(parcel.temporary)
        if len(checks) == 1:
            flip(root / parcel.temporary / "model-00002-of-00003.safetensors")

    end.before_check = flip_once
    pusher.carry(step)
    assert len(checks) == 2
    assert contents(root / "step_3") == contents(step)


def test_bytes_that_change_twice_are_never_marked(near: NearHost, spool: Path, root: Path) -> None:
    step = export(spool)
    end, pusher = meddling(near, spool, root)
    end.before_check = lambda parcel: flip(root / parcel.temporary / "adapter" / "weights ü.bin")
    with pytest.raises(PushError, match=r"adapter/weights ü.bin arrived with other bytes twice"):
        pusher.carry(step)
    assert visible(root) == []
    assert list(root.rglob(".complete")) == []
    end.before_check = nothing
    pusher.carry(step)
    assert contents(root / "step_3") == contents(step)


def test_whatever_is_wrong_at_the_far_end_is_one_sentence(
    far: FarHost, spool: Path, root: Path
) -> None:
    step = export(spool)
    with pytest.raises(PushError, match=r"there is no such directory, .*start evald there first"):
        carrier(far, spool, root / "missing").carry(step)
    with pytest.raises(PushError, match=r"there is no such directory"):
        carrier(far, spool, root / "missing").carry(skip(spool, 4, "busy"))
    with pytest.raises(PushError, match=r"ssh failed: .*Permission denied"):
        carrier_for(
            far.destination(root), root=spool, ssh=[*far.ssh, "-o", "PubkeyAuthentication=no"]
        ).carry(step)
    with pytest.raises(PushError, match=r"ssh failed: .*Connection refused"):
        carrier_for(far.destination(root), root=spool, ssh=[*far.ssh[:3], "-p", "1"]).carry(step)
    assert not (root / "missing").exists()
    assert list(root.iterdir()) == []


def test_a_full_far_end_is_no_space_and_keeps_nothing(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    # a mount that nobody else sees, and that ends with the process which holds it
    script = 'mount -t tmpfs -o size=2m tmpfs "$0" && echo mounted && exec sleep 100'
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, str(root)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline():
            try:
                full = NearHost(tmp_path, f"nsenter --mount --target {holder.pid}")
                check_full(full, spool, root)
            finally:
                holder.kill()
            return
    print("no mount on this machine: a far end that only says that it is full")
    shell = tmp_path / "full-ssh"
    shell.write_text("#!/bin/sh\necho 'x: write error: No space left on device' >&2\nexit 1\n")
    shell.chmod(0o755)
    with pytest.raises(NoSpace, match="No space left on device"):
        carrier_for("h:/r", root=spool, ssh=[str(shell)]).carry(export(spool))


def check_full(full: FarHost, spool: Path, root: Path) -> None:
    def there(command: str) -> str:
        words = [*full.ssh, full.host, f"cd {root} && {command}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
        return done.stdout

    def fill(_parcel: Parcel) -> None:
        there("head -c 1500000 /dev/zero > filler")

    end, pusher = meddling(full, spool, root)
    with pytest.raises(NoSpace, match="are free there") as before_a_byte:
        pusher.carry(export(spool, big_bytes=3 << 20))
    assert before_a_byte.value.reason == "no_space"
    end.before_send = fill
    with pytest.raises(NoSpace, match="No space left on device"):
        pusher.carry(export(spool, 4, big_bytes=1 << 20))
    assert there("ls -A") == "filler\n"
    there("head -c 10000000 /dev/zero > filler")
    with pytest.raises(NoSpace):
        pusher.carry(skip(spool, 5, "busy", "x" * 10_000))
    assert there("ls -A") == "filler\n"
    there("rm filler")
    end.before_send = nothing
    pusher.carry(spool / "step_4")
    assert there("ls -A") == "step_4\n"
