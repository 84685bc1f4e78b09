"""A point on the engines: questions of all its sets go out, answers are graded as they come."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from evald.config import Aggregate
from evald.errors import EvaldError, EvalSkip, GenerationFailed
from evald.evals.asker import PointAsker
from evald.evals.custom.functions import Functions
from evald.evals.feeding import FeedingOrder
from evald.evals.graders import GraderFailed, Sample, is_external
from evald.evals.grading import Grading
from evald.evals.kinds import Answer
from evald.evals.leases import Lease, Slots
from evald.evals.preparation import PreparedPoint, PreparedSet
from evald.evals.set_run import SetRun, Unasked
from evald.evals.statistics import Statistics
from evald.evals.stats.aggregate import aggregate_metrics
from evald.postures.contract import (
    Engines,
    Pin,
    PointResult,
    SetResult,
)
from evald.results.pause import Pause
from evald.results.records import Counts
from evald.results.samples import FLUSH_INTERVAL_S, SampleJournal, Status
from evald.status.view import SetView

#: questions whose answers wait for a grader, at least, and as many as are in flight: answers of one
#: length come all at once. Beyond them no new request is sent.
_UNGRADED = 64
#: questions that begin in one step of the loop: where there is room for thousands, all at once
#: would keep everything else waiting.
_BEGIN_AT_ONCE = 16


class PointRun:
    """Evaluates one prepared point, once; ``open_journal`` gives the journal of a set by name.

    ``set_begins`` tells the seconds that a set has had in earlier lives of the daemon, ``breaks``
    whether the curve of a set breaks at this point. While samples cannot be written, nothing new is
    asked, and deadlines of the point and its sets stand still (``pause``).
    """

    def __init__(
        self,
        prepared: PreparedPoint,
        pin: Pin,
        engines: Engines,
        *,
        grading: Grading,
        functions: Functions,
        statistics: Statistics,
        aggregates: list[Aggregate],
        open_journal: Callable[[str], SampleJournal],
        sample_timeout_s: float,
        on_set: Callable[[SetResult], Awaitable[None]],
        set_begins: Callable[[str], float],
        order: FeedingOrder,
        breaks: Callable[[PreparedSet], bool],
        pause: Pause,
    ) -> None:
        self._prepared = prepared
        self._pin = pin
        self._engines = engines
        self._grading = grading
        self._statistics = statistics
        self._aggregates = aggregates
        self._asker = PointAsker(engines, pin, functions, timeout_s=sample_timeout_s)
        self._on_set = on_set
        self._set_begins = set_begins
        self._order = order
        self._breaks = breaks
        self._pause = pause
        digest = pin.target.digest
        self._sets = [SetRun(one, digest, open_journal(one.loaded.name)) for one in prepared.sets]
        self._slots = Slots(
            functools.partial(engines.capacity, pin), functools.partial(engines.left, pin)
        )
        engines.when_room(pin, self._slots.look)
        self._ungraded = asyncio.Semaphore(max(_UNGRADED, engines.capacity(pin)))
        self._results: dict[str, SetResult] = {}
        self._curve_breaks: list[str] = []
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self, deadline: float | None) -> PointResult:
        """Ask, grade and record every sample; ``deadline`` is in the loop's time.

        At the deadline outstanding requests are cancelled and count as timed out. Raises what the
        posture raises (Unhealthy) and what ``on_set`` raises. Whatever ends it, what
        was finished is in the journals.
        """
        with ExitStack() as stack:
            for one in self._sets:
                stack.callback(one.close)
            stack.callback(self._stop_timers)
            if deadline is not None:
                self._call_at(deadline, self._expire)
            try:
                await self._run_all()
            except ExceptionGroup as group:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # a stop of the daemon is not the point's end, whatever else went wrong
                    raise asyncio.CancelledError from group
                error = _error_of(group)
                if error is None:
                    raise
                raise error from None
        return self._result()

    def view(self) -> list[SetView]:
        """Progress of the sets, in the order of the config."""
        return [one.view() for one in self._sets]

    async def _run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            flusher = group.create_task(self._flush(), name="flush samples")
            finishers = [
                group.create_task(self._finish(one), name=f"finish {one.name}")
                for one in self._sets
            ]
            phases = self._order.phases(self._sets)
            for phase in phases:
                for one in phase:
                    await self._feed(one, group)
                if phase is phases[-1]:
                    # each question has its first step behind it: it is in flight, or waits
                    await asyncio.sleep(0)
                    self._slots.all_taken()
                for one in phase:
                    await one.done.wait()
            for task in finishers:
                await task
            flusher.cancel()

    async def _feed(self, one: SetRun, group: asyncio.TaskGroup) -> None:
        """Start a task for each question of a set, as many at a time as the engines can take."""
        await self._pause.insist(one.path, lambda: asyncio.to_thread(one.resume))
        one.cut_stragglers()
        for number, question in enumerate(one.left(), 1):
            await self._pause.over()
            if number % _BEGIN_AT_ONCE == 0:
                await asyncio.sleep(0)
            lease = await self._slots.take(one.kind.width(question.encoded, question.samples))
            if one.expired:
                lease.give_back()
                break
            if one.started_s is None:
                self._start_clocks(one)
            task = group.create_task(
                self._ask(one, question, lease), name=f"{one.name} question {question.index}"
            )
            # a task that is cancelled before its first step cannot do it itself
            task.add_done_callback(lease.give_back)
            one.watch(task)
        one.all_fed()

    def _start_clocks(self, one: SetRun) -> None:
        """Let the set end early from now on."""
        loop = asyncio.get_running_loop()
        one.started_s = loop.time()
        used_s = self._set_begins(one.name)
        for name in ("set_deadline_s", "cut_after_s"):
            limit_s: float | None = getattr(one.eval_set, name)
            if limit_s is not None:
                expire = functools.partial(one.expire, f"{name} = {limit_s:g}")
                self._call_at(one.started_s + max(limit_s - used_s, 0.0), expire)

    def _call_at(self, when_s: float, action: Callable[[], None]) -> None:
        """Act at a time of the loop, or later by as long as evaluation pauses until then."""
        loop = asyncio.get_running_loop()

        def due(when_s: float, paused_before_s: float) -> None:
            paused_s = self._pause.total_s
            if paused_s > paused_before_s:
                later_s = when_s + paused_s - paused_before_s
                self._timers.append(loop.call_at(later_s, due, later_s, paused_s))
            else:
                action()

        self._timers.append(loop.call_at(when_s, due, when_s, self._pause.total_s))

    async def _ask(self, one: SetRun, question: Unasked, lease: Lease) -> None:
        """One question: its request, then its grades while the engines answer others."""
        try:
            answers = await one.kind.ask(
                self._asker, question.question, question.encoded, question.samples
            )
        except GenerationFailed as failed:
            status: Status = "timeout" if failed.kind == "timeout" else "error"
            one.failed(question.index, question.samples, status, failed.detail)
            return
        finally:
            lease.answered()
        async with self._ungraded:
            lease.give_back()
            pairs = list(zip(question.samples, answers, strict=True))
            if not is_external(one.rules):
                for sample, answer in pairs:
                    await self._grade(one, question, sample, answer)
                return
            # the user's graders may spend their time waiting
            async with asyncio.TaskGroup() as group:
                for sample, answer in pairs:
                    group.create_task(
                        self._grade(one, question, sample, answer),
                        name=f"{one.name} question {question.index} sample {sample}",
                    )

    async def _grade(self, one: SetRun, asked: Unasked, sample: int, answer: Answer) -> None:
        index, question = asked.index, asked.question
        if answer.grade is not None:
            one.graded(index, sample, answer, answer.grade)
            return
        timeout_s = one.eval_set.grader_timeout_s
        try:
            grade = await self._grading.grade(
                one.rules,
                Sample(
                    response=answer.generation.text,
                    label=question.label,
                    prompt=question.prompt,
                    metadata=question.metadata,
                    question=question.id,
                    in_thought=answer.in_thought,
                ),
                timeout_s=timeout_s,
            )
        except GraderFailed as failed:
            one.ungraded(index, sample, answer, str(failed))
        else:
            one.graded(index, sample, answer, grade)

    async def _finish(self, one: SetRun) -> None:
        await one.done.wait()
        now_s = asyncio.get_running_loop().time()
        await self._flush_one(one)
        await asyncio.to_thread(one.close)
        result = await one.result(now_s, self._statistics)
        if self._breaks(one.prepared):
            self._curve_breaks.append(one.name)
            result.metrics[f"eval/{one.name}/curve_break"] = 1.0
        self._order.note(result)
        self._results[one.name] = result
        await self._on_set(result)

    async def _flush(self) -> None:
        """Let no finished sample wait in memory for the next one."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            for one in self._sets:
                await self._flush_one(one)

    async def _flush_one(self, one: SetRun) -> None:
        await self._pause.insist(one.path, lambda: asyncio.to_thread(one.flush))

    def _expire(self) -> None:
        for one in self._sets:
            one.expire("the point's deadline")

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _result(self) -> PointResult:
        results = [self._results[one.name] for one in self._sets]
        metrics: dict[str, float] = {}
        for result in results:
            metrics |= result.metrics
        questions = {one.name: len(one.prepared.prompts) for one in self._sets}
        for aggregate in self._aggregates:
            metrics |= aggregate_metrics(aggregate, metrics, questions)
        return PointResult(
            counts=sum((result.counts for result in results), Counts()),
            metrics=metrics,
            engines=sorted(set().union(*(one.engines for one in self._sets))),
            weight_versions=sorted(set().union(*(one.weight_versions for one in self._sets))),
            provenance=self._prepared.provenance,
            problem=_first_problem(self._sets),
            curve_breaks=sorted(self._curve_breaks),
        )


def _first_problem(sets: list[SetRun]) -> str:
    """Say what went wrong first, and of every set how it was cut, and what was too long to ask."""
    said = [f"{one.name}: {one.problem}" for one in sets if one.problem][:1]
    for one in sets:
        said += [*one.cut(), *one.too_long()]
    return "; ".join(said)


def _error_of(group: ExceptionGroup) -> EvaldError | None:
    """Give the one error that ends the point; None when there is a bug among them."""
    expected, bugs = group.split(EvaldError)
    if bugs is not None or expected is None:
        return None
    # a ledger that cannot be written is worse than engines that do not serve
    _, worse = expected.split(EvalSkip)
    error: BaseException = worse or expected
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, EvaldError) else None
