"""The status socket: served, found, asked; and what stands in its way."""

import argparse
import asyncio
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest

from evald.commands import status as status_command
from evald.commands import wait as wait_command
from evald.config import Config, Fleet, Results, Staging, Status
from evald.errors import EvaldError
from evald.point import Outcome
from evald.results.ledger import Ledger
from evald.results.records import PointRecord
from evald.status import client, sockets
from evald.status.client import NotRunning, fetch_status, find_socket, operate
from evald.status.command import Command
from evald.status.notify import notify
from evald.status.server import StatusServer, socket_path
from evald.status.view import StatusView


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory that is the runtime directory: a socket's path has 107 bytes at most."""
    directory = Path(tempfile.mkdtemp(prefix="evald-test-"))
    monkeypatch.setattr(sockets, "runtime_dirs", lambda: [directory / "run"])
    monkeypatch.setattr(client, "runtime_dirs", lambda: [directory / "run"])
    yield directory
    shutil.rmtree(directory)


def config_in(place: Path, name: str = "results", path: Path | None = None) -> Config:
    return Config(
        run="demo",
        staging=Staging(root=str(place / "root")),
        results=Results(dir=str(place / name)),
        status=Status(socket=None if path is None else str(path)),
        fleet=Fleet(model="m"),
        eval=[],
    )


def make_results_dir(config: Config) -> None:
    Path(config.results.dir).mkdir(exist_ok=True)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[StatusServer]:
    make_results_dir(config)

    def view() -> StatusView:
        return StatusView(
            version="1",
            pid=os.getpid(),
            beat=3,
            time=1.0,
            uptime_s=1.0,
            state="serving",
            run=config.run,
            results=str(config.results_file),
            cap=2,
        )

    async def carry_out(command: Command) -> str:
        if command.verb == "release":
            raise EvaldError("cannot release it")
        return f"did {command.verb} {command.step}"

    server = StatusServer(
        socket_path(config),
        view=view,
        results_file=config.results_file,
        newest_seq=lambda: 0,
        operate=carry_out,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def get(path: Path, url: str) -> tuple[int, str]:
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"http://evald{url}") as response,
    ):
        return response.status, await response.text()


def dead_socket(path: Path) -> None:
    """Leave what a killed daemon leaves: a socket that nobody listens on."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


async def call(command: ModuleType, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return int(await asyncio.to_thread(command.run, parser.parse_args(argv)))


# --- the server


async def test_the_status_is_served_and_the_socket_taken_away(place: Path) -> None:
    async with serving(config_in(place)) as server:
        view = await fetch_status(server.socket)
        assert (view.beat, view.state, view.pid) == (3, "serving", os.getpid())
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o660
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    assert list((place / "run").iterdir()) == []
    assert list((place / "results").iterdir()) == []
    await server.close()


async def test_records_after_a_seq(place: Path) -> None:
    config = config_in(place)
    async with serving(config) as server:
        assert await get(server.socket, "/records") == (200, "")
        ledger = Ledger.open(config.results)
        for step in range(1, 6):
            record_id = f"a/step/{step}/r0"
            await ledger.append(
                PointRecord(run="a", step=step, record_id=record_id, outcome=Outcome.OK)
            )
        ledger.close()
        with config.results_file.open("ab") as out:
            out.write(b'{"half')
        _, body = await get(server.socket, "/records?after=2&limit=2")
        assert [json.loads(line)["seq"] for line in body.splitlines()] == [3, 4]
        assert body.endswith("\n")
        _, body = await get(server.socket, "/records")
        assert body.encode() == config.results_file.read_bytes().removesuffix(b'{"half')
        for query in ("after=x", "after=-1", "limit=%C2%B2"):
            code, sentence = await get(server.socket, f"/records?{query}")
            assert (code, "must be a whole number from 0" in sentence) == (400, True)


async def test_a_dead_daemons_socket_is_replaced(place: Path) -> None:
    config = config_in(place)
    dead_socket(socket_path(config))
    async with serving(config) as server:
        assert (await fetch_status(server.socket)).run == "demo"


async def test_a_live_daemons_socket_is_not(place: Path) -> None:
    path = place / "s.sock"
    async with serving(config_in(place, "one", path)) as server:
        with pytest.raises(EvaldError, match="another daemon answers there; stop it, or set"):
            async with serving(config_in(place, "two", path)):
                pass
        assert (await fetch_status(server.socket)).results == str(place / "one/results.jsonl")


async def test_what_cannot_be_a_socket_is_one_sentence(place: Path) -> None:
    path = place / "file"
    path.touch()
    with pytest.raises(EvaldError, match="a file that is no socket is there"):
        async with serving(config_in(place, path=path)):
            pass
    assert path.exists()
    with pytest.raises(EvaldError, match=r"cannot listen on .*; set status\.socket to a path"):
        async with serving(config_in(place, path=path / "s.sock")):
            pass


async def test_a_socket_that_cannot_be_published_is_given_up(place: Path) -> None:
    config = config_in(place)
    (place / "results" / "status.sock").mkdir(parents=True)
    with pytest.raises(EvaldError, match="cannot listen on"):
        async with serving(config):
            pass
    with pytest.raises(NotRunning):
        find_socket(None)


async def test_close_leaves_the_socket_of_a_successor(place: Path) -> None:
    config = config_in(place)
    async with serving(config) as first:
        first.socket.unlink()
        async with serving(config) as second:
            await first.close()
            assert (await fetch_status(second.socket)).run == "demo"
            assert find_socket(config.results.dir) == second.socket


async def test_the_fallback_directory_is_checked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = place / "run"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setattr("evald.status.server.fallback_dir", lambda: open_to_all)
    monkeypatch.setattr("evald.status.client.fallback_dir", lambda: open_to_all)
    with pytest.raises(EvaldError, match="others may enter it"):
        async with serving(config_in(place)):
            pass
    with pytest.raises(EvaldError, match="others may enter it"):
        find_socket(None)


# --- finding and asking it


async def test_a_daemon_is_found_by_whatever_names_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(place, path=place / "elsewhere.sock")
    monkeypatch.setattr(client, "load_config", lambda _path: config)
    with pytest.raises(NotRunning, match=r"no answer on .*elsewhere\.sock"):
        find_socket("demo.toml")
    with pytest.raises(EvaldError, match="it is no config"):
        find_socket(config.results.dir)
    async with serving(config) as server:
        for target in (
            "demo.toml",
            config.results.dir,
            str(config.results_file),
            str(server.socket),
        ):
            assert find_socket(target) == server.socket
    with pytest.raises(NotRunning, match=r"cannot ask the daemon of .*: none is running"):
        find_socket(config.results.dir)


async def test_the_only_daemon_needs_no_name_and_several_are_named(place: Path) -> None:
    with pytest.raises(NotRunning, match="none of this user's is running"):
        find_socket(None)
    dead_socket(place / "run" / "dead.sock")
    async with serving(config_in(place, "one")) as one:
        assert find_socket(None) == one.socket
        async with serving(config_in(place, "two")) as two:
            with pytest.raises(EvaldError, match="several are running; name one of") as error:
                find_socket(None)
            assert str(one.socket) in str(error.value)
            assert str(two.socket) in str(error.value)


async def test_a_daemon_that_may_not_be_asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(config_in(place)) as server:

        def denied(_path: Path) -> bool:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(client, "answers", denied)
        with pytest.raises(NotRunning):
            find_socket(None)
        with pytest.raises(EvaldError, match=r"cannot ask the daemon at .*: Permission denied"):
            find_socket(str(server.socket))


async def test_a_daemon_that_dies_hangs_or_babbles(place: Path) -> None:
    path = place / "s.sock"
    with pytest.raises(NotRunning):
        await fetch_status(path)

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()
        closed.set()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await close(writer)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await close(writer)

    for behaviour, sentence in ((babble, "cannot understand"), (hang, "within 0.2 s")):
        path.unlink(missing_ok=True)
        closed = asyncio.Event()
        async with await asyncio.start_unix_server(behaviour, path):
            with pytest.raises(EvaldError, match=sentence):
                await fetch_status(path, timeout_s=0.2)
            async with asyncio.timeout(30):
                await closed.wait()


async def test_a_daemon_whose_backlog_is_full_is_alive(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "CONNECT_TIMEOUT_S", 0.05)
    path = place / "s.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        assert sockets.answers(path)


# --- commands


async def test_evald_status(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await call(status_command) == 3
    assert capsys.readouterr().err.count("\n") == 1
    async with serving(config_in(place)) as server:
        capsys.readouterr()  # the server's own log
        assert await call(status_command) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("evald 1  serving  run demo")
        assert max(map(len, lines)) <= 80
        assert await call(status_command, str(server.socket), "--json") == 0
        assert json.loads(capsys.readouterr().out)["beat"] == 3


async def test_evald_wait_finds_the_running_daemons_ledger(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await call(wait_command, "--points", "0", "--timeout", "0.1") == 3
    assert "no daemon is running after 0.1 s" in capsys.readouterr().err
    waiting = asyncio.create_task(call(wait_command, "--points", "0", "--settle", "0"))
    await asyncio.sleep(0.2)
    async with serving(config_in(place)):
        assert await waiting == 0


# --- systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_reaches_the_manager(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, abstract: bool
) -> None:
    name = f"evald-test-{os.getpid()}" if abstract else str(place / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        assert notify("READY=1\nSTATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


async def test_commands_are_carried_out_or_refused_in_words(place: Path) -> None:
    async with serving(config_in(place)) as server:
        assert await operate(server.socket, {"verb": "retry", "step": 4}) == "did retry 4"
        with pytest.raises(EvaldError, match="cannot release it"):
            await operate(server.socket, {"verb": "release", "engine": "e"})
        with pytest.raises(EvaldError, match="cannot understand the command"):
            await operate(server.socket, {"verb": "explode"})
