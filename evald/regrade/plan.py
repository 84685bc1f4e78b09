"""What is to be graded again, point by point and set by set, and why what is not stays as it is.

A set can be graded again when its questions are asked as they were: the same prompts and sampling
(``evald.evals.asked``). Its grader and its labels may be others; that is what regrading is for.
Sets that are not graded again keep samples and numbers, so that the new revision is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evald.errors import EvaldError
from evald.evals.graders import grader_version
from evald.evals.sets import LoadedSet
from evald.point import Kind, PointKey
from evald.results.compressed import stored_file
from evald.results.history import Ended, History
from evald.results.index import PointIndex, PointState
from evald.results.records import PointRecord
from evald.results.samples import sample_file

#: kinds of eval sets whose samples are scored by log-probabilities, not by a grader.
UNGRADED_KINDS = frozenset({"loglikelihood_choice", "perplexity"})

NOT_ASKED_FOR = "not asked for"


class What(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants to have graded again."""

    run: str
    #: empty: every point of the run.
    steps: list[int] = []
    #: empty: every set that can be.
    sets: list[str] = []
    #: config digests, by set, that the asker has seen; the grader's must be the same.
    expects: dict[str, str] = {}


class PointPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One point: its newest revision with samples, and what becomes of its sets."""

    source: Ended
    #: the point's newest revision, which may have been skipped.
    newest: int
    regraded: list[str]
    #: samples of those sets.
    n_samples: int
    #: set -> why it stays as it is.
    kept: dict[str, str]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All points, in the order in which they are compared with each other."""

    points: list[PointPlan]
    #: a sentence for each point that was not named, and cannot be graded again.
    left_out: list[str]


class CannotRegrade(EvaldError):
    """A point, or a set, cannot be graded again."""


class Planner:
    """Plans by what the ledger knows and what the config has now.

    ``is_open`` tells whether a point queues or runs. Blocking.
    """

    def __init__(
        self,
        sets: Mapping[str, LoadedSet],
        *,
        index: PointIndex,
        results_file: Path,
        is_open: Callable[[PointKey], bool],
    ) -> None:
        self._sets = sets
        self._index = index
        self._results_file = results_file
        self._is_open = is_open

    def plan(self, what: What) -> Plan:
        """Plan; raises CannotRegrade for a step or set that was named and cannot be graded again.

        Without names, every point and set is graded again that can be. Raises OSError.
        """
        self._check_sets(what)
        history = History(self._results_file, what.run)
        points = _Points(self._index, history, what.run)
        planned: list[PointPlan] = []
        left_out: list[str] = []
        for step, kinds in points.wanted(what.steps):
            found, refusals = [], []
            for kind in kinds:
                try:
                    found.append(self._plan_point(points, kind, step, what))
                except CannotRegrade as refusal:
                    refusals.append(refusal)
            if what.steps and not found:
                raise refusals[0]
            planned += found
            left_out += map(str, refusals)
        if not planned:
            raise CannotRegrade(left_out[0])
        planned.sort(key=lambda one: (one.source.key.kind is Kind.STEP, one.source.key.step))
        return Plan(points=planned, left_out=left_out)

    def _check_sets(self, what: What) -> None:
        """Refuse sets that the config does not have, or whose grader is not the one of now."""
        for name in what.sets:
            if name not in self._sets:
                raise no_such_set(name, self._sets)
            if (fault := _no_grader(self._sets[name])) is not None:
                raise CannotRegrade(f"cannot regrade set {name!r}: {fault}")
        graded = [one for one in self._sets.values() if _no_grader(one) is None]
        if not graded:
            raise CannotRegrade(
                "cannot regrade: the config has no eval set with a grader "
                f"(it has {', '.join(self._sets) or 'none'})"
            )
        for one in graded:
            if what.sets and one.name not in what.sets:
                continue
            if what.expects.get(one.name, one.config_digest) != one.config_digest:
                raise CannotRegrade(
                    f"cannot regrade set {one.name!r}: the running daemon has another config of "
                    "it, from when it was started; restart the daemon"
                )
            if grader_version(one.eval_set) != one.grader_version:
                raise CannotRegrade(
                    f"cannot regrade set {one.name!r}: the files of its grader have changed since "
                    "evald started; restart evald"
                )

    def _plan_point(self, points: _Points, kind: Kind, step: int, what: What) -> PointPlan:
        states = self._index.revisions(what.run, step, kind)
        for state in states:
            # (one that was never accepted is what a regrade that was cut short has left)
            if self._is_open(state.key) or (state.outcome is None and state.directory):
                raise CannotRegrade(
                    f"cannot regrade {state.key}: it is being measured; ask again when it has ended"
                )
        source = points.with_samples(kind, step)
        if source is None:
            raise CannotRegrade(
                f"cannot regrade {states[-1].key}: it has no samples, as nothing was measured"
            )
        record, set_records = points.history.read(source)
        told = told_sets(record)
        regraded, kept = self._divide(source.key, told, what)
        for name in kept:
            if name not in set_records:
                raise CannotRegrade(
                    f"cannot regrade {source.key}: the ledger has no record of its eval set "
                    f"{name!r}, which would have to stay as it is"
                )
        n_samples = sum(
            told[name]["questions"] * told[name]["samples_per_question"] for name in regraded
        )
        return PointPlan(
            source=source,
            newest=states[-1].key.revision,
            regraded=regraded,
            n_samples=n_samples,
            kept=kept,
        )

    def _divide(
        self, key: PointKey, told: Mapping[str, Mapping[str, Any]], what: What
    ) -> tuple[list[str], dict[str, str]]:
        """Return the sets that are graded again, and the others with the reason."""
        for name in what.sets:
            if name not in told:
                raise CannotRegrade(f"cannot regrade {key}: it has no eval set {name!r}")
        regraded: list[str] = []
        kept: dict[str, str] = {}
        for name, entry in told.items():
            fault = self._fault(key, name, entry)
            if what.sets and name not in what.sets:
                kept[name] = NOT_ASKED_FOR
            elif fault is None:
                regraded.append(name)
            elif what.sets:
                raise CannotRegrade(f"cannot regrade set {name!r} of {key}: {fault}")
            else:
                kept[name] = fault
        if not regraded:
            why = "; ".join(f"{name}: {fault}" for name, fault in kept.items())
            raise CannotRegrade(f"cannot regrade {key}: {why or 'it has no eval sets'}")
        return regraded, kept

    def _fault(self, key: PointKey, name: str, entry: Mapping[str, Any]) -> str | None:
        """Say why a set of a point cannot be graded again."""
        if name not in self._sets:
            return "the config has no such eval set any more"
        loaded = self._sets[name]
        if (fault := _no_grader(loaded)) is not None:
            return fault
        if entry.get("asked") != loaded.asked_digest:
            return (
                "its questions, or how they are asked, are not those that it was measured with; "
                "restore them"
            )
        path = sample_file(self._results_file.parent, key, name)
        if stored_file(path) is None:
            return f"its samples {path} are gone"
        return None


class _Points:
    """The points of one run, found by step."""

    def __init__(self, index: PointIndex, history: History, run: str) -> None:
        self.history = history
        self._index = index
        self._run = run
        self._with_samples: dict[tuple[Kind, int], Ended] = {}
        self._steps: dict[int, list[Kind]] = {}
        for one in history.points():
            self._steps.setdefault(one.key.step, [])
            newest = self._with_samples.get((one.key.kind, one.key.step))
            if one.n_total and (newest is None or newest.key.revision < one.key.revision):
                self._with_samples[one.key.kind, one.key.step] = one

    def wanted(self, steps: list[int]) -> list[tuple[int, list[Kind]]]:
        """Return steps with the kinds of point that they have; raises CannotRegrade."""
        wanted = []
        for step in dict.fromkeys(steps) or sorted(self._steps):
            kinds = [kind for kind in (Kind.BASELINE, Kind.STEP) if self._states(kind, step)]
            if not kinds:
                raise CannotRegrade(
                    f"cannot regrade step {step} of run {self._run!r}: no such point is known"
                )
            wanted.append((step, kinds))
        if not wanted:
            raise CannotRegrade(f"cannot regrade run {self._run!r}: no point of it has ended")
        return wanted

    def with_samples(self, kind: Kind, step: int) -> Ended | None:
        """Return the newest revision that was judged by samples."""
        return self._with_samples.get((kind, step))

    def _states(self, kind: Kind, step: int) -> list[PointState]:
        return self._index.revisions(self._run, step, kind)


def told_sets(record: PointRecord) -> dict[str, dict[str, Any]]:
    """Return what a record says of its eval sets; nothing where a black box has its own words."""
    told = record.provenance.get("sets")
    if not isinstance(told, dict):
        return {}
    return {name: entry for name, entry in told.items() if isinstance(entry, dict)}


def no_such_set(name: str, known: Iterable[str]) -> CannotRegrade:
    """Make the error of a set that the config does not have."""
    has = ", ".join(known) or "none"
    return CannotRegrade(
        f"cannot regrade set {name!r}: the config has no such eval set (it has {has})"
    )


def _no_grader(loaded: LoadedSet) -> str | None:
    kind = loaded.eval_set.kind
    return f'kind "{kind}" has no grader' if kind in UNGRADED_KINDS else None
