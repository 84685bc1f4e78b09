"""The eval node as a training job sees it: asked through a link, only when it matters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from evald.status.view import StagingView, StatusView
from evald.trainer.contract import Link
from evald.trainer.dispatcher.inflight import InFlight
from evald.trainer.dispatcher.pulse import Pulse

log = structlog.get_logger(__name__)

#: what nobody polls is dropped, oldest first.
_NEWS_KEPT = 10_000
#: while nothing is known of the daemon: its own default.
_DEFAULT_CAP = 2
#: a link that took this long to find nobody costs training time ...
_SLOW_S = 1.0
#: ... so it is asked again only after this.
_SLOW_AGAIN_S = 60.0
#: reading what came since the last look takes no longer.
_READ_S = 10.0
#: of a dropped snapshot a living daemon shows something long before.
_UNSEEN_AFTER_S = 300.0


class Node:
    """Keeps the newest status, the accounting of ``run``'s points, and the records not polled yet.

    ``run``: None means the daemon's own, or the folder ``ROOT/<run>/`` that ``root`` is.
    ``after_seq``: records up to here are old news; None: all that the ledger holds at the first
    look. No method raises what the link cannot help.
    """

    def __init__(
        self,
        link: Link,
        *,
        root: Path,
        run: str | None,
        cap: int | None,
        dead_after_s: float,
        after_seq: int | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.points = InFlight()
        self.pulse = Pulse(dead_after_s, monotonic)
        self.status: StatusView | None = None
        self._root = root
        self._run = run
        self._cap = cap
        self._monotonic = monotonic
        self._seq = 0
        self._news_after: int | None = after_seq
        self._news: deque[dict[str, Any]] = deque(maxlen=_NEWS_KEPT)
        self._ask_again_s = 0.0
        #: the daemon is away, and the log says so.
        self._told_away = False
        self._told_unseen = False
        #: last_seq of a status that lay behind what was read, and its beat.
        self._behind: tuple[int, int] | None = None

    @property
    def seq(self) -> int:
        """``seq`` of the newest record read."""
        return self._seq

    @property
    def run(self) -> str | None:
        """Run id of the job's points; None while nothing tells."""
        if self._run is None and self.status is not None:
            in_folder = (
                not (self._root / ".evald").exists() and (self._root.parent / ".evald").exists()
            )
            self._run = self._root.name if in_folder else self.status.run
        return self._run

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

    def look(self) -> None:
        """Ask for the status and for new records; takes no longer than the link's deadlines."""
        began = self._monotonic()
        if began < self._ask_again_s:
            self._tell()
            return
        status = self.link.status()
        self.pulse.see(status)
        if status is not None:
            self.status = status
        run = self.run
        if run is not None:
            self._read(run, status)
            if status is not None:
                self.points.see(status, run)
        now = self._monotonic()
        if status is None and now - began > _SLOW_S:
            self._ask_again_s = now + _SLOW_AGAIN_S
        self._tell()

    def settle(self) -> None:
        """Let go of what a living daemon will not answer, and say what it does not seem to see.

        Only right when everything that was dropped can be seen by it.
        """
        if not self.pulse.alive:
            return
        now_s = self._monotonic()
        for name in self.points.settle_answered(now_s):
            log.info("point_answered_before", point=str(name))
        unseen = self.points.unseen(now_s, _UNSEEN_AFTER_S)
        if unseen and not self._told_unseen:
            self._told_unseen = True
            log.warning(
                "point_not_seen",
                points=[str(name) for name in unseen],
                detail="the daemon lives, but shows nothing of them: do its staging.root, pattern "
                "and marker agree with this job's root, pattern and marker?",
            )

    def news(self) -> list[dict[str, Any]]:
        """Return the terminal and set records of the run since the last call, oldest first."""
        news = list(self._news)
        self._news.clear()
        return news

    # --- records -------------------------------------------------------------------------------

    def _read(self, run: str, status: StatusView | None) -> None:
        if status is not None:
            self._notice_new_ledger(status)
        first_look, contact = self._news_after is None, status is not None
        old_until = self._news_after or 0
        enough_at = self._monotonic() + _READ_S
        while records := self.link.records(self._seq):
            contact = True
            for record in records:
                self._seq = max(self._seq, record["seq"])
                if record.get("run") == run:
                    self._take(record, is_old=first_look or record["seq"] <= old_until)
            if self._monotonic() > enough_at:
                return  # a ledger of years behind a slow link: the next look goes on
        if contact and first_look:
            self._news_after = self._seq

    def _take(self, record: dict[str, Any], *, is_old: bool) -> None:
        try:
            if record["type"] in {"point", "set"} and (not is_old or self.points.is_own(record)):
                self._news.append(record)
            self.points.apply(record)
        except (KeyError, TypeError, ValueError) as error:  # of a newer evald
            log.debug("record_not_understood", record=record, error=repr(error))

    def _notice_new_ledger(self, status: StatusView) -> None:
        """Begin anew when a ledger has taken the place of the one that was read.

        A status may be a moment older than the records; one made two beats later is not.
        """
        if status.last_seq >= self._seq:
            self._behind = None
        elif self._behind is None or status.beat < self._behind[1]:
            self._behind = (self._seq, status.beat)
        elif status.beat >= self._behind[1] + 2:
            log.warning("ledger_began_anew", seq_read=self._seq, last_seq=status.last_seq)
            self._seq, self._news_after, self._behind = 0, 0, None
            self.points.forget_ledger()

    # --- what the log says ---------------------------------------------------------------------

    def _tell(self) -> None:
        """Say once that the daemon is away, and once that it is back."""
        if not self.pulse.alive and not self._told_away:
            self._told_away = True
            if self.pulse.seen:
                detail = f"its beat has stood still for {self.pulse.dead_after_s:g} s"
            else:
                detail = "it has not been seen yet"
            log.warning(
                "daemon_away",
                detail=f"{detail}; training goes on: points wait for it up to the cap of "
                f"{self.cap}, further ones are skipped",
            )
        elif self._told_away and self.pulse.moved:
            self._told_away = False
            log.info("daemon_back", run=self.run)
            self.points.restart_waiting(self._monotonic())
