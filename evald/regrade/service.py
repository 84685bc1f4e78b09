"""Regrading inside the daemon: one at a time, beside the points, seen in the status."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable

import structlog

from evald.errors import EvaldError
from evald.pulse import Pulse
from evald.regrade.plan import CannotRegrade, Plan, What
from evald.regrade.regrader import Regrader
from evald.status.view import RegradeView

log = structlog.get_logger(__name__)

#: regrades that the status shows, and sentences of each.
_SHOWN = 4
_SENTENCES = 20
#: how often progress goes to the log.
_LOG_INTERVAL_S = 10.0
#: beside the slowest grade, between two marks of progress: a set's samples read, its statistics.
_SLACK_S = 1800.0


class RegradeService:
    """Carries out what operators ask for; ``make`` gives a grader for each of them.

    A regrade that the daemon's end interrupts leaves no trace of the point that it was at.
    """

    def __init__(self, make: Callable[[], Regrader]) -> None:
        self._make = make
        self._asked: asyncio.Queue[tuple[Regrader, Plan, RegradeView]] = asyncio.Queue()
        self._views: deque[RegradeView] = deque(maxlen=_SHOWN)
        self._busy = False
        self.pulse = Pulse("regrade")

    async def start(self, what: What, ticket: str) -> str:
        """Plan, and begin; return a sentence at once. Raises EvaldError with why not."""
        self._refuse_second()
        regrader = self._make()
        plan = await regrader.plan(what)
        self._refuse_second()
        self._busy = True
        view = RegradeView(ticket=ticket, run=what.run, points=len(plan.points))
        self._views.append(view)
        self._asked.put_nowait((regrader, plan, view))
        return f"{_points(len(plan.points))} of run {what.run!r} will be graded again"

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self.pulse.rest("waiting to be asked")
            regrader, plan, view = await self._asked.get()
            mark = functools.partial(self.pulse.rest, "grading", regrader.grade_s + _SLACK_S)
            try:
                await carry_out(regrader, plan, view, say=functools.partial(_say, view), mark=mark)
            finally:
                await regrader.close()
            self._busy = False

    def views(self) -> list[RegradeView]:
        """Show the newest regrades."""
        return list(self._views)

    def _refuse_second(self) -> None:
        if self._busy:
            raise CannotRegrade(
                "cannot regrade: another regrade is running; ask again when it is done"
            )


async def carry_out(
    regrader: Regrader,
    plan: Plan,
    view: RegradeView,
    *,
    say: Callable[[str], None],
    mark: Callable[[], object],
) -> None:
    """Grade all points of a plan again; ``view`` shows how far it is, ``say`` hears sentences.

    ``mark`` is called whenever it has got on. A point that cannot be graded again after all does
    not keep the others from it.
    """
    loop = asyncio.get_running_loop()
    told_s = loop.time()

    def on_sample() -> None:
        nonlocal told_s
        view.samples_done += 1
        mark()
        if loop.time() - told_s >= _LOG_INTERVAL_S:
            told_s = loop.time()
            log.info(
                "regrade_progress",
                points=f"{view.points_done}/{view.points}",
                samples=f"{view.samples_done}/{view.samples}",
            )

    for sentence in plan.left_out:
        say(sentence)
    failed = False
    try:
        for one in plan.points:
            mark()
            view.samples, view.samples_done = one.n_samples, 0
            try:
                say(await regrader.regrade(one, on_sample))
            except CannotRegrade as error:
                failed = True
                say(str(error))
            view.points_done += 1
    except EvaldError as error:
        failed = True
        say(str(error))
    view.state = "failed" if failed else "done"
    log.info("regrade_ended", state=view.state, points=view.points_done)


def _say(view: RegradeView, sentence: str) -> None:
    view.said = [*view.said, sentence][-_SENTENCES:]
    view.n_said += 1


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count} points"
