import asyncio
import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from evald.config import Config, Fleet, Results, Staging
from evald.status import board
from evald.status.board import Board, board_path
from evald.status.view import StatusView


def config_in(directory: Path, *, owned: bool = True) -> Config:
    return Config(
        staging=Staging(root=str(directory / "root"), owned=owned),
        results=Results(dir=str(directory / "results")),
        fleet=Fleet(model="m"),
        eval=[],
    )


class Views:
    def __init__(self) -> None:
        self.beat = 0

    def __call__(self) -> StatusView:
        self.beat += 1
        return StatusView(
            version="1",
            pid=1,
            beat=self.beat,
            time=1.0,
            uptime_s=1.0,
            state="serving",
            run="a",
            results="r",
            cap=2,
        )


async def run_for(the_board: Board, duration_s: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(duration_s):
            await the_board.run()


def beat(path: Path) -> int:
    return msgspec.json.decode(path.read_bytes(), type=StatusView).beat


def test_where_the_board_hangs(tmp_path: Path) -> None:
    assert board_path(config_in(tmp_path)) == tmp_path / "root/.evald/status.json"
    assert board_path(config_in(tmp_path, owned=False)) == tmp_path / "results/status.json"


@pytest.mark.parametrize("owned", [True, False])
async def test_the_beat_goes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, owned: bool
) -> None:
    monkeypatch.setattr(board, "INTERVAL_S", 0.01)
    config = config_in(tmp_path, owned=owned)
    for name in ("root", "results"):
        (tmp_path / name).mkdir()
    views = Views()
    the_board = Board(config, view=views)
    await run_for(the_board, 0.2)
    first = beat(the_board.path)
    assert first >= views.beat - 1 >= 2
    await run_for(the_board, 0.2)
    assert beat(the_board.path) > first
    assert stat.S_IMODE(the_board.path.stat().st_mode) == 0o644
    assert [path.name for path in the_board.path.parent.iterdir()] == ["status.json"]


async def test_a_missing_root_costs_beats_is_told_once_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "INTERVAL_S", 0.01)
    the_board = Board(config_in(tmp_path), view=Views())
    root = tmp_path / "root"
    with capture_logs() as logs:
        await run_for(the_board, 0.2)
        assert [event["event"] for event in logs] == ["board_not_written"]
        assert not root.exists()
        root.mkdir()
        await run_for(the_board, 0.2)
        assert the_board.path.exists()
        shutil.rmtree(root)
        await run_for(the_board, 0.2)
    assert [event["event"] for event in logs] == ["board_not_written"] * 2


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def put(what: str, path: Path, elsewhere: Path) -> None:
    match what:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            (path / "in it").mkdir(parents=True)
        case "link":
            path.symlink_to(elsewhere)
        case "dangling link":
            path.symlink_to(elsewhere.with_name("nothing"))
        case "hard link":
            path.hardlink_to(elsewhere)


@pytest.mark.parametrize("name", [".status.json.new", "status.json"])
@pytest.mark.parametrize("what", ["pipe", "folder", "link", "dangling link", "hard link"])
async def test_what_lies_in_the_way_is_removed_and_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    monkeypatch.setattr(board, "INTERVAL_S", 0.01)
    the_board = Board(config_in(tmp_path), view=Views())
    the_board.path.parent.mkdir(parents=True)
    (mine := tmp_path / "mine").write_text("somebody's")
    put(what, the_board.path.with_name(name), mine)
    with capture_logs() as logs:
        await run_for(the_board, 0.2)
    assert beat(the_board.path) > 1
    assert [path.name for path in the_board.path.parent.iterdir()] == ["status.json"]
    assert mine.read_text() == "somebody's"
    assert names(tmp_path) == ["mine", "root"]
    assert logs == []


async def test_a_link_in_place_of_the_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "INTERVAL_S", 0.01)
    the_board = Board(config_in(tmp_path), view=Views())
    (tmp_path / "root").mkdir()
    (tmp_path / "mine").mkdir()
    the_board.path.parent.symlink_to(tmp_path / "mine")
    with capture_logs() as logs:
        await run_for(the_board, 0.2)
        assert [event["event"] for event in logs] == ["board_not_written"]
        assert list((tmp_path / "mine").iterdir()) == []
        the_board.path.parent.unlink()
        await run_for(the_board, 0.2)
    assert beat(the_board.path) > 1


async def test_a_status_that_utf8_cannot_hold_is_written_readably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "INTERVAL_S", 0.01)
    (tmp_path / "root").mkdir()

    def odd_view() -> StatusView:
        return msgspec.structs.replace(Views()(), results="/x/\udcff")

    the_board = Board(config_in(tmp_path), view=odd_view)
    await run_for(the_board, 0.2)
    assert msgspec.json.decode(the_board.path.read_bytes())["results"] == r"/x/\udcff"
