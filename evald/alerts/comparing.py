"""Rules that compare a point with an earlier one of its run: drop, truncated, no_answer.

Measured on simulated curves (``bench/alert_noise.py``), with the defaults: see the README.
"""

from __future__ import annotations

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


class _Curve(msgspec.Struct):
    """The readings of one metric of one run."""

    readings: dict[int, Reading] = msgspec.field(default_factory=dict)
    baseline: Reading | None = None
    newest_step: int | None = None


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
        #: samples of the sets of points that have not ended: shares are of so many.
        self._n_samples: dict[tuple[str, Kind, int, int], dict[str, int]] = {}

    def note(self, record: AnyRecord) -> list[Verdict]:
        """Judge a point that was measured."""
        if isinstance(record, SetRecord):
            key = (record.run, record.kind, record.step, record.revision)
            self._n_samples.setdefault(key, {})[record.set] = record.counts.n_total
        if not isinstance(record, PointRecord):
            return []
        key = (record.run, record.kind, record.step, record.revision)
        n_samples = self._n_samples.pop(key, {})
        if record.outcome is Outcome.SKIPPED:
            return []
        found = [self._look(record, one, n_samples) for one in self._watched]
        return [verdict for verdict in found if verdict is not None]

    def _look(
        self, record: PointRecord, one: Watched, n_samples: Mapping[str, int]
    ) -> Verdict | None:
        new = _read(record, one, n_samples)
        if new is None:
            return None
        curve = self._curves.setdefault((record.run, one.metric), _Curve())
        if not set(one.sets).isdisjoint(record.curve_breaks):
            curve.readings.clear()
            curve.baseline = None
        verdict = None
        if record.kind is Kind.BASELINE:
            curve.baseline = new
            return None
        # an earlier step that was measured late, or graded again, tells nothing new
        in_turn = curve.newest_step is None or new.step >= curve.newest_step
        if in_turn and "regraded_from" not in record.provenance:
            verdict = self._judge(record, one, curve, new)
            curve.newest_step = new.step
        curve.readings[new.step] = new
        return verdict

    def _judge(
        self, record: PointRecord, one: Watched, curve: _Curve, new: Reading
    ) -> Verdict | None:
        before = [curve.readings[step] for step in sorted(curve.readings) if step < new.step]
        old, candidates = self._reference(one, curve, before)
        if old is None:
            return None
        name = "baseline" if self._against == "baseline" else "prev"
        compared = None
        if name == "baseline" or old is before[-1]:
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

    def _reference(
        self, one: Watched, curve: _Curve, before: list[Reading]
    ) -> tuple[Reading | None, int]:
        """Return what to compare with, and of how many it is the best."""
        if self._against == "baseline":
            return curve.baseline, 1
        if self._against == "previous":
            return (before[-1] if before else None), 1
        complete = [reading for reading in before if reading.complete]
        best = min(complete, key=lambda reading: one.sign * reading.value, default=None)
        return best, len(complete)

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


def _read(record: PointRecord, one: Watched, n_samples: Mapping[str, int]) -> Reading | None:
    """Read a metric with its interval; None: the point has no such number."""
    metrics = record.metrics
    value = metrics.get(one.metric)
    if value is None:
        return None
    low = high = None
    if one.samples_each is not None:
        n = sum(n_samples.get(name, 0) for name in one.sets) // one.samples_each
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
