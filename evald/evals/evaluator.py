"""The evaluator: from a pinned snapshot to the numbers of a point."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from evald.config import Aggregate, Dispatch, Results
from evald.evals.curve import CurveWatch
from evald.evals.custom.functions import Functions
from evald.evals.encoding import SetEncoder
from evald.evals.encoding_process import EncodingProcess
from evald.evals.feeding import FeedingOrder
from evald.evals.grading import Grading, make_workers
from evald.evals.point_run import PointRun
from evald.evals.preparation import Preparation, PreparedPoint
from evald.evals.sets import LoadedSet
from evald.evals.statistics import FindEarlier, Statistics
from evald.evals.worker_pool import Workers
from evald.point import EvalPoint, PointKey
from evald.postures.contract import Engines, Pin, PointResult, SetResult
from evald.results.modes import Modes
from evald.results.pause import Pause
from evald.results.samples import SampleJournal, point_samples_dir
from evald.status.view import SetView

__all__ = ["Evaluator", "PreparedPoint"]


class Evaluator:
    """Evaluates points, one after another or side by side, while later ones are prepared.

    ``context_len`` (tokens) is what the engines were told; None: what the model's config says.
    ``earlier`` finds the journals that a point's sets are compared with; ``curve`` knows what they
    were before. ``make_encoder`` gives who encodes prompts, ``workers``: whoever does the other CPU
    work; None: processes of its own. ``environ``: what graders of the user's see a part of.
    ``deterministic``: the engines answer in SGLang's deterministic inference.
    """

    def __init__(
        self,
        sets: list[LoadedSet],
        *,
        dispatch: Dispatch,
        results: Results,
        model_dir: Path,
        context_len: int | None = None,
        earlier: FindEarlier = lambda _key, _set: [],
        curve: CurveWatch | None = None,
        aggregates: list[Aggregate] | None = None,
        make_encoder: Callable[[], SetEncoder] = EncodingProcess,
        workers: Workers | None = None,
        pause: Pause | None = None,
        deterministic: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._again = functools.partial(
            Evaluator,
            dispatch=dispatch,
            results=results,
            model_dir=model_dir,
            context_len=context_len,
            earlier=earlier,
            curve=curve,
            make_encoder=make_encoder,
            pause=pause,
            deterministic=deterministic,
            environ=environ,
        )
        self._sample_timeout_s = dispatch.sample_timeout_s
        self._earlier = earlier
        self._curve = curve
        self._pause = pause or Pause()
        self._order = FeedingOrder(deterministic=deterministic)
        self._aggregates = aggregates or []
        self._results_dir = Path(results.dir)
        self._modes = Modes.of(results)
        self._preparation = Preparation(
            sets, model_dir, context_len=context_len, make_encoder=make_encoder
        )
        self._preparing = asyncio.Lock()
        self._workers = workers or make_workers(sets)
        self._grading = Grading(self._workers, environ=environ)
        self._environ = environ
        self._functions = {one.name: one.function_version for one in sets}
        self._running: dict[PointKey, PointRun] = {}

    async def prepare(self, point: EvalPoint) -> PreparedPoint:
        """Make token ids of all prompts, and read what is needed of the snapshot but its weights.

        Encodes only for a tokenizer or template that is new. Raises InvalidSnapshot,
        SnapshotGone, EvalSkip "crashed" when the base model's tokenizer cannot be used, and
        EvalSkip "set_changed" when ``curve`` does not admit the point.
        """
        async with self._preparing:
            prepared = await asyncio.to_thread(self._preparation.prepare, point)
        if self._curve is not None:
            self._curve.admit(prepared)
        return prepared

    async def evaluate(
        self,
        prepared: PreparedPoint,
        pin: Pin,
        engines: Engines,
        *,
        on_set: Callable[[SetResult], Awaitable[None]],
        set_begins: Callable[[str], float] = lambda _name: 0.0,
        deadline: float | None = None,
    ) -> PointResult:
        """Ask all questions of all sets, and grade the answers.

        ``on_set`` is awaited with each set as soon as it is done; ``set_begins`` hears of each that
        begins, and tells the seconds that it has had in earlier lives of the daemon. At
        ``deadline`` (in the loop's time) what is outstanding is cancelled and counts as timed out,
        and the result is what there is. Samples of the same snapshot and config that an earlier
        life of the point has scored are taken from the journal. Raises Unhealthy when no engine
        serves the point any more; cancellation leaves valid journals.
        """
        samples_dir = point_samples_dir(self._results_dir, prepared.point.key)
        functions = Functions(
            self._results_dir / "functions",
            environ=self._environ,
            tokens={one.loaded.name: one.tokens for one in prepared.sets if one.tokens},
            versions=self._functions,
        )
        run = PointRun(
            prepared,
            pin,
            engines,
            grading=self._grading,
            functions=functions,
            aggregates=self._aggregates,
            statistics=Statistics(self._workers, prepared.point.key, self._earlier),
            open_journal=lambda name: SampleJournal(samples_dir, name, modes=self._modes),
            sample_timeout_s=self._sample_timeout_s,
            on_set=on_set,
            set_begins=set_begins,
            order=self._order,
            breaks=lambda one: self._curve is not None and self._curve.breaks(prepared, one),
            pause=self._pause,
        )
        key = prepared.point.key
        self._running[key] = run
        try:
            return await run.run(deadline)
        finally:
            del self._running[key]
            await functions.close()

    def view(self, key: PointKey) -> list[SetView]:
        """Progress of a point's sets; empty when it does not run."""
        run = self._running.get(key)
        return [] if run is None else run.view()

    def successor(self, sets: list[LoadedSet], aggregates: list[Aggregate]) -> Evaluator:
        """Make one that is like this one, but for what it measures; its processes are its own."""
        return self._again(sets, aggregates=aggregates)

    async def rest(self) -> None:
        """End the worker processes; a point that needs some starts others."""
        await self._grading.close()
        await self._workers.close()

    async def close(self) -> None:
        """End for good; no process is left afterwards."""
        await asyncio.to_thread(self._preparation.close)
        await self.rest()
