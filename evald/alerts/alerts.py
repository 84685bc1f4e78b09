"""Watches the ledger and the status by the rules, and tells once what they find."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from evald.alerts.memory import Memory
from evald.alerts.verdict import Rule, Verdict
from evald.alerts.webhook import Poster
from evald.pulse import Pulse
from evald.results.follow import Follower
from evald.results.records import Alert, AnyRecord, Newer, RunEnd, decode_any
from evald.status.view import StatusView
from evald.text import one_line

log = structlog.get_logger(__name__)

#: seconds between two looks.
LOOK_S = 1.0
#: what was found is still recorded and posted so long after the daemon was told to stop.
LAST_WORDS_S = 5.0


class Ledger(Protocol):
    """What alerts need of the ledger."""

    path: Path
    last_seq: int

    async def append(self, record: AnyRecord) -> None:
        """Write a record."""


class Alerts:
    """Reads the ledger as every other reader does, from its start: a point never waits for it.

    What a rule finds is logged and posted first, then recorded: a ledger on a full disk must not
    keep that to itself. ``run``: the name of the daemon's run, for what is about no point. Records
    of earlier lives are only learnt from; of them, the newest of each run counts as found now.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        run: str,
        ledger: Ledger,
        view: Callable[[], StatusView],
        poster: Poster | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        #: those that have learnt all there was.
        self._rules: list[Rule] = []
        self._next = list(rules)
        self._run = run
        self._ledger = ledger
        self._view = view
        self._poster = poster
        self._wall = wall
        self._memory: Memory | None = None
        self.pulse = Pulse("alerts")
        self._changed = asyncio.Event()
        self._unwritten: deque[Alert] = deque()
        self._more = asyncio.Event()
        self._follower = Follower(ledger.path)
        #: newest record that was read; before the rules have learnt, the newest that is no news.
        self._seen_seq = ledger.last_seq
        #: alerts of evald's own up to this one are of an earlier life, or were posted.
        self._passed_seq = ledger.last_seq

    def use(self, rules: Iterable[Rule]) -> None:
        """Go on with other rules; they learn from the ledger's records first.

        What was told under a rule's name is not told again.
        """
        self._next = list(rules)
        self._seen_seq = self._ledger.last_seq
        self._changed.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name="alert records")
                if self._poster is not None:
                    tasks.create_task(self._poster.run(), name="webhook")
                await self._watch()
        finally:
            await self._last_words()

    async def _watch(self) -> None:
        self.pulse.beat()
        await self._learn()
        while True:
            self.pulse.beat()
            await self._catch_up()
            self._look()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()
            await self._learn()

    # --- the ledger ----------------------------------------------------------------------------

    async def _learn(self) -> None:
        """Show the rules all that is recorded; what they think of the newest points counts.

        So does what is recorded while they learn.
        """
        # (while they learn, what they think of the status would be wrong)
        rules, self._rules = self._next, []
        known_seq, self._seen_seq = self._seen_seq, 0
        self._follower = Follower(self._ledger.path)
        if not rules:
            return
        first = self._memory is None
        memory = self._memory or Memory()
        newest: dict[tuple[int, str], list[Verdict]] = {}
        async for record in self._records():
            if isinstance(record, Alert):
                self._pass_on(record, rules)
                if first:
                    memory.recall(record)
            if isinstance(record, RunEnd):
                newest = {key: found for key, found in newest.items() if key[1] != record.run}
            for number, rule in enumerate(rules):
                if verdicts := rule.note(record):
                    earlier = newest.get((number, record.run), [])
                    newest[number, record.run] = (
                        [*earlier, *verdicts] if record.seq > known_seq else verdicts
                    )
        self._memory, self._rules = memory, rules  # (not before they are whole)
        for (number, _), verdicts in newest.items():
            self._take(rules[number], verdicts)

    async def _catch_up(self) -> None:
        if not self._rules or self._ledger.last_seq <= self._seen_seq:
            return
        async for record in self._records():
            if isinstance(record, Alert):
                self._pass_on(record, self._rules)
            for rule in self._rules:
                self._take(rule, rule.note(record))

    async def _records(self) -> AsyncIterator[AnyRecord]:
        """Give the records that are new, some megabytes at a time."""
        while lines := await asyncio.to_thread(self._read):
            self.pulse.beat()
            for record in lines:
                self._seen_seq = max(self._seen_seq, record.seq)
                if not isinstance(record, Newer):
                    yield record

    def _read(self) -> list[AnyRecord | Newer]:
        """Read and decode one batch; blocking. The files are open meanwhile only."""
        with self._follower:
            try:
                lines = next(self._follower.batches(), [])
            except OSError as error:
                log.debug("alerts_cannot_read", error=str(error))
                return []
        records = []
        for line in lines:
            try:
                records.append(decode_any(line))
            except msgspec.DecodeError as error:
                log.debug("alerts_cannot_decode", error=str(error))
        return records

    # --- what is found -------------------------------------------------------------------------

    def _look(self) -> None:
        if not self._rules:
            return
        view, now_s = self._view(), self._wall()
        for rule in self._rules:
            self._take(rule, rule.check(view, now_s))

    def _take(self, rule: Rule, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._tell(rule, verdict)

    def _tell(self, rule: Rule, verdict: Verdict) -> None:
        if self._memory is None:
            return
        name = rule.config.name
        record = self._memory.take(name, verdict.run or self._run, verdict)
        if record is None:
            return
        record.detail = one_line(record.detail)
        if record.cleared:
            log.info("alert_over", name=name, subject=record.subject, detail=record.detail)
        else:
            log.warning("alert", name=name, subject=record.subject, detail=record.detail)
        if rule.config.webhook and self._poster is not None:
            self._poster.give(record, time_s=self._wall())
        self._unwritten.append(record)
        self._more.set()

    def _pass_on(self, record: Alert, rules: list[Rule]) -> None:
        """Post an alert of evald's own that is new, if a rule asks for it."""
        if record.subject or record.seq <= self._passed_seq:
            return
        self._passed_seq = record.seq
        asked = any(
            rule.config.kind == "builtin"
            and (not rule.config.names or record.name in rule.config.names)
            for rule in rules
        )
        if asked and self._poster is not None:
            self._poster.give(record, time_s=self._wall())

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._write_all()

    async def _write_all(self) -> None:
        while self._unwritten:
            await self._ledger.append(self._unwritten[0])
            self._unwritten.popleft()

    async def _last_words(self) -> None:
        """Tell what has just happened, such as the end of the last point, within a bound."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._catch_up()
                self._look()
                await self._write_all()
                if self._poster is not None:
                    await self._poster.flush()
        except TimeoutError:
            log.warning("alerts_not_told", records=len(self._unwritten))
