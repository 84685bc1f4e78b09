import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from staging_cases import MARKER, as_other_user, deep_folders, open_folder, snapshot, staging

from evald.staging import retention as retention_module
from evald.staging.digest import fingerprint
from evald.staging.retention import Retention


class Root:
    """A staging root with a retention whose alerts are kept."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.alerts: list[tuple[str, str]] = []
        self.retention = Retention(staging(path, **config), on_alert=self._hear)

    async def _hear(self, name: str, detail: str) -> None:
        self.alerts.append((name, detail))

    def add(self, name: str, **arguments: Any) -> Path:
        return snapshot(self.path / name, **arguments)

    async def retire(self, directory: Path) -> None:
        await self.retention.retire(directory, fingerprint(directory, MARKER)[0])

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()} - {".evald"}

    @property
    def trash(self) -> list[Path]:
        return list((self.path / ".evald" / "trash").iterdir())


async def test_the_oldest_beyond_keep_goes(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=2)
    for step in range(4):
        await root.retire(root.add(f"step_{step}"))
    assert root.names == {"step_2", "step_3"}
    assert root.trash == []
    assert root.retention.kept == [tmp_path / "step_2", tmp_path / "step_3"]
    one = fingerprint(tmp_path / "step_2", MARKER)[1]
    assert root.retention.used_bytes == 2 * one
    assert root.alerts == []


async def test_keep_0_deletes_at_once(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=0)
    await root.retire(root.add("step_1"))
    assert root.names == set()
    await root.retention.retire(tmp_path / "step_1", "gone already")
    assert root.alerts == []


async def test_what_changed_since_its_end_stays(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=0)
    directory = root.add("step_1")
    before, _ = fingerprint(directory, MARKER)
    (directory / "more").touch()
    await root.retention.retire(directory, before)
    assert root.names == {"step_1"}
    assert not (tmp_path / ".evald").exists()


async def test_what_changed_in_the_ring_stays(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=1)
    await root.retire(root.add("step_1"))
    (tmp_path / "step_1" / "more").touch()
    await root.retire(root.add("step_2"))
    assert root.names == {"step_1", "step_2"}


async def test_a_newer_revision_in_the_same_place_replaces_the_older(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=2)
    directory = root.add("step_1")
    await root.retire(directory)
    await root.retire(root.add("step_2"))
    (directory / "more").touch()
    await root.retire(directory)
    assert root.retention.kept == [tmp_path / "step_2", directory]
    (directory / "even more").touch()
    await root.retention.retire(directory, "of older bytes")
    assert root.retention.kept == [tmp_path / "step_2"]


async def test_nothing_outside_an_owned_root_is_touched(tmp_path: Path) -> None:
    unowned = Root(tmp_path / "unowned", keep=0, owned=False)
    await unowned.retire(unowned.add("step_1"))
    await unowned.retention.sweep()
    owned = Root(tmp_path / "owned", keep=0)
    await owned.retire(snapshot(tmp_path / "base"))
    owned.path.mkdir()
    await owned.retire(owned.path)
    assert (tmp_path / "base").exists()
    assert unowned.names == {"step_1"}


def after_the_move(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]) -> None:
    """Change a snapshot when retention looks at it for the last time."""
    real, calls = fingerprint, 0

    def racing(directory: Path, marker: str) -> tuple[str, int]:
        nonlocal calls
        calls += 1
        if calls == 3:  # in the ring, before the move, after it
            change(directory)
        return real(directory, marker)

    monkeypatch.setattr(retention_module, "fingerprint", racing)


async def test_a_change_at_the_last_moment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(tmp_path, keep=0)
    after_the_move(monkeypatch, lambda directory: (directory / "more").touch())
    await root.retire(root.add("step_1"))
    assert (tmp_path / "step_1" / "more").exists()
    assert root.trash == []
    assert root.alerts == []


async def test_what_cannot_be_put_back_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(tmp_path, keep=0)

    def both(directory: Path) -> None:
        (directory / "more").touch()
        root.add("step_1")

    after_the_move(monkeypatch, both)
    await root.retire(root.add("step_1"))
    ((name, detail),) = root.alerts
    assert name == "snapshot_not_deleted"
    assert "changed after its point had ended: Directory not empty" in detail
    assert len(root.trash) == 1
    await root.retention.sweep()
    assert root.trash == []
    assert root.names == {"step_1"}


async def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    root = Root(tmp_path / "root", keep=0)
    outside = snapshot(tmp_path / "outside" / "step_1")
    inner = root.add("step_3")
    (inner / "link").symlink_to(outside)
    (root.path / "step_1").symlink_to(outside)
    (root.path / "r").symlink_to(tmp_path / "outside")
    for directory in (root.path / "step_1", inner):
        await root.retire(directory)
    assert root.names == {"r"}
    await root.retire(root.path / "r" / "step_1")
    assert (outside / "model.safetensors").exists()
    assert f"{root.path / 'r'} is a symbolic link, or no folder" in root.alerts[0][1]


async def test_a_root_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    root = Root(tmp_path / "root", keep=0)
    await root.retire(root.add("r/step_1"))
    assert root.names == {"r"}
    assert root.alerts == []


async def test_a_deletion_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_LEFTOVERS_S", 0.01)
    root = Root(tmp_path / "root", keep=0)
    root.add("step_1")
    (root.path / ".evald").symlink_to(tmp_path)
    await root.retire(root.path / "step_1")
    async with asyncio.timeout(20):
        sweeping = asyncio.create_task(root.retention.sweep_leftovers())
        await asyncio.sleep(0.05)
        assert root.names == {"step_1"}
        (root.path / ".evald").unlink()
        while root.names:
            await asyncio.sleep(0.01)
        sweeping.cancel()
    assert len(root.alerts) == 1


async def test_a_link_in_place_of_the_trash_is_refused(tmp_path: Path) -> None:
    root = Root(tmp_path / "root", keep=0)
    directory = root.add("step_1")
    (tmp_path / "other" / "trash").mkdir(parents=True)
    (tmp_path / "other" / "trash" / "mine").touch()
    (root.path / ".evald").symlink_to(tmp_path / "other")
    await root.retire(directory)
    await root.retention.sweep()
    assert [name for name, _ in root.alerts] == ["snapshot_not_deleted"] * 2
    assert f"{root.path / '.evald'} is a symbolic link, or no folder" in root.alerts[0][1]
    assert (tmp_path / "other" / "trash" / "mine").exists()
    assert directory.exists()


async def test_folders_of_the_pattern_go_when_they_are_empty(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=0, pattern="ckpt/step_{step}/actor/hf")
    await root.retire(root.add("ckpt/step_1/actor/hf"))
    await root.retire(root.add("ckpt/step_2/actor/hf"))
    (root.add("ckpt/step_3/actor/hf").parent / "optimizer").touch()
    await root.retire(tmp_path / "ckpt/step_3/actor/hf")
    assert root.names == {"ckpt"}
    assert os.listdir(tmp_path / "ckpt") == ["step_3"]  # noqa: PTH208 (names)


async def test_who_may_write_into_the_root_may_reserve_room(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o775)
    await Root(tmp_path / "root").retention.sweep()
    assert (tmp_path / "root" / ".evald" / "reserved").stat().st_mode & 0o777 == 0o775


async def test_leftovers_of_an_earlier_life_are_swept(tmp_path: Path) -> None:
    root = Root(tmp_path)
    await root.retention.sweep()
    snapshot(tmp_path / ".evald" / "trash" / "step_1.abc")
    (tmp_path / ".evald" / "trash" / "link").symlink_to(tmp_path)
    await root.retention.sweep()
    assert root.trash == []


RETIRE = """
root, keep = Path(sys.argv[1]), 0
os.environ["HOME"] = "/"
async def hear(name, detail):
    print(name, detail)
async def main():
    one = retention.Retention(Staging(root=str(root), keep=0), on_alert=hear)
    await one.retire(root / "step_1", digest.fingerprint(root / "step_1", ".complete")[0])
    await one.sweep()
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
asyncio.run(main())
"""


@pytest.mark.parametrize("closed", [".", "step_1", "step_1/adapter"])
def test_what_may_not_be_deleted_is_told(closed: str) -> None:
    with open_folder() as folder:
        (folder / "root").mkdir()
        directory = snapshot(folder / "root" / "step_1")
        (directory / "adapter").mkdir()
        (directory / "adapter" / "a").touch()
        for path in (folder / "root", directory, directory / "adapter"):
            path.chmod(0o777)
        (folder / "root" / closed).chmod(0o555)
        printed = as_other_user(RETIRE, folder / "root")
        is_there = directory.exists()
    assert printed.startswith(f"snapshot_not_deleted cannot delete {directory}: Permission denied")
    assert "run trainer and evald as one user" in printed
    assert is_there is (closed != "step_1/adapter")


async def test_a_link_goes_by_itself(tmp_path: Path) -> None:
    root = Root(tmp_path / "root", keep=1)
    kept = root.add("step_1")
    (root.path / "step_2").symlink_to("step_1")
    await root.retire(root.path / "step_2")
    await root.retire(kept)
    assert root.names == {"step_1"}
    assert kept.is_dir()


async def test_any_depth_of_folders_is_deleted(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=0)
    deep = root.add("step_1")
    with deep_folders(deep, "a", 5000, scratch=tmp_path):
        await root.retire(deep)
        assert root.names == set()
        assert (root.trash, root.alerts) == ([], [])


async def test_a_marker_outside_the_directory_goes_with_it(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=1, marker="../done", pattern="step_{step}/hf")
    for step in range(3):
        directory = root.add(f"step_{step}/hf", marker="../done")
        await root.retention.retire(directory, fingerprint(directory, "../done")[0])
    assert root.names == {"step_2"}
    assert (root.trash, root.alerts) == ([], [])


async def test_a_marker_that_snapshots_share_is_told(tmp_path: Path) -> None:
    root = Root(tmp_path, keep=0, marker="../done")
    directory = root.add("step_1", marker="../done")
    await root.retention.retire(directory, fingerprint(directory, "../done")[0])
    assert root.names == {"step_1", "done"}
    assert "is not its own alone" in root.alerts[0][1]


async def test_what_is_kept_is_out_of_the_ring_and_what_is_deleted_cannot_be(
    tmp_path: Path,
) -> None:
    root = Root(tmp_path, keep=1)
    first = root.add("step_1")
    await root.retire(first)
    second = root.add("step_2")
    # the deletion of the first is under way when it is asked for
    deletion = asyncio.create_task(root.retire(second))
    await asyncio.sleep(0)
    assert not await root.retention.keep(first)
    await deletion
    assert await root.retention.keep(second)
    assert root.retention.kept == []
    await root.retire(root.add("step_3"))
    assert root.names == {"step_2", "step_3"}
