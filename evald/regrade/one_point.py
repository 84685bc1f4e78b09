"""One point that is graded again: what it was, what its sets are now, and the records of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evald.config import Aggregate, Dispatch
from evald.evals.preparation import PreparedSet, whole_digest
from evald.evals.sets import LoadedSet
from evald.evals.stats.aggregate import aggregate_metrics
from evald.judge import judge
from evald.point import EvalPoint, Kind, Outcome, PointKey, Snapshot
from evald.postures.contract import PointResult, SetResult
from evald.regrade.one_set import Before
from evald.regrade.plan import CannotRegrade, PointPlan, told_sets
from evald.results.records import Counts, PointRecord, SetRecord

#: of the point itself; what it took to measure it has not changed.
_KEPT_METRICS = ("eval/lag_steps",)


class PointRegrade:
    """Gathers the sets of one point.

    ``record`` and ``set_records`` are those of the revision whose samples are graded again;
    ``sets``: those of the config; ``min_scored``: fewest samples, by set, that must have a score;
    ``earlier``: config digests of the sets of the point before it.
    """

    def __init__(
        self,
        plan: PointPlan,
        record: PointRecord,
        set_records: Mapping[str, SetRecord],
        *,
        sets: Mapping[str, LoadedSet],
        min_scored: Mapping[str, int],
        earlier: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._record = record
        self._set_records = set_records
        self._sets = sets
        self._min_scored = min_scored
        self._earlier = earlier
        self._told = told_sets(record)
        self._results: dict[str, SetResult] = {}
        self._breaks: list[str] = []
        self._problem = ""

    def before(self, name: str) -> Before:
        """Return a set as it was measured."""
        told = self._told[name]
        return Before(
            key=self._plan.source.key,
            digest=self._record.digest or "",
            config=told["config"],
            n_questions=told["questions"],
            n_samples_per_question=told["samples_per_question"],
            counts=self._set_records[name].counts,
        )

    def prepared(self, name: str) -> PreparedSet:
        """Return a set as it is now, with as many samples of each question as were taken."""
        loaded = self._sets[name]
        n_samples = self._told[name]["samples_per_question"]
        eval_set = msgspec.structs.replace(
            loaded.eval_set,
            n_samples_per_eval_prompt=n_samples,
            pass_k=[k for k in loaded.eval_set.pass_k if k <= n_samples],
        )
        whose = loaded.eval_set.tokenizer
        provenance = self._record.provenance
        digest = whole_digest(
            loaded, provenance["tokenizer"][whose], provenance["chat_template"][whose]
        )
        return PreparedSet(msgspec.structs.replace(loaded, eval_set=eval_set), [], digest)

    def keep(self, name: str) -> None:
        """Take over a set as it was."""
        old = self._set_records[name]
        self._results[name] = SetResult(
            name=name,
            counts=old.counts,
            seconds=old.seconds,
            metrics=old.metrics,
            too_few=old.counts.n_scored < self._min_scored.get(name, 0),
        )
        if name in self._record.curve_breaks:
            self._breaks.append(name)

    def graded(self, name: str, counts: Counts, metrics: dict[str, float], problem: str) -> None:
        """Take in a set that was graded again."""
        config = self.prepared(name).config_digest
        if self._earlier.get(name, config) != config:
            self._breaks.append(name)
            metrics[f"eval/{name}/curve_break"] = 1.0
        if problem and not self._problem:
            self._problem = f"{name}: {problem}"
        self._results[name] = SetResult(
            name=name,
            counts=counts,
            seconds=self._set_records[name].seconds,
            metrics=metrics,
            too_few=counts.n_scored < self._min_scored.get(name, 0),
        )

    def records(
        self, aggregates: Iterable[Aggregate], limits: Dispatch
    ) -> tuple[list[SetRecord], PointRecord]:
        """Build the records of the new revision, whose number they do not have yet.

        Raises CannotRegrade when what is left is no measurement: the old numbers then stand.
        """
        old = self._record
        key = self._plan.source.key
        results = list(self._results.values())
        metrics = {name: old.metrics[name] for name in _KEPT_METRICS if name in old.metrics}
        for result in results:
            metrics |= result.metrics
        questions = {name: told["questions"] for name, told in self._told.items()}
        for aggregate in aggregates:
            if set(aggregate.sets) <= questions.keys():
                metrics |= aggregate_metrics(aggregate, metrics, questions)
        point = judge(
            EvalPoint(key, _snapshot(old)),
            PointResult(
                counts=sum((result.counts for result in results), Counts()),
                metrics=metrics,
                engines=old.engines,
                weight_versions=old.weight_versions,
                provenance=self._provenance(),
                problem=self._problem,
                curve_breaks=sorted(self._breaks),
            ),
            digest=old.digest,
            timings=old.timings,
            sets=results,
            limits=limits,
        )
        if point.outcome is Outcome.SKIPPED:
            raise CannotRegrade(f"cannot regrade {key}: {point.detail}; nothing was changed")
        return [_set_record(key, result) for result in results], point

    def summary(self) -> str:
        """Say how the scores have changed."""
        return "; ".join(self._summary(name) for name in self._results)

    def _summary(self, name: str) -> str:
        if name in self._plan.kept:
            return f"{name} stays ({self._plan.kept[name]})"
        old, new = (
            one.metrics.get(f"eval/{name}")
            for one in (self._set_records[name], self._results[name])
        )
        failed = self._results[name].counts.n_grader_error
        trouble = f" ({failed} could not be graded)" if failed else ""
        return f"{name} {_score(old)} -> {_score(new)}{trouble}"

    def _provenance(self) -> dict[str, Any]:
        sets = dict(self._told)
        for name in self._plan.regraded:
            prepared = self.prepared(name)
            loaded = prepared.loaded
            sets[name] = sets[name] | {
                "data": loaded.data_digest,
                "config": prepared.config_digest,
                "settings": loaded.settings_digest,
                "grader": loaded.eval_set.grader,
                "grader_version": loaded.grader_version,
            }
        return self._record.provenance | {
            "sets": sets,
            "regraded_from": self._record.record_id,
            "regraded_sets": list(self._plan.regraded),
        }


def _snapshot(record: PointRecord) -> Snapshot:
    """Return as much of the snapshot as its record tells."""
    return Snapshot(
        run=record.run,
        step=record.step,
        kind=Kind(record.kind),
        directory=Path(record.directory),
        fingerprint=record.fingerprint,
        size_bytes=0,
        digest=record.digest,
        export_s=record.metrics.get("eval/export_time_seconds"),
    )


def _set_record(key: PointKey, result: SetResult) -> SetRecord:
    return SetRecord(
        run=key.run,
        step=key.step,
        revision=key.revision,
        record_id="",
        kind=key.kind,
        set=result.name,
        counts=result.counts,
        seconds=result.seconds,
        metrics={**result.metrics, "eval/step": key.step},
    )


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
