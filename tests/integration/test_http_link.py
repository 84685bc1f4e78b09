"""HttpLink against the real status server, and against what else may answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from status_stage import TOKEN, stage

from evald.errors import EvaldError
from evald.status.token import TokenError
from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.links import http_link
from evald.trainer.links.http_connection import parse_url
from evald.trainer.links.http_link import HttpLink, Refused

in_thread = asyncio.to_thread


async def test_everything_is_asked_over_one_connection(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 3)
        s.write_samples(b'{"question": "1", "score": 1.0}\n' * 3)
        with closing(HttpLink(s.url, TOKEN)) as link:
            assert await in_thread(link.check)
            connection = link._connection
            assert connection is not None
            status = await in_thread(link.status)
            assert status is not None
            assert (status.beat, status.listen) == (3, s.server.listen)
            records = await in_thread(link.records, 1)
            assert [(record["seq"], record["step"]) for record in records] == [(2, 2), (3, 3)]
            assert await in_thread(link.records, 3) == []
            samples = await in_thread(link.samples, "a/step/1/r0", "math")
            assert samples == [{"question": "1", "score": 1.0}] * 3
            assert await in_thread(link.samples, "a/step/1/r0", "none") is None
            assert link._connection is connection


async def test_all_pages_are_read(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 2345)
        with closing(HttpLink(s.url, TOKEN)) as link:
            records = await in_thread(link.records, 0)
    assert [record["seq"] for record in records] == list(range(1, 2346))


async def test_the_unix_socket_needs_no_token(tmp_path: Path) -> None:
    async with stage(tmp_path, tcp=False) as s:
        for url in (f"unix:{s.server.socket}", f"unix://{s.server.socket}"):
            with closing(HttpLink(url)) as link:
                assert await in_thread(link.check)


async def test_a_wrong_token_is_an_error_of_check_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 1)
        capsys.readouterr()
        with closing(HttpLink(s.url, "wrong")) as link:
            with pytest.raises(Refused, match="does not take the token; give the one of its"):
                await in_thread(link.check)
            for _ in range(3):
                assert await in_thread(link.status) is None
                assert await in_thread(link.records, 0) == []
                assert await in_thread(link.samples, "a/step/1/r0", "math") is None
        assert capsys.readouterr().out.count("evald_not_asked") == 1


async def test_a_wrong_token_is_told_when_a_job_begins(tmp_path: Path) -> None:
    def begin() -> None:
        wrong = "another"
        EvalDispatcher(
            tmp_path / "root", first_step=1, interval=5, mode="reuse", save_interval=5,
            checkpoint_path="/c/{step}", url=s.url, token=wrong,
        )  # fmt: skip

    async with stage(tmp_path) as s:
        with pytest.raises(ValueError, match="does not take the token"):
            await in_thread(begin)


async def test_a_daemon_that_comes_and_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage(tmp_path) as s:
        port = int(s.url.rpartition(":")[2])
        link = HttpLink(s.url, TOKEN)
        assert await in_thread(link.status) is not None
    assert await in_thread(link.check) is False
    for _ in range(3):
        assert await in_thread(link.status) is None
        assert await in_thread(link.records, 0) == []
    assert capsys.readouterr().out.count("evald_not_asked") == 1
    async with stage(tmp_path, port=port) as s:
        assert await in_thread(link.status) is not None
    # the kept connection is dead, and the next daemon answers at the first try
    async with stage(tmp_path, port=port) as s:
        assert await in_thread(link.status) is not None
    link.close()


async def test_the_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    async with stage(tmp_path) as s:
        with closing(HttpLink(s.url, token_file=path)) as link:
            assert await in_thread(link.check)
        monkeypatch.setenv("EVALD_TOKEN", TOKEN)
        with closing(HttpLink(s.url)) as link:
            assert await in_thread(link.check)
        monkeypatch.setenv("EVALD_TOKEN", " ")
        with pytest.raises(TokenError, match="variable EVALD_TOKEN: it is empty"):
            HttpLink(s.url)
        with pytest.raises(ValueError, match="give one of the two"):
            HttpLink(s.url, TOKEN, path)


@pytest.mark.parametrize(
    "url", ["host:8008", "ftp://h:1", "http://", "http://h:x", "http://h:1?a", "unix:s.sock", ""]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="cannot use url"):
        parse_url(url)


def test_urls() -> None:
    place = parse_url("https://proxy/evald/")
    assert (place.scheme, place.host, place.port, place.prefix) == ("https", "proxy", 443, "/evald")
    place = parse_url("http://[::1]:8008")
    assert (place.scheme, place.host, place.port, place.prefix) == ("http", "::1", 8008, "")


# --- what else may answer


@contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answer each connection with ``serve``; gives the URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def raw(answer: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    return serve


def trickle(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    try:
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.05)
    except OSError:
        return  # nobody reads any more, as it should be


def dripping(start: bytes, piece: bytes, pause_s: float = 0.05) -> Callable[[socket.socket], None]:
    """Never be silent for as long as the timeout, and never come to an end."""

    def serve(connection: socket.socket) -> None:
        try:
            connection.recv(65536)
            connection.sendall(start)
            for _ in range(200):
                connection.sendall(piece)
                time.sleep(pause_s)
        except OSError:
            return

    return serve


def page(lines: bytes, headers: bytes = b"") -> Callable[[socket.socket], None]:
    length = b"content-length: %d\r\n" % len(lines)
    return raw(b"HTTP/1.1 200 OK\r\n" + headers + length + b"\r\n" + lines)


def hang(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


@pytest.mark.parametrize(
    "serve",
    [
        hang,
        trickle,
        dripping(b"", b"H"),
        dripping(b"HTTP/1.1 200 OK\r\n", b"x"),
        dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        dripping(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
        dripping(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"0"),
        dripping(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
        page(b"{}\n", b"Evald-Last-Seq: " + b"9" * 5000 + b"\r\n"),
        page(b'{"seq": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
        page(b'{"seq": ' + b"9" * 5000 + b"}\n"),
        page(b'{"seq": "\xff"}\n'),
        raw(b""),
        raw(b"SSH-2.0-x\r\n"),
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"),
        raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"),
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"),
        raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n\xff\n"),
        raw(b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno"),
    ],
)
def test_whatever_answers_training_goes_on_in_time(serve: Callable[[socket.socket], None]) -> None:
    with answering(serve) as url:
        link = HttpLink(url, TOKEN, timeout_s=0.3, samples_timeout_s=0.3)
        begun = time.monotonic()
        assert link.status() is None
        assert link.records(0) == []
        assert link.samples("a/step/1/r0", "math") is None
        assert time.monotonic() - begun < 9
        link.close()


@pytest.mark.parametrize(
    "seq", [b'"7"', b"null", b"true", b"-1", b"1.5", b"[]", b"9999999999999999999"]
)
def test_a_line_that_is_no_record_is_passed_by(
    seq: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b'{"seq": 1}\n{"seq": ' + seq + b'}\n\xff{\n{"seq": 3}\n'
    with answering(page(lines)) as url:
        link = HttpLink(url, TOKEN)
        assert link.records(0) == [{"seq": 1}, {"seq": 3}]
        link.close()
    assert capsys.readouterr().out.count("cannot understand what answers") == 1


def ledger(*lines: bytes) -> Callable[[socket.socket], None]:
    """Serve what follows the seq that is asked for; line n has seq n. One line for each answer."""

    def serve(connection: socket.socket) -> None:
        asked = int(connection.recv(65536).partition(b"after=")[2].split()[0])
        newest = b"Evald-Last-Seq: %d\r\n" % len(lines)
        line = b"".join(lines[asked : asked + 1])
        length = b"content-length: %d\r\n\r\n" % len(line)
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + newest + length + line)

    return serve


def record(seq: int, name: str) -> bytes:
    return b'{"seq": %d, "record_id": "%s"}\n' % (seq, name.encode())


def test_a_page_that_is_unreadable_hides_none_behind_it() -> None:
    with answering(ledger(record(1, "a"), b"rubbish\n", record(3, "c"))) as url:
        link = HttpLink(url, TOKEN)
        assert [one["seq"] for one in link.records(0)] == [1, 3]
        assert link.records(3) == []
        assert link.restarts == 0
        link.close()


def test_a_ledger_that_took_the_place_of_the_one_read_hides_nothing() -> None:
    lines = [record(1, "a"), record(2, "b")]
    serving = [ledger(*lines)]

    def serve(connection: socket.socket) -> None:
        serving[0](connection)

    with answering(serve) as url:
        link = HttpLink(url, TOKEN)
        assert [one["seq"] for one in link.records(0)] == [1, 2]
        serving[0] = ledger(*lines, record(3, "c"))
        assert [one["seq"] for one in link.records(2)] == [3]
        assert link.restarts == 0
        # it has as many records already
        serving[0] = ledger(*(record(seq, "new") for seq in (1, 2, 3, 4)))
        assert link.records(3) == []
        assert link.restarts == 1
        assert [one["seq"] for one in link.records(0)] == [1, 2, 3, 4]
        link.close()


def test_a_record_that_takes_longer_than_the_timeout_comes_with_a_later_call() -> None:
    body = b'{"seq": 1, "text": "' + b"x" * 60 + b'"}\n'
    start = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)

    def slowly(connection: socket.socket) -> None:
        try:
            connection.recv(65536)
            connection.sendall(start)
            for place in range(0, len(body), 4):
                connection.sendall(body[place : place + 4])
                time.sleep(0.02)
        except OSError:
            return

    with answering(slowly) as url:
        link = HttpLink(url, TOKEN, timeout_s=0.2)
        calls = 0
        while not (found := link.records(0)):
            calls += 1
            assert calls < 5
        assert found[0]["seq"] == 1
        assert calls
        link.close()


def test_whole_records_of_an_answer_that_was_cut_off_count() -> None:
    start = b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"seq": 1}\n{"seq": 2}\n{"se'
    with answering(dripping(start, b"x")) as url:
        link = HttpLink(url, TOKEN, timeout_s=0.3, samples_timeout_s=0.3)
        begun = time.monotonic()
        assert link.records(0) == [{"seq": 1}, {"seq": 2}]
        assert link.samples("a/step/1/r0", "math") is None  # half of them is no answer
        assert time.monotonic() - begun < 9
        link.close()


def test_an_answer_without_end_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_link, "_MOST_SAMPLES_BYTES", 1 << 20)
    start = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    with answering(dripping(start, b"{}\n" * 100_000, 0)) as url:
        link = HttpLink(url, TOKEN)
        assert link.samples("a/step/1/r0", "math") is None
        link.close()
    assert "the answer has more than 1 MiB" in capsys.readouterr().out


def test_what_is_no_evald_is_told_at_the_start() -> None:
    with answering(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")) as url:
        link = HttpLink(url, TOKEN)
        with pytest.raises(EvaldError, match=r"cannot understand what answers .*is it an evald"):
            link.check()
        link.close()


def test_a_name_that_is_not_resolved_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        released.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    link = HttpLink("http://somewhere:1", TOKEN, timeout_s=0.2)
    begun = time.monotonic()
    assert link.status() is None
    assert time.monotonic() - begun < 9
    released.set()
