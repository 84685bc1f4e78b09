"""Deletions in a tree that somebody made to lead them astray."""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from staging_cases import MARKER, as_other_user, deep_folders, open_folder, snapshot, staging

from evald.staging.digest import fingerprint
from evald.staging.inside import LeadsOut, folder_of, own_folder, remove
from evald.staging.retention import Retention


class World:
    """A trash folder to delete in, and an outside that must stay as it is."""

    def __init__(self, path: Path) -> None:
        self.outside = path / "outside"
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "file").write_text("precious")
        (self.outside / "folder" / "file").write_text("precious too")
        self.trash = path / "root" / "trash"
        self.victim = self.trash / "victim"
        self.victim.mkdir(parents=True)

    def remove(self) -> None:
        with own_folder(self.trash.parent, "trash") as trash:
            remove("victim", trash)

    @property
    def is_whole(self) -> bool:
        return (
            (self.outside / "file").read_text() == "precious"
            and (self.outside / "folder" / "file").read_text() == "precious too"
            and sorted(path.name for path in self.outside.iterdir()) == ["file", "folder"]
        )

    @property
    def left(self) -> list[Path]:
        return list(self.trash.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_links_go_and_what_they_lead_to_stays(world: World) -> None:
    deep = world.victim / "a" / "b"
    deep.mkdir(parents=True)
    for place in (world.victim, deep):
        (place / "to_file").symlink_to(world.outside / "file")
        (place / "to_folder").symlink_to(world.outside / "folder")
        (place / "to_nothing").symlink_to("/nowhere")
        (place / "to_itself").symlink_to("to_itself")
        (place / "up").symlink_to("../../..")
        (place / "hard").hardlink_to(world.outside / "file")
    world.remove()
    assert world.left == []
    assert world.is_whole
    assert (world.outside / "file").stat().st_nlink == 1


def test_a_link_as_the_victim_itself(world: World) -> None:
    world.victim.rmdir()
    world.victim.symlink_to(world.outside / "folder")
    world.remove()
    assert world.left == []
    assert world.is_whole


def test_odd_names_and_kinds_of_files(world: World) -> None:
    for name in ("new\nline", "\x1b[31m", "-rf", " ", "ä" * 120, "*", "..."):
        (world.victim / name).mkdir()
        (world.victim / name / name).touch()
    raw = os.fsencode(world.victim) + b"/\xff\xfe"
    os.mkdir(raw)  # noqa: PTH102 (a name that is no text)
    os.mkfifo(raw + b"/pipe")
    world.remove()
    assert world.left == []


def test_any_depth_takes_two_descriptors(world: World, tmp_path: Path) -> None:
    with deep_folders(world.victim, "d", 5000, scratch=tmp_path / "root"):
        world.remove()
        assert world.left == []


def test_closed_folders_of_our_own_are_opened() -> None:
    with open_folder() as folder:
        folder.chmod(0o777)
        printed = as_other_user(
            """
root = Path(sys.argv[1])
for mode in (0o000, 0o100, 0o500, 0o300):
    path = root / "trash" / "victim" / f"{mode:o}" / "inner"
    path.mkdir(parents=True)
    (path / "file").touch()
    path.chmod(mode)
    path.parent.chmod(mode)
with inside.own_folder(root, "trash") as trash:
    inside.remove("victim", trash)
print(os.listdir(root / "trash"))
""",
            folder,
        )
    assert printed == "[]"


def test_a_fault_costs_only_what_it_holds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (world.victim / name).mkdir()
        (world.victim / name / "file").touch()
    real = os.unlink

    def refuse_b(name: str, *, dir_fd: int) -> None:
        if name == "file" and not refused:
            refused.append(name)
            raise PermissionError(1, "no")
        real(name, dir_fd=dir_fd)

    refused: list[str] = []
    monkeypatch.setattr(os, "unlink", refuse_b)
    with pytest.raises(OSError, match="no"):
        world.remove()
    assert len([path for path in world.trash.rglob("*") if path.is_file()]) == 1


@pytest.fixture
def mounted(world: World) -> Iterator[World]:
    """Mount the outside, a file of it and a tmpfs into the victim; only root can."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    done = []
    try:
        for name, source in (("bound", "folder"), ("bound_file", "file"), ("tmpfs", None)):
            place = world.victim / "inner" / name
            place.parent.mkdir(exist_ok=True)
            place.touch() if name == "bound_file" else place.mkdir()
            words = ["--bind", world.outside / source] if source else ["-t", "tmpfs", "none"]
            mount = subprocess.run(["mount", *words, place], capture_output=True, check=False)
            if mount.returncode:
                pytest.skip(f"this machine mounts nothing: {mount.stderr.decode()}")
            done.append(place)
        (world.victim / "inner" / "tmpfs" / "file").touch()
        yield world
    finally:
        for place in done:
            at = next(iter(world.trash.rglob(place.name)))
            subprocess.run(["umount", at], check=True)


def test_what_is_mounted_is_not_entered(mounted: World) -> None:
    (mounted.victim / "other").mkdir()
    (mounted.victim / "other" / "file").touch()
    with pytest.raises(OSError, match="busy"):
        mounted.remove()
    assert mounted.is_whole
    assert list(mounted.trash.rglob("tmpfs/file"))
    assert not list(mounted.trash.rglob("other"))


def test_a_folder_that_becomes_a_link_meanwhile(world: World) -> None:
    """Swap folders for links to the outside, and back, while they are deleted."""
    stop = threading.Event()
    spare = world.victim.parent.parent / "spare"
    spare.mkdir()

    def swap() -> None:
        number = 0
        while not stop.is_set():
            with suppress(OSError):  # the victim itself may go between two looks
                for path in list(world.victim.glob("*")):
                    number += 1
                    with suppress(OSError):
                        path.rename(spare / str(number))
                        path.symlink_to(world.outside / "folder")

    for number in range(300):
        (world.victim / f"f{number}" / "inner").mkdir(parents=True)
        (world.victim / f"f{number}" / "inner" / "file").touch()
    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        deadline = time.monotonic() + 30
        while len(list(spare.iterdir())) <= 10 and time.monotonic() < deadline:
            time.sleep(0.001)
        for _ in range(20):
            try:
                world.remove()
            except OSError:
                continue
    finally:
        stop.set()
        swapper.join()
    assert world.is_whole
    assert len(list(spare.iterdir())) > 10


def test_the_way_there_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside" / "b").mkdir(parents=True)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").symlink_to("../outside")
    (tmp_path / "root" / "file").touch()
    for path in ("a/b/c", "file/b", "../outside/b", "."):
        with pytest.raises(LeadsOut), folder_of(tmp_path / "root", tmp_path / "root" / path):
            pass
    with pytest.raises(LeadsOut), own_folder(tmp_path / "root", "a/b"):
        pass


async def test_a_run_folder_that_becomes_a_link_before_the_move(tmp_path: Path) -> None:
    """The snapshot looks the same through the link: only the way there tells."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    directory = snapshot(root / "run" / "step_1")
    before = fingerprint(directory, MARKER)[0]
    (root / "run").rename(outside)
    (root / "run").symlink_to(outside)
    alerts = []

    async def hear(name: str, detail: str) -> None:
        await asyncio.sleep(0)
        alerts.append((name, detail))

    retention = Retention(staging(root, keep=0), on_alert=hear)
    await retention.retire(directory, before)
    await retention.consume(directory / MARKER)
    assert (outside / "step_1" / MARKER).exists()
    assert (outside / "step_1" / "model.safetensors").exists()
    assert [name for name, _ in alerts] == ["snapshot_not_deleted"]
