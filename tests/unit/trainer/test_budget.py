"""The staging root's budget holds for every writer of the SDK, whatever process it is in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import budget_writer
import pytest
import torch
from budget_writer import SIZE

from evald.trainer.contract import NoSpace
from evald.trainer.export import export_snapshot
from evald.trainer.failure import failure_of
from evald.trainer.publish import Draft, NoRoom, publish
from evald.trainer.publish.reservation import Reservations
from evald.trainer.push import carrier_for

BUDGET = 650_000
#: manifests, the promises themselves, and words.
SLACK = 5_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A staging root on which a daemon with a budget has served."""
    path = tmp_path / "root"
    (path / ".evald").mkdir(parents=True)
    allow(path, max_bytes=BUDGET)
    return path


def allow(root: Path, **staging: int | None) -> None:
    (root / ".evald" / "status.json").write_text(json.dumps({"staging": staging}))


def promises(root: Path) -> int:
    folder = root / ".evald" / "reserved"
    return len([path for path in folder.iterdir() if path.name != "lock"]) if folder.exists() else 0


def of(size: int) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        (directory / "file").write_bytes(bytes(size))

    return build


def test_what_does_not_fit_is_refused_before_it_is_built(root: Path) -> None:
    publish(of(400_000), root, 1, size_bytes=400_000)
    built: list[Path] = []
    with pytest.raises(NoRoom, match=r"takes about 0.4 MB, and 0.4 MB of staging.max_bytes = 650"):
        publish(built.append, root, 2, size_bytes=400_000)
    with pytest.raises(NoRoom):  # as much as the largest one there
        publish(built.append, root, 2)
    assert built == []
    assert [path.name for path in root.glob("step_*")] == ["step_1"]
    publish(of(400_000), root, 2, final=True)
    assert promises(root) == 0


def test_more_than_was_reserved_is_refused_in_the_end(root: Path) -> None:
    publish(of(400_000), root, 1)
    with pytest.raises(NoRoom, match=r"0.4 MB"):
        publish(of(400_000), root, 2, size_bytes=100_000)
    assert [path.name for path in root.iterdir() if path.name != ".evald"] == ["step_1"]
    publish(of(100_000), root, 2, size_bytes=400_000 - 200_000)
    assert promises(root) == 0


def test_the_first_of_unknown_size_gets_all_the_room(root: Path) -> None:
    with Draft(root, 1) as draft:
        with pytest.raises(NoRoom):
            publish(of(1000), root, 2)
        of(1000)(draft.directory)
        draft.seal()
    publish(of(1000), root, 2)


def test_dispatcher_and_export_of_a_step_share_one_promise(root: Path) -> None:
    room = Reservations(root, root)
    assert room.take(1, 500_000, lambda _: None) is None
    with pytest.raises(NoRoom):
        publish(of(400_000), root, 2, size_bytes=400_000)
    publish(of(400_000), root, 1, size_bytes=400_000)
    assert promises(root) == 1
    room.give_back(1)
    publish(of(200_000), root, 2, size_bytes=200_000)


def test_a_runs_folder_is_in_the_budget_of_the_root(root: Path) -> None:
    (root / "run").mkdir()
    publish(of(400_000), root / "run", 1)
    with pytest.raises(NoRoom):
        publish(of(400_000), root, 1, size_bytes=400_000)


def test_what_must_stay_free(root: Path) -> None:
    allow(root, max_bytes=None, min_free_bytes=1 << 60)
    with pytest.raises(NoRoom, match="free; make room there"):
        publish(of(10), root, 1, size_bytes=10)


@pytest.mark.parametrize("status", ["", "[]", "{}", '{"staging": null}', '{"staging": {}}'])
def test_without_a_budget_nothing_is_counted(root: Path, status: str) -> None:
    (root / ".evald" / "status.json").write_text(status)
    publish(of(2 * BUDGET), root, 1, size_bytes=2 * BUDGET)
    assert not (root / ".evald" / "reserved").exists()


def test_a_push_reserves_at_the_far_end(root: Path, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    carrier = carrier_for(str(root), root=tmp_path / "spool")
    carrier.carry(publish(of(400_000), tmp_path / "spool", 1))
    second = publish(of(400_000), tmp_path / "spool", 2)
    with pytest.raises(NoSpace, match=r"cannot push step_2 to .*: .* of staging.max_bytes"):
        carrier.carry(second)
    assert [path.name for path in root.iterdir() if path.name != ".evald"] == ["step_1"]
    shutil.rmtree(root / "step_1")
    carrier.carry(second)
    assert promises(root) == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_an_export_reserves_what_it_will_write(root: Path, *, streamed: bool) -> None:
    weights = {"weight": torch.zeros(100_000)}
    export_snapshot(weights, root, step=1, base_dir=None)
    more = iter(weights.items()) if streamed else weights
    with pytest.raises(NoSpace, match=r"cannot export step 2: .* of staging.max_bytes"):
        export_snapshot(more, root, step=2, base_dir=None)
    assert [path.name for path in root.glob("step_*")] == ["step_1"]
    assert promises(root) == 0


def test_no_room_is_no_space_to_training() -> None:
    assert failure_of(NoRoom("the snapshot takes too much")).reason == "no_space"


class Node:
    """Stands in for a daemon that deletes the oldest snapshots, and adds up what lies there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done = threading.Event()
        self.seen: list[int] = []
        #: odd while files go away: what is added up then was never there at once.
        self.deletions = 0
        #: snapshots that have gone, by who wrote them (the thousands of their steps).
        self.gone: Counter[int] = Counter()

    def delete(self) -> None:
        trash = self.root / ".evald" / "trash"
        trash.mkdir()
        while not self.done.is_set():
            time.sleep(0.01)
            for marker in [*self.root.glob("*/.complete"), *self.root.glob("run1/*/.complete")]:
                self.deletions += 1
                gone = marker.parent.rename(trash / str(self.deletions))
                shutil.rmtree(gone)
                self.deletions += 1
                self.gone[int(marker.parent.name.rpartition("_")[2]) // 1000] += 1
                time.sleep(0.02)

    def has_seen_enough(self) -> bool:
        """Whether each of the four has had its turns, and most of them at a full root."""
        turns = self.gone.copy()
        return len(turns) == 4 and min(turns.values()) > 3 and turns.total() > 40

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


def test_four_processes_at_once_never_exceed_the_budget(root: Path, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (root / "run1").mkdir()
    stop, node = tmp_path / "stop", Node(root)
    writers = [
        subprocess.Popen(
            [sys.executable, budget_writer.__file__, how, root, tmp_path / "spool", stop],
            stdout=subprocess.PIPE,
        )
        for how in ("sized", "unsized", "run", "push")
    ]
    threads = [threading.Thread(target=work) for work in (node.delete, node.sample)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and not node.has_seen_enough():
            time.sleep(0.02)
    finally:
        stop.touch()
        said = [writer.communicate(timeout=30)[0].split() for writer in writers]
        node.done.set()
        for thread in threads:
            thread.join()
    assert all(int(published) > 3 for published, _ in said), said
    assert sum(int(refused) for _, refused in said) > 20
    assert len(node.seen) > 50
    assert 3 * SIZE < max(node.seen) <= BUDGET + SLACK
