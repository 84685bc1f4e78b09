"""The daemon's HTTP API over TCP: its token, long polls, samples, and commands by URL."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import time
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from page_stage import fill
from status_stage import TOKEN, Stage, stage

from evald.commands import ctl, report, status, tail, wait
from evald.errors import EvaldError
from evald.results.compressed import compress
from evald.results.modes import Modes
from evald.status import client, routes
from evald.status.client import NotRunning, Remote, fetch_records, fetch_status, operate
from evald.status.command import Command
from evald.status.remote_ledger import RemoteLedger
from evald.status.server import MAX_CONNECTIONS


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


async def call(command: ModuleType, *argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    args = parser.parse_args([str(word) for word in argv])
    return int(await asyncio.to_thread(command.run, args))


# --- the token


@pytest.mark.parametrize(
    "token",
    [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "ü"],
    # (the token is another one in each process that runs tests)
    ids=["none", "empty", "wrong", "longer", "shorter", "not ascii"],
)
@pytest.mark.parametrize("path", ["/status", "/records", "/samples", "/nothing"])
async def test_nothing_is_answered_without_the_token(
    tmp_path: Path, token: str | None, path: str
) -> None:
    async with stage(tmp_path) as s:
        code, sentence = await s.get(path, token)
        assert code == 401
        assert sentence == (
            "cannot answer: the token is missing or wrong; send the header "
            "Authorization: Bearer TOKEN\n"
        )


async def test_commands_need_the_token_and_the_socket_does_not(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        with pytest.raises(EvaldError, match=r"refuses the token; give the right one with --token"):
            await operate(Remote(s.url, "wrong"), {"verb": "drain"})
        remote = Remote(s.url, TOKEN)
        assert await operate(remote, {"verb": "retry", "step": 4}) == "did retry 4"
        with pytest.raises(EvaldError, match="cannot release it"):
            await operate(remote, {"verb": "release", "engine": "e"})
        assert await operate(s.server.socket, {"verb": "pause"}) == "did pause None"
        assert (await fetch_status(remote)).listen == s.server.listen
        assert (await fetch_status(s.server.socket)).listen == s.server.listen


async def test_wrong_tokens_are_logged_once_a_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage(tmp_path) as s:
        for _ in range(5):
            await s.get("/status", "wrong")
    out = capsys.readouterr().out
    assert out.count("status_denied") == 1
    assert TOKEN not in out


# --- the listener


async def test_without_an_address_there_is_no_tcp(tmp_path: Path) -> None:
    async with stage(tmp_path, tcp=False) as s:
        assert (await fetch_status(s.server.socket)).listen is None


async def test_many_silent_connections_cost_no_others(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        host, _, port = str(s.server.listen).rpartition(":")
        opened = []
        try:
            for _ in range(3 * MAX_CONNECTIONS):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /status HTTP/1.1\r\nX: ")
                opened.append((reader, writer))
            assert (await fetch_status(Remote(s.url, TOKEN))).run == "demo"
            # the oldest were closed, and only they
            assert await asyncio.wait_for(opened[0][0].read(), 10) == b""
            assert not opened[-1][0].at_eof()
        finally:
            for _, writer in opened:
                writer.close()


async def test_ipv6(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        print("no IPv6 on this machine: only the refusal can be tested")
        with pytest.raises(EvaldError, match=r"cannot listen on \[::1\]:0"):
            async with stage(tmp_path, host="::1"):
                pass
        return
    async with stage(tmp_path, host="::1") as s:
        assert s.url.startswith("http://[::1]:")
        assert (await fetch_status(Remote(s.url, TOKEN))).run == "demo"


async def test_a_taken_port_is_one_sentence_and_leaves_no_socket(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EvaldError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use; set"):
            async with stage(tmp_path, port=port):
                pass
    assert not (tmp_path / "s.sock").exists()
    assert not (tmp_path / "status.sock").is_symlink()


async def test_nobody_listens_after_close(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        url = s.url
        await fetch_status(Remote(url, TOKEN))
    with pytest.raises(NotRunning, match=f"cannot ask the daemon at {url}: none is running"):
        await fetch_status(Remote(url, TOKEN))


# --- records


async def test_records_come_in_pages_with_the_newest_seq(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 7)
        code, body = await s.get("/records?after=2&limit=3")
        assert code == 200
        assert [json.loads(line)["seq"] for line in body.splitlines()] == [3, 4, 5]
        lines, newest = await fetch_records(Remote(s.url, TOKEN), 7)
        assert (lines, newest) == ([], 7)
        code, sentence = await s.get("/records?wait_s=soon")
        assert code == 400
        assert "cannot use wait_s='soon': it must be a number of seconds from 0" in sentence
        assert (await s.get("/records?wait_s=nan"))[0] == 400


async def test_a_long_poll_answers_as_soon_as_there_is_a_record(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 1)
        remote = Remote(s.url, TOKEN)
        begun = time.monotonic()
        waiting = asyncio.create_task(fetch_records(remote, 1, wait_s=20))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await s.add_points(2, 2)
        lines, newest = await waiting
        assert [json.loads(line)["step"] for line in lines] == [2]
        assert newest == 2
        assert time.monotonic() - begun < 10
        begun = time.monotonic()
        assert await fetch_records(remote, 2, wait_s=0.3) == ([], 2)
        assert 0.3 <= time.monotonic() - begun < 5


async def test_the_wait_is_bounded_and_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as s:
        remote = Remote(s.url, TOKEN)
        waiting = asyncio.create_task(fetch_records(remote, 0, wait_s=1000))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        await s.server.close()
        assert await waiting == ([], 0)
        assert time.monotonic() - begun < 10
    monkeypatch.setattr(routes, "MAX_WAIT_S", 0.2)
    async with stage(tmp_path) as s:
        assert await fetch_records(Remote(s.url, TOKEN), 0, wait_s=1000) == ([], 0)


# --- samples


async def test_samples_are_streamed_whole_lines_only(tmp_path: Path) -> None:
    whole = b"".join(
        b'{"question": "%d", "response": "%s"}\n' % (i, b"x" * 900) for i in range(900)
    )
    async with stage(tmp_path) as s:
        s.write_samples(whole + b'{"question": "torn')
        code, body = await s.get("/samples?record_id=a/step/1/r0&set=math")
        assert code == 200
        assert body.encode() == whole
        s.write_samples(b"", name="empty")
        assert await s.get("/samples?record_id=a/step/1/r0&set=empty") == (200, "")
        s.write_samples(whole)  # as it is once the point has ended
        assert compress(s.work / "samples/a/step_1.r0/math.jsonl", Modes(), lambda: False)
        assert await s.get("/samples?record_id=a/step/1/r0&set=math") == (200, whole.decode())


async def test_unknown_samples_are_404_with_a_sentence(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        s.write_samples(b"{}\n")
        for query, sentence in (
            ("record_id=a/step/2/r0&set=math", "there are none of set math of a/step/2/r0"),
            ("record_id=a/step/1/r0&set=none", "there are none of set none of a/step/1/r0"),
            ("record_id=a/step/1/r0&set=../../../../x", "it must be the name of an eval set"),
            ("record_id=../a/step/1/r0&set=math", "it must be a point's"),
            ("set=math", "it must be a point's"),
        ):
            code, body = await s.get(f"/samples?{query}")
            assert code == 404
            assert sentence in body


async def test_a_reader_of_samples_that_takes_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_STUCK_S", 0.2)
    async with stage(tmp_path) as s:
        s.write_samples(b'{"x": "%s"}\n' % (b"x" * 1000) * 50_000)
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
            session.get(f"{s.url}/samples?record_id=a/step/1/r0&set=math") as response,
        ):
            assert response.status == 200
            await asyncio.sleep(1.0)  # takes nothing: that is what is tested
            with pytest.raises(aiohttp.ClientError):
                await response.read()


# --- commands by URL


async def test_status_and_ctl_take_a_url(
    tmp_path: Path,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EVALD_TOKEN", raising=False)
    async with stage(tmp_path) as s:
        capsys.readouterr()
        assert await call(status, s.url, "--token-file", token_file) == 0
        assert f"listens  {s.server.listen} (with its token)" in capsys.readouterr().out
        with pytest.raises(EvaldError, match="refuses the token"):
            await call(status, s.url)
        monkeypatch.setenv("EVALD_TOKEN", TOKEN)
        assert await call(ctl, "retry", 4, "--target", s.url) == 0
        assert capsys.readouterr().out.endswith("did retry 4\n")
        url = s.url
    assert await call(status, url) == 3
    assert await call(ctl, "pause", "--target", url) == 3


async def test_tail_and_wait_take_a_url(
    tmp_path: Path,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EVALD_TOKEN", raising=False)
    async with stage(tmp_path) as s:
        await s.add_points(1, 2500)
        capsys.readouterr()
        word = ("--token-file", token_file)
        assert await call(tail, s.url, "--once", "--after", 100, *word) == 0
        printed = capsys.readouterr().out
        assert printed.encode() == b"".join(
            line for line in s.ledger.path.read_bytes().splitlines(keepends=True)[100:]
        )
        points = ("--points", 2500, "--settle", 0)
        assert await call(wait, s.url, *points, "--ok", *word) == 0
        assert capsys.readouterr().out == "2500 points have ended: 2500 ok\n"
        assert await call(wait, s.url, "--points", 2499, *word) == 1
        assert await call(wait, s.url, "--points", 2501, "--timeout", 0.2, *word) == 3
        url = s.url
    assert await call(tail, url, "--once", *word) == 3
    assert "none is running there" in capsys.readouterr().err
    assert await call(wait, url, "--points", 1, "--timeout", 0.2, *word) == 3
    assert f"in {url}/records: cannot ask the daemon at {url}: none" in capsys.readouterr().err


async def test_a_report_of_a_url_is_that_of_the_files(
    tmp_path: Path,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EVALD_TOKEN", raising=False)
    made = [tmp_path / f"{number}.html" for number in range(2)]
    async with stage(tmp_path) as s:
        word = ("--token-file", token_file)
        with pytest.raises(EvaldError, match=r"cannot report on http.*: it has no records"):
            await call(report, s.url, *word)
        await fill(s, "demo", 10)
        (tmp_path / "samples" / "demo" / "step_200.r0" / "math500.jsonl").unlink()
        capsys.readouterr()
        assert await call(report, s.url, "-o", made[0], *word) == 0
        assert f"{made[0]}: 11 points, 40 samples, " in capsys.readouterr().out
        assert await call(report, tmp_path, "-o", made[1]) == 0
        of_url, of_files = (re.sub('"made":[0-9.]+', "", path.read_text()) for path in made)
        assert of_url == of_files
        url = s.url
    with pytest.raises(EvaldError, match="none is running there"):
        await call(report, url, *word)


async def test_another_ledger_is_read_from_its_start(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 5)
        port = int(s.url.rpartition(":")[2])
        reader = RemoteLedger(Remote(s.url, TOKEN))
        assert len(await asyncio.to_thread(reader.read)) == 5
    assert await asyncio.to_thread(reader.read) == []
    assert "none is running" in reader.fault
    (tmp_path / "results.jsonl").rename(tmp_path / "old.jsonl")
    (tmp_path / "results.lock").unlink()  # (it knows where the old one ended)
    async with stage(tmp_path, port=port) as s:
        await s.add_points(8, 9)
        assert await asyncio.to_thread(reader.read) == []
        assert (reader.fault, reader.restarts) == ("", 1)
        lines = await asyncio.to_thread(reader.read)
        assert [json.loads(line)["step"] for line in lines] == [8, 9]


async def test_a_reload_is_waited_for_and_other_verbs_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Stage):
        async def operate(self, command: Command) -> str:
            await asyncio.sleep(0.5)
            return f"did {command.verb}"

    monkeypatch.setenv("EVALD_TOKEN", TOKEN)
    monkeypatch.setattr(client, "TIMEOUT_S", 0.1)
    async with stage(tmp_path, kind=Slow) as s:
        assert await call(ctl, "reload", "--target", s.url) == 0
        assert capsys.readouterr().out.endswith("did reload\n")
        with pytest.raises(EvaldError, match=r"cannot ask the daemon at .*: no answer within 0\.1"):
            await call(ctl, "pause", "--target", s.url)
