"""The eval node as a training job sees it: asked through a link, only when it matters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from evald.point import Kind
from evald.status.view import StagingView, StatusView
from evald.trainer.contract import Link
from evald.trainer.dispatcher.answers import Answers
from evald.trainer.dispatcher.inflight import InFlight, Name
from evald.trainer.dispatcher.place import Place
from evald.trainer.dispatcher.pulse import SETTLED_BEATS, Pulse

log = structlog.get_logger(__name__)

#: what nobody polls is dropped, oldest first.
_NEWS_KEPT = 10_000
#: while nothing is known of the daemon: its own default.
_DEFAULT_CAP = 2
#: a look that took this long costs training time ...
_SLOW_S = 0.1
#: ... so that there is none for so many times as long again, this at most.
_PAUSE_FACTOR = 20.0
_LONGEST_PAUSE_S = 120.0
#: reading what came since the last look takes no longer.
_READ_S = 5.0
#: of a dropped snapshot a living daemon shows something long before.
_UNSEEN_AFTER_S = 300.0


class Node:
    """Keeps the newest status, the accounting of ``run``'s points, and the records not polled yet.

    ``run``: None means what the ``place`` of the snapshots says: the daemon's own, or a folder's.
    ``after_seq``: records up to here are old news; None: all that the ledger holds at the first
    look. No method raises what the link cannot help.
    """

    def __init__(
        self,
        link: Link,
        *,
        place: Place,
        run: str | None,
        cap: int | None,
        dead_after_s: float,
        after_seq: int | None,
        monotonic: Callable[[], float],
    ) -> None:
        self.link = link
        self.points = InFlight()
        self.pulse = Pulse(dead_after_s, monotonic)
        self.status: StatusView | None = None
        self._place = place
        #: None while nothing certain tells.
        self.own_run = run
        self._guess: str | None = None
        self._cap = cap
        self._monotonic = monotonic
        #: of the newest record read.
        self.seq = 0
        self._restarts = link.restarts
        self._answers = Answers()
        self._news_after: int | None = after_seq
        self._news: deque[dict[str, Any]] = deque(maxlen=_NEWS_KEPT)
        self._ask_again_s = 0.0
        #: the daemon is away, and the log says so.
        self._told_away = False
        self._told_unseen = False
        #: last_seq of a status that lay behind what was read, and its beat.
        self._behind: tuple[int, int] | None = None

    @property
    def run(self) -> str | None:
        """Run id of the job's points, as far as can be told; None while nothing does."""
        return self.own_run or self._guess

    def takes_unnamed(self, run: str) -> bool:
        """Tell whether what names no run of its own is of ``run``."""
        return self.status is not None and run == (self._place.run(self.status) or self.status.run)

    @property
    def cap(self) -> int:
        """Most points of the job that may be in flight."""
        if self._cap is not None:
            return self._cap
        return self.status.cap if self.status is not None else _DEFAULT_CAP

    @property
    def staging(self) -> StagingView | None:
        """The staging root as a living daemon sees it."""
        return self.status.staging if self.status is not None and self.pulse.alive else None

    def look(self, *, urgent: bool = False) -> None:
        """Ask for the status and for new records; takes no longer than the link's deadlines.

        A daemon that is slow to answer is asked less often, unless it is ``urgent``.
        """
        began = self._monotonic()
        if urgent or began >= self._ask_again_s:
            self._ask()
            now = self._monotonic()
            slow = now - began > _SLOW_S
            pause_s = min(_PAUSE_FACTOR * (now - began), _LONGEST_PAUSE_S) if slow else 0.0
            self._ask_again_s = now + pause_s
        self._tell()

    def settle(self, is_gone: Callable[[Name], bool]) -> None:
        """Let go of what a living daemon will not answer, and say what it does not seem to see.

        Only right when everything that was dropped can be seen by it. ``is_gone``: it has taken
        what was dropped.
        """
        if not self.pulse.alive or self.status is None:
            return
        now_s, beat = self._monotonic(), (self.status.pid, self.status.beat)
        for name in self.points.settle_answered(now_s, is_gone=is_gone, beat=beat):
            self._answer(name, self._answers.newest(name))
        unseen = self.points.unseen(now_s, _UNSEEN_AFTER_S)
        if unseen and not self._told_unseen:
            self._told_unseen = True
            log.warning(
                "point_not_seen",
                points=[str(name) for name in unseen],
                detail="the daemon lives, but shows nothing of them: do its staging.root, pattern "
                "and marker agree with this job's root, pattern and marker?",
            )

    def identify(self, name: Name, digest: str) -> None:
        """Note the bytes of what was dropped; the ledger may have the answer already."""
        record = self._answers.of(name, digest)
        if record is None:
            self.points.identify(name, digest)
        else:
            self.points.forget(name)
            self._answer(name, record)

    def news(self) -> list[dict[str, Any]]:
        """Return the terminal and set records of the run since the last call, oldest first."""
        news = list(self._news)
        self._news.clear()
        return news

    def _answer(self, name: Name, record: dict[str, Any] | None) -> None:
        log.info("point_answered_before", point=str(name))
        if record is not None:
            self._news.append(record)

    # --- what the daemon says ------------------------------------------------------------------

    def _ask(self) -> None:
        status = self.link.status()
        self.pulse.see(status)
        if status is not None:
            self.status = status
            self._find_run(status)
        if (run := self.run) is not None:
            self._read(run, status)
            if status is not None:
                self.points.see(status, run)

    def _find_run(self, status: StatusView) -> None:
        """Find out whose run this is; for good only once the beat has gone on.

        Until then the status may be one that a daemon of another experiment has left behind.
        """
        if self.own_run is not None:
            return
        told = self._place.run(status)
        before, self._guess = self._guess, told or status.run
        if before not in {None, self._guess}:
            self._begin_anew()
        if self.pulse.confirmed:
            self.own_run = told

    def _read(self, run: str, status: StatusView | None) -> None:
        if status is not None:
            self._notice_new_ledger(status)
        contact, enough_at = status is not None, self._monotonic() + _READ_S
        # (a ledger of years behind a slow link: the next look goes on)
        while self._monotonic() <= enough_at:
            records = self.link.records(self.seq)
            if self._restarts != self.link.restarts:
                self._restarts = self.link.restarts
                log.warning("ledger_began_anew", seq_read=self.seq)
                self._begin_anew()
            elif records:
                contact = True
                self._take_all(records, run)
            else:
                if contact and self._news_after is None:
                    self._news_after = self.seq
                return

    def _take_all(self, records: list[dict[str, Any]], run: str) -> None:
        old_until, first_look = self._news_after or 0, self._news_after is None
        for record in records:
            self.seq = max(self.seq, record["seq"])
            if record.get("run") == run:
                self._take(record, is_old=first_look or record["seq"] <= old_until)

    def _take(self, record: dict[str, Any], *, is_old: bool) -> None:
        try:
            is_own = self.points.is_own(record) if record["type"] in {"point", "set"} else False
            is_awaited = self.points.apply(record)
            if record["type"] == "point":
                self._answers.add(Name(Kind(record["kind"]), record["step"]), record)
            if is_own or is_awaited or (record["type"] in {"point", "set"} and not is_old):
                self._news.append(record)
        except (KeyError, TypeError, ValueError) as error:  # of a newer evald
            log.debug("record_not_understood", record=record, error=repr(error))

    def _notice_new_ledger(self, status: StatusView) -> None:
        """Begin anew when a ledger has taken the place of the one that was read.

        A status may be a moment older than the records; one made two beats later is not.
        """
        if status.last_seq >= self.seq:
            self._behind = None
        elif self._behind is None or status.beat < self._behind[1]:
            self._behind = (self.seq, status.beat)
        elif status.beat >= self._behind[1] + SETTLED_BEATS:
            log.warning("ledger_began_anew", seq_read=self.seq, last_seq=status.last_seq)
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the ledger: all that the one in its place holds is news."""
        self.seq, self._behind = 0, None
        if self._news_after is not None:
            self._news_after = 0
        self._answers.clear()
        self.points.forget_ledger()

    # --- what the log says ---------------------------------------------------------------------

    def _tell(self) -> None:
        """Say once that the daemon is away, and once that it is back."""
        if not self.pulse.alive and not self._told_away:
            self._told_away = True
            if self.pulse.seen:
                detail = f"its beat has stood still for {self.pulse.dead_after_s:g} s"
            else:
                detail = f"it has not been seen yet: there is no status at {self.link.where}"
            log.warning(
                "daemon_away",
                detail=f"{detail}; training goes on: points wait for it up to the cap of "
                f"{self.cap}, further ones are skipped",
            )
        elif self._told_away and self.pulse.moved:
            self._told_away = False
            log.info("daemon_back", run=self.run)
            self.points.restart_waiting(self._monotonic())
