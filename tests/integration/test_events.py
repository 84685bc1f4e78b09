"""The stream of events and the page's other answers, over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from page_stage import BusyStage, fill
from status_stage import TOKEN, Stage, stage
from training_run import find_question, write_samples

from evald.point import Outcome
from evald.results.records import PointRecord
from evald.status import events
from evald.status.events import MAX_STREAMS

WORD = {"Authorization": f"Bearer {TOKEN}"}


class Stream:
    """Reads events one by one."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self, *kinds: str) -> tuple[str, int | None, Any]:
        """Return the next event (of these kinds): its name, id and data."""
        async with asyncio.timeout(20):
            while True:
                lines = (
                    (await self.response.content.readuntil(b"\n\n")).decode().strip().split("\n")
                )
                fields = dict(line.split(": ", 1) for line in lines)
                seq = int(fields["id"]) if "id" in fields else None
                if not kinds or fields["event"] in kinds:
                    return fields["event"], seq, json.loads(fields["data"])


@asynccontextmanager
async def listening(
    s: Stage, query: str = "", headers: dict[str, str] | None = None
) -> AsyncIterator[Stream]:
    async with (
        aiohttp.ClientSession(headers=WORD, read_bufsize=1 << 24) as session,
        session.get(f"{s.url}/events{query}", headers=headers) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield Stream(response)


async def test_history_then_what_is_new(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 450)
        async with listening(s) as stream:
            assert (await stream.next())[0] == "status"
            steps = []
            for last in (200, 400, 450):
                _, seq, data = await stream.next("records", "live")
                assert seq == data["last_seq"] == last
                steps += [one["step"] for one in data["records"]]
            assert steps == list(range(1, 451))
            assert (await stream.next("records", "live"))[0] == "live"
            await s.add_points(451, 451)
            assert (await stream.next("records"))[1] == 451


async def test_it_goes_on_after_the_last_seen_one(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.add_points(1, 5)
        async with listening(s, "?after=3") as stream:
            assert [one["step"] for one in (await stream.next("records"))[2]["records"]] == [4, 5]
        async with listening(s, "?after=1", {"Last-Event-ID": "4"}) as stream:
            assert [one["step"] for one in (await stream.next("records"))[2]["records"]] == [5]
        # who has seen more has read another ledger
        async with listening(s, "?after=99") as stream:
            assert (await stream.next("reset", "records", "live"))[0] == "reset"
            assert (await stream.next("records"))[1] == 5
        for query in ("?after=-1", "?after=x", "?after=%C2%B2"):
            assert (await s.get(f"/events{query}"))[0] == 400


async def test_a_status_that_stays_is_told_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "STATUS_S", 0.3)
    monkeypatch.setattr(events, "IDLE_STATUS_S", 4.0)
    async with stage(tmp_path, kind=BusyStage) as s, listening(s) as stream:
        assert isinstance(s, BusyStage)
        assert (await stream.next("status"))[2]["running"][0]["sets"][1]["done"] == 60
        begun = time.monotonic()
        s.done = 61
        assert (await stream.next("status"))[2]["running"][0]["sets"][1]["done"] == 61
        assert 0.2 < time.monotonic() - begun < 3.5
        begun = time.monotonic()
        await stream.next("status")
        assert time.monotonic() - begun > 1.2


async def test_streams_are_few_and_end_with_the_server(tmp_path: Path) -> None:
    async with stage(tmp_path) as s, aiohttp.ClientSession(headers=WORD) as session:
        opened = [await session.get(f"{s.url}/events") for _ in range(MAX_STREAMS)]
        code, sentence = await s.get("/events")
        assert (code, sentence) == (
            503,
            f"cannot open another stream: {MAX_STREAMS} are open; close a page\n",
        )
        opened.pop().close()
        async with asyncio.timeout(10):
            while (another := await session.get(f"{s.url}/events")).status != 200:
                await asyncio.sleep(0.05)
        begun = time.monotonic()
        await s.server.close()
        assert time.monotonic() - begun < 10
        assert b"event: status" in await another.content.read()
        for one in opened:
            one.close()


async def test_a_reader_that_takes_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events, "STUCK_S", 0.3)
    async with stage(tmp_path) as s:
        for step in range(80):
            record_id = f"a/step/{step}/r0"
            await s.ledger.append(
                PointRecord(
                    run="a",
                    step=step,
                    record_id=record_id,
                    outcome=Outcome.OK,
                    detail="x" * 200_000,
                )
            )
        host, port = s.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        writer.write(
            f"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        out = ""
        async with asyncio.timeout(30):
            while "event_reader_stuck" not in out:
                out += capsys.readouterr().out
                await asyncio.sleep(0.1)
        writer.close()
        assert len(await _rest(reader)) < 80 * 200_000
        assert (await s.get("/status"))[0] == 200


async def _rest(reader: asyncio.StreamReader) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(1 << 20):
            got += chunk
    return got


async def test_files_of_the_page_need_no_token_and_may_do_nothing_else(tmp_path: Path) -> None:
    async with stage(tmp_path) as s, aiohttp.ClientSession() as session:
        for path, kind in (
            ("/", "text/html"),
            ("/assets/app.js", "text/javascript"),
            ("/assets/style.css", "text/css"),
            ("/assets/vendor/uPlot.iife.min.js", "text/javascript"),
        ):
            async with session.get(f"{s.url}{path}") as response:
                assert (response.status, response.content_type) == (200, kind)
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                etag = response.headers["ETag"]
            async with session.get(f"{s.url}{path}", headers={"If-None-Match": etag}) as response:
                assert response.status == 304
        for path in ("/assets/", "/assets/vendor", "/assets/../routes.py", "/assets/%2e%2e/view.py",
                     "/assets/vendor/uPlot.LICENSE", "/assets//etc/passwd"):  # fmt: skip
            async with session.get(f"{s.url}{path}") as response:
                assert response.status in {401, 404}
        for path in (
            "/events",
            "/samples/page",
            "/samples/one",
            "/engines/e/log",
            "//",
            "/assetsx",
        ):
            async with session.get(f"{s.url}{path}") as response:
                assert response.status == 401


async def test_samples_and_logs_are_answered_or_refused_in_words(tmp_path: Path) -> None:
    async with stage(tmp_path, find_question=find_question) as s:
        await fill(s, "demo", 2)
        page = "/samples/page?record_id=demo/step/40/r0&set=aime"
        code, body = await s.get(f"{page}&filter=wrong&limit=3&against=demo/step/20/r0")
        assert code == 200
        found = json.loads(body)
        assert len(found["samples"]) == 3
        assert found["n"]["all"] == 60
        assert found["n"]["flipped"] > 0
        one = "/samples/one?record_id=demo/step/40/r0&set=aime&question=3&sample=0"
        detail = json.loads((await s.get(one))[1])
        assert detail["prompt"][1]["content"].startswith("What is 3 * 3?")
        assert detail["earlier"] is None
        for path, code, words in (
            (f"{page}&filter=odd", 400, "cannot use filter='odd': it must be one of all, wrong"),
            (f"{page}&offset=-1", 400, "cannot use offset='-1': it must be a whole number from 0"),
            ("/samples/page?set=aime", 400, "it must be a point's"),
            ("/samples/page?record_id=demo/step/40/r0&set=none", 404, "there is nothing stored"),
            (f"{one}9", 404, "there is nothing stored"),
            ("/engines/engine-0/log", 404, "evald has written no log of engine-0"),
            ("/engines/engine-0/log?lines=x", 400, "must be a whole number"),
            ("/engines/..%2f..%2fx/log", 400, "is no engine's name"),
        ):
            answer = await s.get(path)
            assert answer[0] == code, path
            assert words in answer[1]
        directory = tmp_path / "engines" / "engine-0"
        directory.mkdir(parents=True)
        (directory / "0002.log").write_text("one\ntwo\n")
        code, body = await s.get("/engines/engine-0/log?lines=1")
        assert json.loads(body) == {"engine": "engine-0", "file": "0002.log", "lines": ["two"]}


async def test_who_waits_for_samples_holds_no_thread(tmp_path: Path) -> None:
    """The ledger and engines need them: a person may click faster than a large set is read."""
    threads = ThreadPoolExecutor(3)
    asyncio.get_running_loop().set_default_executor(threads)
    async with stage(tmp_path, kind=BusyStage) as s:
        write_samples(tmp_path, "demo", 20, seed=1)
        query = "/samples/page?record_id=demo/step/20/r0&set=aime"
        asked = [asyncio.create_task(s.get(query)) for _ in range(30)]
        longest = 0
        while not all(one.done() for one in asked):
            longest = max(longest, threads._work_queue.qsize())
            await asyncio.sleep(0)
        assert [(await one)[0] for one in asked] == [200] * 30
    assert longest <= 1
