"""A status server with a ledger that tests write: over a unix socket and TCP."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from evald.config import Results
from evald.errors import EvaldError
from evald.point import Outcome
from evald.results.ledger import Ledger
from evald.results.records import PointRecord
from evald.status.command import Command
from evald.status.listen import TcpListener
from evald.status.sample_pages import FindQuestion
from evald.status.server import StatusServer
from evald.status.view import StatusView

TOKEN = secrets.token_urlsafe()


class Stage:
    """The server, its ledger and its directory."""

    def __init__(
        self,
        work: Path,
        ledger: Ledger,
        tcp: TcpListener | None,
        find_question: FindQuestion | None = None,
    ) -> None:
        self.work = work
        self.ledger = ledger
        self.server = StatusServer(
            work / "s.sock",
            view=self.view,
            results_file=ledger.path,
            newest_seq=lambda: ledger.last_seq,
            operate=self.operate,
            tcp=tcp,
            find_question=find_question,
        )

    @property
    def url(self) -> str:
        """Where TCP listens."""
        return f"http://{self.server.listen}"

    def view(self) -> StatusView:
        return StatusView(
            version="1",
            pid=os.getpid(),
            beat=3,
            time=1.0,
            uptime_s=1.0,
            state="serving",
            run="demo",
            results=str(self.ledger.path),
            cap=2,
            last_seq=self.ledger.last_seq,
            listen=self.server.listen,
        )

    async def operate(self, command: Command) -> str:
        if command.verb == "release":
            raise EvaldError("cannot release it")
        return f"did {command.verb} {command.step}"

    async def add_points(self, first: int, last: int) -> None:
        """Append terminal records of steps ``first`` to ``last``."""
        for step in range(first, last + 1):
            record_id = f"a/step/{step}/r0"
            await self.ledger.append(
                PointRecord(run="a", step=step, record_id=record_id, outcome=Outcome.OK)
            )

    def write_samples(self, content: bytes, step: int = 1, name: str = "math") -> None:
        """Lay down the journal of an eval set."""
        directory = self.work / "samples" / "a" / f"step_{step}.r0"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.jsonl").write_bytes(content)

    async def get(self, path: str, token: str | None = TOKEN) -> tuple[int, str]:
        """Ask over TCP."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}{path}", headers=headers) as response,
        ):
            return response.status, await response.text()


@asynccontextmanager
async def stage(
    work: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tcp: bool = True,
    kind: type[Stage] = Stage,
    find_question: FindQuestion | None = None,
) -> AsyncIterator[Stage]:
    """Serve; port 0: any free one."""
    ledger = Ledger.open(Results(dir=str(work)))
    made = kind(work, ledger, TcpListener(host, port, TOKEN) if tcp else None, find_question)
    try:
        await made.server.start()
        yield made
    finally:
        await made.server.close()
        ledger.close()
