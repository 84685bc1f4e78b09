"""Room for snapshots: an SDK writer stays within the staging root's budget."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from evald.status.view import StagingView
from evald.trainer.dispatcher.space import Room, snapshot_bytes
from evald.trainer.publish import publish, reservation
from evald.trainer.publish.reservation import Reservations

BUDGET = 1_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / ".evald").mkdir(parents=True)
    (tmp_path / "root" / ".evald" / "status.json").touch()
    return tmp_path / "root"


def view(root: Path, **fields: int) -> StagingView:
    known = StagingView(
        root=str(root), used_bytes=0, free_bytes=1 << 40, snapshots=0, max_bytes=BUDGET
    )
    return msgspec.structs.replace(known, **fields)


def take(room: Room, step: int, need: int, far: StagingView | None, **how: bool) -> str | None:
    return room.take(
        step,
        need,
        exporting_bytes=0,
        far=far,
        alive=how.get("alive", True),
        on_its_way_bytes=0,
        final=how.get("final", False),
    )


def test_promises_count_until_they_are_given_back(root: Path) -> None:
    far = view(root)
    one, other = Room(root), Room(root / "run")  # a run's folder, still to be made
    assert take(one, 1, 600_000, far) is None
    refusal = take(other, 1, 600_000, far)
    assert refusal is not None
    assert "600 MB" not in refusal
    assert "0.6 MB of staging.max_bytes" in refusal
    assert take(other, 1, 600_000, far, final=True) is None  # and others hear of it
    one.give_back(1)
    assert take(one, 2, 600_000, far) is not None
    other.give_back(1)
    assert take(one, 2, 600_000, far, alive=False) is None  # the budget outlives the daemon
    one.give_back(2)
    one.give_back(7)


def test_what_lies_in_the_root_counts_once(root: Path) -> None:
    for name, size in (
        ("step_1/model.safetensors", 1),
        ("run/step_1/folder/file", 10),
        (".evald/trash/step_0/file", 100),
        (".tmp-step_2.0123abcd/file", 1000),
        ("run/.tmp-step_3.0123abcd/file", 10_000),
    ):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(bytes(size))
    (root / "link").symlink_to(root / "step_1")
    reservations = Reservations(root)
    assert reservations.take(1, 500, lambda _: None) is None
    assert reservations.used_bytes() == 11_111 + 500
    held = os.open(root / ".tmp-step_2.0123abcd", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # its writer: 1000 bytes of a promise that was too small
    assert reservations.used_bytes() == 11_111
    reservations.take(1, 1500, lambda _: None)
    assert reservations.used_bytes() == 10_111 + 1500
    os.close(held)
    reservations.give_back(1)
    assert reservations.used_bytes() == 11_111


def test_the_promise_of_a_killed_writer_ends(root: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from evald.trainer.publish.reservation import Reservations;"
        "r = Reservations(Path(sys.argv[1])); r.take(1, 500, lambda _: None);"
        "print(r.used_bytes(), flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, root], capture_output=True, check=False, timeout=60
    )
    assert killed.stdout == b"500\n"
    assert len(list((root / ".evald" / "reserved").iterdir())) == 2
    assert Reservations(root).used_bytes() == 0
    assert [path.name for path in (root / ".evald" / "reserved").iterdir()] == ["lock"]


def test_a_lock_that_is_not_given_back_is_a_refusal(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, "_LOCK_WAIT_S", 0.05)
    (root / ".evald" / "reserved").mkdir()
    held = os.open(root / ".evald" / "reserved" / "lock", os.O_CREAT | os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refusal = take(Room(root), 1, 1, view(root))
    os.close(held)
    assert refusal is not None
    assert refusal.startswith("cannot reserve room for the snapshot: another process holds")


def test_elsewhere_the_daemons_own_numbers_must_do(tmp_path: Path) -> None:
    far = view(Path("/elsewhere"), used_bytes=900_000)
    assert take(Room(tmp_path), 1, 100_000, far) is None
    assert take(Room(tmp_path), 1, 100_001, far) is not None
    assert take(Room(tmp_path), 1, 100_001, far, alive=False) is None
    assert take(Room(tmp_path), 1, 1 << 62, None) is not None  # this file system has not so much
    assert take(Room(tmp_path), 1, 100, view(Path("/elsewhere"), free_bytes=50)) is not None
    least = view(Path("/elsewhere"), free_bytes=150, min_free_bytes=100)
    assert take(Room(tmp_path), 1, 100, least) is not None
    assert take(Room(tmp_path), 1, 100, view(tmp_path, min_free_bytes=1 << 61)) is not None


def test_the_estimate_is_rather_too_large(tmp_path: Path) -> None:
    assert snapshot_bytes(iter(()), None) is None
    assert snapshot_bytes(iter(()), tmp_path / "away") is None
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000_000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1_000_000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(500_000))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "a.jinja").write_bytes(bytes(1000))
    estimate = snapshot_bytes(iter(()), tmp_path)
    assert estimate is not None
    assert 1_501_000 < estimate < 1_700_000


class Bustle:
    """Three writers fill a root, a daemon deletes the oldest snapshots, a sampler looks on."""

    size = 180_000

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done = threading.Event()
        self.published: list[Path] = []
        self.refused: list[int] = []
        self.seen: list[int] = []
        #: odd while files go away: what is added up then was never there at once.
        self.deletions = 0

    def go_on(self, seconds: float) -> None:
        threads = [threading.Thread(target=self.write, args=(number,)) for number in range(3)]
        threads += [threading.Thread(target=work) for work in (self.delete, self.sample)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self.done.set()
        for thread in threads:
            thread.join()

    def write(self, number: int) -> None:
        place = self.root if number == 0 else self.root / f"run{number}"
        place.mkdir(exist_ok=True)
        room, far, step = Room(place), view(self.root), 0

        def build(directory: Path) -> None:
            for part in range(6):
                (directory / f"{part}.safetensors").write_bytes(bytes(self.size // 6 - 200))

        while not self.done.is_set():
            step += 1
            if take(room, step, self.size, far) is not None:
                self.refused.append(number)
                time.sleep(0.001)
                continue
            self.published.append(publish(build, place, step))
            room.give_back(step)

    def delete(self) -> None:
        trash = self.root / ".evald" / "trash"
        trash.mkdir()
        while not self.done.is_set():
            for number in range(self.deletions // 2, len(self.published)):
                self.deletions += 1
                self.published[number].rename(trash / str(number))
                shutil.rmtree(trash / str(number))
                self.deletions += 1
                time.sleep(0.01)
            time.sleep(0.001)

    def sample(self) -> None:
        while not self.done.is_set():
            before, files = self.deletions, dict[int, int]()
            for folder, _, names in os.walk(self.root):
                for name in names:
                    with suppress(FileNotFoundError):
                        status = Path(folder, name).lstat()
                        files[status.st_ino] = status.st_size
            if before % 2 == 0 and before == self.deletions:
                self.seen.append(sum(files.values()))


def test_several_writers_never_exceed_the_budget(root: Path) -> None:
    bustle = Bustle(root)
    bustle.go_on(3.0)
    assert len(bustle.published) > 20
    assert set(bustle.refused) == {0, 1, 2}
    assert len(bustle.seen) > 50
    # the promises are files of six digits
    assert 4 * bustle.size < max(bustle.seen) <= BUDGET + 18
