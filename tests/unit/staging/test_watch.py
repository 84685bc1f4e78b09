import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import watchfiles
from staging_cases import as_other_user, open_folder
from structlog.testing import capture_logs

from evald.staging import watch as watch_module
from evald.staging.completeness import Identity, MarkerFile
from evald.staging.watch import Watch, blind_file_system

MOUNTS = """\
22 1 0:20 / / rw,relatime - overlay overlay rw
23 22 0:21 / /dev/shm rw - tmpfs tmpfs rw
24 22 0:22 / {here}/nfs\\040disk rw,shared:1 - nfs4 host:/x rw
25 22 0:23 / {here}/lustre rw - lustre a@tcp:/x rw
26 22 0:24 / {here}/fuse rw - fuse.sshfs x rw
27 22 0:25 / {here}/fuse/local rw - tmpfs tmpfs rw
28 22 0:26 / {here}/both rw - ext4 /dev/x rw
29 22 0:27 / {here}/both rw - fuseblk /dev/x rw
"""


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        (".", None),
        ("nfs disk", "nfs4"),
        ("nfs disk/deep/er", "nfs4"),
        ("nfs disk2", None),
        ("lustre/x", "lustre"),
        ("fuse", "fuse.sshfs"),
        ("fuse/local/x", None),
        ("both", "fuseblk"),
    ],
)
def test_file_systems_that_inotify_cannot_see(
    tmp_path: Path, below: str, expected: str | None
) -> None:
    here = os.path.realpath(tmp_path)
    (tmp_path / "mountinfo").write_text(MOUNTS.format(here=here))
    assert blind_file_system(tmp_path / below, tmp_path / "mountinfo") == expected


def test_this_machine_is_read() -> None:
    assert blind_file_system(Path("/dev/shm")) is None


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch_module, "blind_file_system", lambda _: "nfs4")
    with capture_logs() as logs:
        yield
    assert [entry["event"] for entry in logs] == ["staging_polled"]


def identity(folder: Path) -> Identity:
    status = folder.stat()
    return (status.st_dev, status.st_ino)


async def wait(watch: Watch, unmarked: list[Path]) -> float:
    clock = asyncio.get_running_loop().time
    started = clock()
    await watch.wait(unmarked)
    return clock() - started


def test_looks_become_rarer_with_age(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=2.0)
    ages = [watch.poll_interval_s(age) for age in (0, 60, 600, 6000, 60_000)]
    assert ages == [0.02, 0.02, pytest.approx(0.2), pytest.approx(2.0), 2.0]


@pytest.mark.usefixtures("network")
def test_a_network_is_asked_less_often(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=0.1)
    assert watch.blind_because
    assert watch.poll_interval_s(0) == 0.25


@pytest.mark.usefixtures("network")
async def test_folders_without_events_are_looked_at(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=30)
    assert await watch.arm({tmp_path: identity(tmp_path)})
    assert not await watch.arm({tmp_path: identity(tmp_path)})
    assert await wait(watch, []) < 5  # the first look is news
    task = asyncio.create_task(watch.wait([]))
    _, pending = await asyncio.wait({task}, timeout=0.6)
    assert pending
    (tmp_path / "new").mkdir()
    await asyncio.wait_for(task, 5)
    await watch.close()


async def test_a_marker_ends_the_wait(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=30)
    await watch.arm({})
    (tmp_path / "a").mkdir()
    task = asyncio.create_task(watch.wait([tmp_path / "a", tmp_path / "to" / "come"]))
    await asyncio.sleep(0.1)
    assert not task.done()
    (tmp_path / "a" / "m").touch()
    await asyncio.wait_for(task, 5)


async def test_nothing_ends_the_wait_but_the_interval(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=0.2)
    assert 0.2 <= await wait(watch, [tmp_path]) < 5


async def test_growing_directories_stay_young(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=0.05)
    await watch.wait([tmp_path, tmp_path / "x"])
    young = watch._young[tmp_path]
    young.since -= 1000
    await watch.wait([tmp_path])
    old = young.since
    (tmp_path / "shard").touch()
    os.utime(tmp_path, ns=(1, 1))
    young.due = 0
    await watch.wait([tmp_path])
    assert young.since > old + 500
    await watch.wait([])
    assert watch._young == {}


async def test_a_folder_that_vanished_before_it_was_watched(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=0.1)
    with capture_logs() as logs:
        assert await watch.arm({tmp_path / "gone": (1, 2)})
        await watch.wait([])
        assert await watch.arm({tmp_path / "gone": (1, 2)})  # tried again at the next scan
        await watch.close()
    assert logs == []
    assert not watch.blind_because


async def test_a_kernel_without_events_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "OS file watch limit reached")

    monkeypatch.setattr(watchfiles, "awatch", full)
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=0.1)
    with capture_logs() as logs:
        await watch.arm({tmp_path: identity(tmp_path)})
        await watch.arm({tmp_path: identity(tmp_path)})
    assert [entry["event"] for entry in logs] == ["staging_polled"]
    assert "OS file watch limit reached" in watch.blind_because
    assert watch.poll_interval_s(0) == 0.02
    assert not await watch.arm({tmp_path: identity(tmp_path)})
    await watch.close()


async def test_a_name_that_is_no_text_costs_one_hint(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile("m").hint, scan_interval_s=30)
    here = {tmp_path: identity(tmp_path)}
    with capture_logs() as logs:
        for number in range(2):
            await watch.arm(here)
            os.mkdir(os.fsencode(tmp_path) + b"/\xff%d" % number)  # noqa: PTH102 (no text)
            task = watch._task
            assert task is not None
            await asyncio.wait({task}, timeout=5)
            assert task.done()
        assert await watch.arm(here)  # the listener is another one
    assert [entry["event"] for entry in logs] == ["staging_watch_broken"]
    assert "Unable to decode path" in logs[0]["why"]
    assert "the scan every 30 s; rename or remove a name that is not UTF-8" in logs[0]["why"]
    assert not watch.blind_because
    watch._hint.clear()
    (tmp_path / "step_1").mkdir()
    assert await wait(watch, []) < 5
    await watch.close()


async def test_a_recreated_folder_is_watched_anew(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "root", MarkerFile("m").hint, scan_interval_s=30)
    (tmp_path / "root").mkdir()
    assert await watch.arm({tmp_path / "root": identity(tmp_path / "root")})
    (tmp_path / "root").rename(tmp_path / "old")
    (tmp_path / "root").mkdir()
    assert await watch.arm({tmp_path / "root": identity(tmp_path / "root")})
    watch._hint.clear()
    (tmp_path / "root" / "step_1").mkdir()
    assert await wait(watch, []) < 5
    await watch.close()


def test_a_directory_that_is_closed_meanwhile_is_left_to_the_scan() -> None:
    with open_folder() as folder:
        (folder / "step_1").mkdir(mode=0)
        printed = as_other_user(
            """
from evald.staging.completeness import MarkerFile
from evald.staging.watch import Watch
async def main():
    watch = Watch(Path(sys.argv[1]), MarkerFile(".complete").hint, scan_interval_s=0.1)
    await watch.wait([Path(sys.argv[2])])
asyncio.run(main())
print("waited")
""",
            folder,
            folder / "step_1",
        )
    assert printed == "waited"


def test_many_directories_are_looked_at_less_often(tmp_path: Path) -> None:
    watch = Watch(tmp_path, MarkerFile(".complete").hint, scan_interval_s=2)
    watch._keep_young([tmp_path / f"step_{step}" for step in range(1000)], 0.0)
    assert watch.poll_interval_s(0) == pytest.approx(0.2)
