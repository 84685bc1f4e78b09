"""Ask a running evald for one point, and wait for what became of it.

For jobs whose own evaluation hook waits for its result; others dispatch and go on. Blocking calls
run in threads, so that an event loop that serves other work goes on.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from evald.point import Kind, SkipReason
from evald.status.view import StatusView
from evald.trainer.contract import Carrier, ExportError, Link
from evald.trainer.dispatcher.pulse import SETTLED_BEATS, Pulse
from evald.trainer.point_records import Answer, NotMeasured, PointName, PointRecords
from evald.trainer.publish import write_request


class Ask(NamedTuple):
    """What is to be measured. ``directory`` None: the daemon's own base model (a baseline)."""

    step: int
    directory: Path | None
    kind: Kind = Kind.STEP


#: hands a point of a run to evald; blocking. Returns the request, which evald removes once it has
#: read it; None where that cannot be seen. Raises ExportError, or OSError.
Hand = Callable[[Ask, str], Path | None]


def hand_in_place(root: Path, ask: Ask, run: str) -> Path:
    """Put a request into a staging root that both sides see; the directory stays where it is."""
    kind = "baseline" if ask.kind is Kind.BASELINE else "reuse"
    content: dict[str, Any] = {"kind": kind, "step": ask.step}
    if ask.directory is not None:
        content["path"] = str(ask.directory.absolute())
    return write_request(root, f"{kind}_{ask.step}", content, run=run)


def hand_over(carrier: Callable[[Path], Carrier], ask: Ask, run: str) -> None:
    """Copy the directory to another host's root, or for a baseline a request without a path.

    ``carrier`` makes a carrier from the folder that what it carries lies in.
    """
    if ask.kind is Kind.BASELINE or ask.directory is None:
        with tempfile.TemporaryDirectory(prefix="evald-request-") as spool:
            path = hand_in_place(Path(spool), ask._replace(directory=None), run)
            carrier(path.parent).carry(path)
    else:
        carrier(ask.directory.parent).carry(ask.directory)


class Requester:
    """Asks for points and follows the ledger until they have ended.

    ``link`` and ``hand`` reach the daemon. ``run``: None means the daemon's own. A daemon that is
    not there, or whose beat counter stands still, for ``dead_after_s`` is given up.
    """

    def __init__(
        self,
        link: Link,
        hand: Hand,
        *,
        run: str | None = None,
        dead_after_s: float = 120.0,
        poll_s: float = 0.5,
    ) -> None:
        self._link = link
        self._ledger = PointRecords(link)
        self._pulse = Pulse(dead_after_s, time.monotonic)
        self._hand = hand
        self._run = run
        self._poll_s = poll_s

    async def measure(self, ask: Ask, *, timeout_s: float) -> Answer:
        """Wait for the terminal record; raises NotMeasured for a point that was skipped.

        What evald has measured before, a run's baseline or the same bytes of the same step, is
        answered with that record (the same bytes at a far host are not: that ends in a deadline).
        After ``timeout_s`` the request is taken back, unless evald has taken it.
        """
        try:
            async with asyncio.timeout(timeout_s) as scope:
                return await self._measure(ask)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise NotMeasured(
                f"cannot wait longer for step {ask.step}: evald has not ended its point within "
                f"{timeout_s:g} s",
                reason=SkipReason.DEADLINE,
            ) from error

    async def _measure(self, ask: Ask) -> Answer:
        status = await self._find_daemon()
        point = (self._run or status.run, ask.kind.value, ask.step)
        await self._ledger.catch_up()
        known = self._ledger.newest_measured(point)
        if ask.kind is Kind.BASELINE and known is not None:
            return await self._ledger.answer(point, known)
        before = self._ledger.seq
        request = await self._give(ask, point[0])
        try:
            return await self._wait(point, before, request)
        finally:
            _withdraw(request)

    async def _find_daemon(self) -> StatusView:
        """Wait for a beat; read a ledger that began anew from its start."""
        known = self._ledger.seq
        # the first beat may be older than what was read last
        for _ in range(SETTLED_BEATS):
            status = await self._next_beat()
            if status.last_seq >= known:
                return status
        self._ledger.forget()
        return status

    async def _next_beat(self) -> StatusView:
        while True:
            if (status := await self._look()) is not None:
                return status
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> StatusView | None:
        """Return a status that is newer than the last one, if there is one; raises NotMeasured."""
        status = await asyncio.to_thread(self._link.status)
        self._pulse.see(status)
        if self._pulse.dead:
            raise NotMeasured(
                f"cannot have anything measured: no sign of life of evald for "
                f"{self._pulse.dead_after_s:g} s; see whether it runs, with `evald status`",
                reason=SkipReason.UNHEALTHY,
            )
        return status if self._pulse.moved else None

    async def _give(self, ask: Ask, run: str) -> Path | None:
        giving = asyncio.ensure_future(asyncio.to_thread(self._hand, ask, run))
        try:
            return await asyncio.shield(giving)
        except asyncio.CancelledError:
            giving.add_done_callback(_take_back)  # nobody waits for it any more
            raise
        except (ExportError, OSError) as error:
            reason = error.reason if isinstance(error, ExportError) else SkipReason.UNHEALTHY
            raise NotMeasured(
                f"cannot hand step {ask.step} to evald: {error}", reason=reason
            ) from error

    async def _wait(self, point: PointName, before: int, request: Path | None) -> Answer:
        beats_since = 0
        while True:
            # asked first: evald removes a request after the record that it led to
            is_read = request is not None and _is_gone(request)
            status = await self._look()
            await self._ledger.catch_up()
            if is_read and status is not None and status.last_seq <= self._ledger.seq:
                beats_since += 1
            revision = self._ledger.newest_after(point, before)
            if revision is None and beats_since >= SETTLED_BEATS:
                revision = self._ledger.newest(point)
            if revision is not None and self._ledger.has_ended(point, revision):
                return await self._ledger.answer(point, revision)
            await asyncio.sleep(self._poll_s)


def _is_gone(request: Path) -> bool:
    return not request.exists()


def _withdraw(request: Path | None) -> None:
    if request is not None:
        request.unlink(missing_ok=True)


def _take_back(giving: asyncio.Future[Path | None]) -> None:
    if not giving.cancelled() and giving.exception() is None:
        _withdraw(giving.result())
