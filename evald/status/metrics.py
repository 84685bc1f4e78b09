"""What Prometheus sees: ``GET /metrics``, in its text format.

What the ledger knows is counted as records pass (``note``): such counters begin with the ledger's
own totals and go on across restarts. Everything else is read from the status when somebody asks.
No label holds what others name freely: no run, no eval set; reasons that are not evald's own are
"other".
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from evald.results.records import AnyRecord
from evald.status.loop_lag import LoopLag
from evald.status.metrics_records import RecordMetrics
from evald.status.metrics_view import ViewMetrics
from evald.status.view import StatusView

#: of the page. Not negotiated: every Prometheus reads it, and a bad Accept header fails nothing.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """All metrics of one daemon, in a registry of their own."""

    def __init__(self, view: Callable[[], StatusView]) -> None:
        # they would double the series, to say when the daemon started
        disable_created_metrics()  # type: ignore[no-untyped-call] # its author left the types out
        registry = CollectorRegistry()
        self.loop_lag = LoopLag(registry)
        self._records = RecordMetrics(registry)
        registry.register(ViewMetrics(view))
        ProcessCollector(registry=registry)  # memory, CPU time, open files: three reads of /proc
        self._registry = registry

    def note(self, record: AnyRecord) -> None:
        """Count one record of the ledger, replayed or new."""
        self._records.note(record)

    def exposition(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)
