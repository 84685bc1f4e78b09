"""Rules that compare a point with an earlier one of its run: drop, truncated, no_answer.

Measured on simulated curves (``bench/alert_noise.py``), with the defaults: see docs/watching.md.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

import msgspec

from evald.alerts.noise import Reading, independent, paired, widened
from evald.alerts.verdict import Rule, Verdict
from evald.config_alerts import AlertRule
from evald.evals.stats.errors import Z95, wilson
from evald.point import Kind, Outcome
from evald.results.records import AnyRecord, PointRecord, SetRecord

DEFAULT_K = 2.0
#: share of a set's samples.
DEFAULT_RISE = 0.05
#: a condition that lasts is over once it is this much of what made it one.
_OVER = 0.5
_WORDS = {"previous": "the point before", "best": "the best point", "baseline": "the baseline"}


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One metric that a rule compares."""

    metric: str
    #: 1: more is worse; -1: less is.
    sign: int
    #: eval sets that it is made of: where the curve of one breaks, nothing earlier compares.
    sets: list[str]
    #: of shares: samples of one question, which are not independent; None: a score.
    samples_each: int | None = None


class _Done(msgspec.Struct, frozen=True, kw_only=True):
    """One eval set of a point: shares are of so many samples, and what had ended before."""

    n_samples: int
    n_ended: int


class _Curve:
    """The readings of one metric of one run; a new point is compared without a look at all."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._readings: dict[int, Reading] = {}
        self._steps: list[int] = []
        #: the best of the complete ones, and of how many; None: one was replaced since.
        self._best: tuple[Reading | None, int] | None = (None, 0)
        self.baseline: Reading | None = None
        self.newest_step: int | None = None

    def clear(self) -> None:
        """Forget what no longer compares."""
        self._readings.clear()
        self._steps.clear()
        self._best = (None, 0)
        self.baseline = None

    def put(self, reading: Reading) -> None:
        """Take in a reading, in place of an earlier one of its step."""
        if reading.step in self._readings:
            self._best = None
        else:
            bisect.insort(self._steps, reading.step)
            if self._best is not None and reading.complete:
                best, n = self._best
                self._best = (self._better([best, reading]), n + 1)
        self._readings[reading.step] = reading

    def last_before(self, step: int) -> Reading | None:
        """Return the reading of the newest step before this one."""
        index = bisect.bisect_left(self._steps, step)
        return self._readings[self._steps[index - 1]] if index else None

    def best_before(self, step: int) -> tuple[Reading | None, int]:
        """Return the best complete reading of the steps before this one, and of how many."""
        is_all = not self._steps or self._steps[-1] < step
        if is_all and self._best is not None:
            return self._best
        before = (self._readings[one] for one in self._steps if one < step)
        complete = [reading for reading in before if reading.complete]
        found = (self._better(complete), len(complete))
        if is_all:
            self._best = found
        return found

    def _better(self, readings: Iterable[Reading | None]) -> Reading | None:
        known = (reading for reading in readings if reading is not None)
        return min(known, key=lambda reading: self._sign * reading.value, default=None)


class Comparing(Rule):
    """Judges each new point of a run by one metric after the other."""

    def __init__(self, config: AlertRule, watched: Iterable[Watched]) -> None:
        super().__init__(config)
        self._watched = list(watched)
        self._against = config.against or "previous"
        self._k = DEFAULT_K if config.k is None else config.k
        usual = 0.0 if config.kind == "drop" else DEFAULT_RISE
        self._at_least = usual if config.at_least is None else config.at_least
        self._curves: dict[tuple[str, str], _Curve] = {}
        #: sets of points that have not ended, by name.
        self._done: dict[tuple[str, Kind, int, int], dict[str, _Done]] = {}
        self._n_ended = 0

    def note(self, record: AnyRecord) -> list[Verdict]:
        """Judge a point that was measured."""
        if isinstance(record, SetRecord):
            key = (record.run, record.kind, record.step, record.revision)
            done = _Done(n_samples=record.counts.n_total, n_ended=self._n_ended)
            self._done.setdefault(key, {})[record.set] = done
        if not isinstance(record, PointRecord):
            return []
        self._n_ended += 1
        key = (record.run, record.kind, record.step, record.revision)
        done_sets = self._done.pop(key, {})
        if record.outcome is Outcome.SKIPPED:
            return []
        found = [self._look(record, one, done_sets) for one in self._watched]
        return [verdict for verdict in found if verdict is not None]

    def _look(self, record: PointRecord, one: Watched, done: Mapping[str, _Done]) -> Verdict | None:
        new = _read(record, one, done)
        if new is None:
            return None
        new = msgspec.structs.replace(new, ended=self._n_ended)
        curve = self._curves.setdefault((record.run, one.metric), _Curve(one.sign))
        if not set(one.sets).isdisjoint(record.curve_breaks):
            curve.clear()
        verdict = None
        if record.kind is Kind.BASELINE:
            curve.baseline = new
            return None
        # of what lasts, an earlier step that ends late tells nothing new; what was graded again,
        # of nothing
        in_turn = curve.newest_step is None or new.step >= curve.newest_step
        measured = "regraded_from" not in record.provenance
        if measured and (in_turn or self._against == "previous"):
            known = min((done[name].n_ended for name in one.sets if name in done), default=None)
            verdict = self._judge(record, one, curve, new, known)
        if measured and in_turn:
            curve.newest_step = new.step
        curve.put(new)
        return verdict

    def _judge(
        self,
        record: PointRecord,
        one: Watched,
        curve: _Curve,
        new: Reading,
        known: int | None,
    ) -> Verdict | None:
        """Judge one metric; ``known``: points that had ended when its differences were computed."""
        old, candidates = self._reference(curve, new.step)
        if old is None:
            return None
        name = "baseline" if self._against == "baseline" else "prev"
        compared = None
        in_time = known is None or old.ended <= known
        if in_time and (name == "baseline" or old is curve.last_before(new.step)):
            key = f"{one.metric}/delta_{name}"
            compared = paired(record.metrics, key, sign=one.sign)
        worse_by, k = compared or independent(_at_best(record, one, new), old, sign=one.sign)
        limit = widened(self._k, candidates)
        if k is None and not self._at_least:
            return None  # nobody knows what noise is here
        holds = None
        if worse_by > 0 and worse_by >= self._at_least and (k is None or k > limit):
            holds = True
        elif worse_by <= self._at_least * _OVER or (k is not None and k < limit * _OVER):
            holds = False
        lasts = self._against != "previous"
        subject = one.metric if lasts else f"{one.metric}@{record.step}.r{record.revision}"
        return Verdict(
            subject=subject,
            holds=holds,
            detail=self._sentence(one, new, old, worse_by, k, limit),
            lasts=lasts,
            run=record.run,
            step=record.step,
            revision=record.revision,
        )

    def _reference(self, curve: _Curve, step: int) -> tuple[Reading | None, int]:
        """Return what to compare with, and of how many it is the best."""
        if self._against == "baseline":
            return curve.baseline, 1
        if self._against == "previous":
            return curve.last_before(step), 1
        return curve.best_before(step)

    def _sentence(
        self,
        one: Watched,
        new: Reading,
        old: Reading,
        worse_by: float,
        k: float | None,
        limit: float,
    ) -> str:
        went = "is worse than" if worse_by > 0 else "is as good as"
        where = "" if self._against == "baseline" else f" (step {old.step})"
        sentence = (
            f"{one.metric} at step {new.step} {went} {_WORDS[self._against]}{where}: "
            f"{new.value:.4g} against {old.value:.4g}"
        )
        if k is not None and worse_by > 0:
            sentence += (
                f", {k:.1f} half widths of the 95 % interval of the difference (alert from "
                f"{limit:.1f})"
            )
        return sentence


def _read(record: PointRecord, one: Watched, done: Mapping[str, _Done]) -> Reading | None:
    """Read a metric with its interval; None: the point has no such number."""
    metrics = record.metrics
    value = metrics.get(one.metric)
    if value is None:
        return None
    low = high = None
    if one.samples_each is not None:
        n = sum(done[name].n_samples for name in one.sets if name in done) // one.samples_each
        if n:
            low, high = wilson(value * n, n)
    elif f"{one.metric}/ci95_low" in metrics and f"{one.metric}/ci95_high" in metrics:
        low, high = metrics[f"{one.metric}/ci95_low"], metrics[f"{one.metric}/ci95_high"]
    elif (error := metrics.get(f"{one.metric}/stderr")) is not None:
        low, high = value - Z95 * error, value + Z95 * error
    return Reading(
        step=record.step,
        value=value,
        low=low,
        high=high,
        complete=record.outcome is Outcome.OK,
    )


def _at_best(record: PointRecord, one: Watched, new: Reading) -> Reading:
    """Return what the value would be if all samples that have no score had been right."""
    most = record.metrics.get(f"{one.metric}/score_high")
    if one.sign > 0 or most is None or new.low is None or new.high is None:
        return new
    shift = most - new.value
    return Reading(step=new.step, value=most, low=new.low + shift, high=new.high + shift)
