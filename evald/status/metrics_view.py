"""Metrics of what is now: made from the status at the moment somebody asks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from evald.engines.state import State
from evald.status.view import EngineView, StatusView

#: of the daemon, as ``StatusView.state`` has them.
_DAEMON_STATES = ("starting", "serving", "draining", "paused")
#: of engines, and of a black box's process.
_ENGINE_STATES = (*map(str, State), "idle", "evaluating")


class ViewMetrics(Collector):
    """Turns a StatusView into metric families; labels name engines, which the config bounds."""

    def __init__(self, view: Callable[[], StatusView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """Read the status once."""
        view = self._view()
        yield from _daemon(view)
        yield from _queue(view)
        yield from _room(view)
        yield from _engines(view.engines)


def _daemon(view: StatusView) -> Iterator[Metric]:
    version = {"version": view.version, "python": platform.python_version()}
    yield InfoMetricFamily("evald_build", "Version of evald.", value=version)
    yield _state("evald_state", "What the daemon does.", [({}, view.state)], _DAEMON_STATES)
    yield CounterMetricFamily(
        "evald_beats", "Beats of the status file, one a second while the loop lives.", view.beat
    )
    yield _gauge(
        "evald_results_blocked",
        "1 while results cannot be written and evaluation waits for that.",
        float(bool(view.not_written)),
    )
    yield CounterMetricFamily(
        "evald_records", "Records in the ledger, over its life.", view.last_seq
    )


def _queue(view: StatusView) -> Iterator[Metric]:
    yield _gauge("evald_points_queued", "Points that wait.", len(view.queued))
    yield _gauge("evald_points_running", "Points that are prepared or run.", len(view.running))
    yield _gauge(
        "evald_points_in_flight_limit", "The most that are prepared or run at a time.", view.cap
    )
    sets = [one for point in view.running for one in point.sets]
    yield _gauge(
        "evald_running_samples", "Samples of the points that run.", sum(one.total for one in sets)
    )
    yield _gauge("evald_running_samples_done", "Of those, done.", sum(one.done for one in sets))
    yield _gauge(
        "evald_lag_steps",
        "Newest known step minus newest ended one, of the run that is furthest behind.",
        view.lag_steps,
    )


def _room(view: StatusView) -> Iterator[Metric]:
    staging, disk = view.staging, view.disk
    if staging is not None:
        yield _gauge(
            "evald_staging_used_bytes",
            "Snapshots in the staging root that evald knows.",
            staging.used_bytes,
        )
        yield _gauge(
            "evald_staging_free_bytes",
            "Free in the staging root's file system.",
            staging.free_bytes,
        )
        yield _gauge(
            "evald_staging_budget_bytes",
            "The most that snapshots may take (staging.max_bytes).",
            staging.max_bytes,
        )
        yield _gauge(
            "evald_staging_min_free_bytes",
            "What stays free there (staging.min_free_bytes).",
            staging.min_free_bytes,
        )
        yield _gauge("evald_staging_snapshots", "Snapshots in the staging root.", staging.snapshots)
    if disk is not None:
        yield _gauge(
            "evald_results_free_bytes",
            "Free in the results' file system.",
            disk.results_free_bytes,
        )
        yield _gauge(
            "evald_results_size_bytes", "Size of that file system.", disk.results_total_bytes
        )
        yield _gauge(
            "evald_results_samples_bytes", "Stored samples of ended points.", disk.samples_bytes
        )


def _engines(engines: list[EngineView]) -> Iterator[Metric]:
    states = [({"engine": one.name}, one.state) for one in engines]
    yield _state("evald_engine_state", "What each engine does.", states, _ENGINE_STATES)

    def counter(name: str, sentence: str, value: Callable[[EngineView], int]) -> Metric:
        family = CounterMetricFamily(name, sentence, labels=("engine",))
        for one in engines:
            family.add_metric((one.name,), value(one))
        return family

    def gauge(name: str, sentence: str, value: Callable[[EngineView], float | None]) -> Metric:
        family = GaugeMetricFamily(name, sentence, labels=("engine",))
        for one in engines:
            if (number := value(one)) is not None:
                family.add_metric((one.name,), number)
        return family

    since = ", since the daemon started."
    yield counter(
        "evald_engine_restarts",
        f"Restarts that count against the engine{since}",
        lambda e: e.restarts,
    )
    yield counter("evald_engine_answers", f"Answers that counted{since}", lambda e: e.answers)
    yield counter(
        "evald_engine_prompt_tokens", f"Prompt tokens of those{since}", lambda e: e.prompt_tokens
    )
    yield counter(
        "evald_engine_generated_tokens",
        f"Generated tokens of those{since}",
        lambda e: e.generated_tokens,
    )
    yield gauge(
        "evald_engine_requests_in_flight", "Samples that are asked now.", lambda e: e.in_flight
    )
    yield gauge(
        "evald_engine_requests_waiting",
        "Requests that wait on the server, also somebody else's; absent while it is idle.",
        lambda e: e.waiting,
    )
    yield gauge(
        "evald_engine_kv_used_ratio",
        "Used share of the KV cache, of the fullest rank; absent while it is idle.",
        lambda e: e.kv_use,
    )


def _gauge(name: str, sentence: str, value: float | None) -> Metric:
    """One number; a family without a sample where it is not known."""
    family = GaugeMetricFamily(name, sentence)
    if value is not None:
        family.add_metric((), value)
    return family


def _state(
    name: str, sentence: str, of: Iterable[tuple[dict[str, str], str]], states: Iterable[str]
) -> Metric:
    """1 for the state that each is in, 0 for the others."""
    family = Metric(name, sentence, "gauge")
    for labels, now in of:
        for state in dict.fromkeys((*states, now)):
            family.add_sample(name, labels | {"state": state}, float(state == now))
    return family
