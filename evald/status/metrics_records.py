"""Metrics of what has ended: counted from the ledger's records, those of earlier lives included."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from evald.point import Outcome, SkipReason
from evald.results.records import Alert, AnyRecord, Counts, PointRecord

#: a reason that a trainer or a black box gave.
OTHER = "other"
_REASONS = frozenset(SkipReason)
#: names of alerts that are told apart; they are evald's own and the config's, over a ledger's life.
_MOST_ALERTS = 100
#: stage -> the field of a point's timings.
STAGES = {
    "validate": "validate_s",
    "queued": "queued_s",
    "prepare": "prepare_s",
    "pin": "pin_s",
    "evaluate": "evaluate_s",
}
_STAGE_BUCKETS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)


class RecordMetrics:
    """Counters, histograms and the time of the newest terminal record."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._points = Counter(
            "evald_points",
            "Points that have ended, over the ledger's life.",
            ("outcome", "reason"),
            registry=registry,
        )
        self._stages = Histogram(
            "evald_point_stage_duration_seconds",
            "Time of each stage of the points that were measured, over the ledger's life.",
            ("stage",),
            registry=registry,
            buckets=_STAGE_BUCKETS,
        )
        self._duration = Histogram(
            "evald_point_duration_seconds",
            "Time from acceptance to the end of the points that were measured, over the ledger's "
            "life.",
            registry=registry,
            buckets=_STAGE_BUCKETS,
        )
        self._samples = Counter(
            "evald_samples",
            "Samples of ended points by what became of them, over the ledger's life.",
            ("result",),
            registry=registry,
        )
        self._truncated = self._counter("truncated", "hit the length limit", registry)
        self._no_answer = self._counter("no_answer", "hold no answer for the grader", registry)
        self._moved = self._counter("moved", "were moved between engines", registry)
        self._grader_errors = Counter(
            "evald_grader_errors",
            "Samples of ended points whose grader failed or ran out of time, over the ledger's "
            "life.",
            registry=registry,
        )
        self._alerts = Counter(
            "evald_alerts",
            "Alerts that were recorded, over the ledger's life.",
            ("alert",),
            registry=registry,
        )
        self._alert_names: set[str] = set()
        self._last = Gauge(
            "evald_last_point_timestamp_seconds",
            "Time of the newest terminal record; 0: there is none yet.",
            registry=registry,
        )
        self._show_zeros()

    @staticmethod
    def _counter(name: str, what: str, registry: CollectorRegistry) -> Counter:
        sentence = f"Scored samples of ended points that {what}, over the ledger's life."
        return Counter(f"evald_samples_{name}", sentence, registry=registry)

    def _show_zeros(self) -> None:
        """Show every series from the start: a rate sees no first event that is not a step from 0.

        Those of alerts come with the first of a name.
        """
        for outcome in (Outcome.OK, Outcome.PARTIAL):
            self._points.labels(str(outcome), "")
        for reason in (*SkipReason, OTHER):
            self._points.labels(str(Outcome.SKIPPED), str(reason))
        for stage in STAGES:
            self._stages.labels(stage)
        self._count(Counts())

    def note(self, record: AnyRecord) -> None:
        """Count one record."""
        if isinstance(record, PointRecord):
            self._note_point(record)
        elif isinstance(record, Alert) and not record.cleared:
            known = record.name in self._alert_names or len(self._alert_names) < _MOST_ALERTS
            name = record.name if known else OTHER
            self._alert_names.add(name)
            self._alerts.labels(name).inc()

    def _note_point(self, record: PointRecord) -> None:
        reason = record.reason if not record.reason or record.reason in _REASONS else OTHER
        self._points.labels(str(record.outcome), reason).inc()
        self._last.set(record.time)
        if "regraded_from" in record.provenance:
            return  # its samples are those of another revision, and no engine worked for it
        self._count(record.counts)
        if record.outcome is not Outcome.SKIPPED:
            for stage, field in STAGES.items():
                self._stages.labels(stage).observe(getattr(record.timings, field))
            self._duration.observe(record.timings.total_s)

    def _count(self, counts: Counts) -> None:
        for result, number in (
            ("scored", counts.n_scored),
            ("error", counts.n_error),
            ("grader_error", counts.n_grader_error),
            ("timeout", counts.n_timeout),
        ):
            self._samples.labels(result).inc(number)
        self._truncated.inc(counts.n_truncated)
        self._no_answer.inc(counts.n_no_answer)
        self._moved.inc(counts.n_moved)
        self._grader_errors.inc(counts.n_grader_error)
