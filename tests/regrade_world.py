"""Points measured for real, with made-up engines, whose samples are then graded again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluator_world import FakePosture, InlineWorkers

from evald.config import Aggregate, Config, Dispatch, EvalSet, Results, Staging
from evald.evals.curve import CurveWatch
from evald.evals.earlier import EarlierPoints
from evald.evals.encoding import Encoding
from evald.evals.evaluator import Evaluator
from evald.evals.sets import load_set
from evald.measure import Measure
from evald.point import EvalPoint, Kind, PointKey, Snapshot
from evald.postures.evaluated import EvaluatedPosture
from evald.regrade.alone import next_key
from evald.regrade.plan import Plan, What
from evald.regrade.regrader import Regrader
from evald.results.follow import read_records
from evald.results.ledger import Ledger
from evald.results.records import Accepted, PointRecord, SetRecord
from evald.staging.digest import fingerprint

RUN = "r"


class RegradeWorld:
    """A ledger, points in it, and somebody who grades them again."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self.results = Results(dir=str(tmp_path / "results"))
        self.model = model
        self.aggregates: list[Aggregate] = []
        self.open: set[PointKey] = set()
        self.ledger = Ledger.open(self.results)

    async def measure(
        self,
        step: int,
        sets: list[EvalSet],
        reply: Callable[[str], str],
        *,
        kind: Kind = Kind.STEP,
        revision: int = 0,
    ) -> PointRecord:
        """Measure a point and append all of its records."""
        seen, size_bytes = fingerprint(self.model, ".complete")
        key = PointKey(RUN, step, revision, kind)
        snapshot = Snapshot(
            run=RUN,
            step=step,
            kind=kind,
            directory=self.model,
            fingerprint=seen,
            size_bytes=size_bytes,
            digest=f"digest-{step}",
            owned=False,
        )
        await self.ledger.append(
            Accepted(
                run=RUN,
                step=step,
                revision=revision,
                record_id=f"{key.record_id}/accepted",
                kind=kind,
                directory=str(self.model),
                size_bytes=size_bytes,
                fingerprint=seen,
                digest=snapshot.digest,
                owned=False,
            )
        )
        engines = FakePosture(reply)
        engines.step = step
        evaluator = Evaluator(
            [load_set(one) for one in sets],
            dispatch=Dispatch(),
            results=self.results,
            model_dir=self.model,
            earlier=EarlierPoints(self.ledger.index, Path(self.results.dir)),
            curve=CurveWatch(self.ledger.index, "record"),
            aggregates=self.aggregates,
            make_encoder=Encoding,
            workers=InlineWorkers(),
        )
        posture = EvaluatedPosture(engines, evaluator, loads=True)
        measure = Measure(Dispatch(), posture=posture, marker=".complete")
        turn = asyncio.Event()
        turn.set()
        record = await measure.run(
            EvalPoint(key, snapshot),
            queued_s=0.0,
            turn=turn,
            on_spare=lambda: None,
            on_state=lambda _: None,
            on_set=self.ledger.append,
        )
        await posture.close()
        await self.ledger.append(record)
        return record

    def regrader(self, sets: list[EvalSet]) -> Regrader:
        """Make somebody who grades by these sets."""
        return Regrader(
            [load_set(one) for one in sets],
            config=Config(
                staging=Staging(root="/nowhere"),
                results=self.results,
                eval=sets,
                aggregate=self.aggregates,
            ),
            ledger=self.ledger,
            next_key=lambda run, step, kind: next_key(self.ledger.index, run, step, kind),
            is_open=self.open.__contains__,
            workers=InlineWorkers(),
            environ={},
        )

    async def plan(self, sets: list[EvalSet], *steps: int, only: list[str] | None = None) -> Plan:
        """Plan with a regrader of these sets."""
        return await self.regrader(sets).plan(What(run=RUN, steps=list(steps), sets=only or []))

    async def regrade(
        self, sets: list[EvalSet], *steps: int, only: list[str] | None = None
    ) -> list[str]:
        """Grade steps (none: all) again; what was said of each."""
        regrader = self.regrader(sets)
        plan = await regrader.plan(What(run=RUN, steps=list(steps), sets=only or []))
        try:
            return [await regrader.regrade(one, lambda: None) for one in plan.points]
        finally:
            await regrader.close()

    def point(self, step: int, revision: int, kind: Kind = Kind.STEP) -> PointRecord:
        """Return a terminal record."""
        (found,) = (
            record
            for record in read_records(self.ledger.path)
            if isinstance(record, PointRecord)
            and (record.step, record.revision, record.kind) == (step, revision, kind)
        )
        return found

    def set_records(self, step: int, revision: int) -> dict[str, SetRecord]:
        """Return the set records of a point."""
        return {
            record.set: record
            for record in read_records(self.ledger.path)
            if isinstance(record, SetRecord) and (record.step, record.revision) == (step, revision)
        }

    def samples(self, step: int, revision: int) -> dict[str, bytes]:
        """Return the files of a point's samples."""
        directory = Path(self.results.dir) / "samples" / RUN / f"step_{step}.r{revision}"
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}

    def folders(self) -> list[str]:
        """Return what lies beside the points' samples."""
        return sorted(path.name for path in (Path(self.results.dir) / "samples" / RUN).iterdir())


def correct(text: str) -> str:
    """Answer with the prompt, in a box: right for "boxed_exact", wrong for "exact"."""
    return f"\\boxed{{{text}}}"


def rows(n: int, **fields: Any) -> list[dict[str, Any]]:
    """Questions whose right answer is the prompt itself."""
    return [{"prompt": f"q{number}", "label": f"q{number}", **fields} for number in range(n)]
