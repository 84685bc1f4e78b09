"""Builds a dispatcher's parts; what needs torch or HTTP is imported only where it is used."""

from __future__ import annotations

import concurrent.futures
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from evald.trainer.contract import Alone, Link, Ranks
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.desk import Desk
from evald.trainer.dispatcher.node import Node
from evald.trainer.dispatcher.outbox import Outbox
from evald.trainer.dispatcher.traffic import Traffic
from evald.trainer.dispatcher.ways import Ways
from evald.trainer.values import known_names


class Exporter(Protocol):
    """Publishes weights as snapshots; every rank calls it. ``SnapshotExporter`` is one."""

    def export(
        self, weights: Any, step: int, *, final: bool = False, run: str | None = None
    ) -> concurrent.futures.Future[Path]:
        """Begin an export, at the latest once the one before has ended; failures are its result.

        ``run``: for the manifest; None: as the exporter was told itself.
        """
        ...

    def close(self, timeout_s: float = ...) -> None:
        """Wait for what is under way."""
        ...


@runtime_checkable
class Prepares(Exporter, Protocol):
    """One that can take its memory before the first export."""

    def prepare(self, weights: Any) -> None:
        """Take it; every rank calls it. Raises ValueError for weights that are none."""
        ...


def _nothing() -> None:
    """Close nothing."""


def _no_fault(weights: Any, step: int) -> str | None:
    """Leave the weights to an exporter that knows more of them."""
    del weights, step
    return None


class Parts(NamedTuple):
    """A dispatcher's parts; the last three are rank 0's."""

    ranks: Ranks
    exporter: Exporter | None
    #: says what is wrong with weights that are none.
    fault_of: Callable[[Any, int], str | None] = _no_fault
    #: lets go of ranks that were found here.
    close_ranks: Callable[[], None] = _nothing
    desk: Desk | None = None
    link: Link | None = None
    courier: Courier | None = None


def build_parts(
    arguments: Arguments,
    ways: Ways,
    *,
    ranks: Ranks | None,
    exporter: Exporter | None,
    export_options: Mapping[str, Any],
    after_seq: int | None,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> Parts:
    """Build what this rank needs; collective."""
    close_ranks, fault_of = _nothing, _no_fault
    if ranks is None and "torch" not in sys.modules:
        ranks = Alone()
    elif ranks is None:
        from evald.trainer.ranks import Processes, current_ranks  # noqa: PLC0415 - needs torch

        ranks = current_ranks()
        close_ranks = ranks.close if isinstance(ranks, Processes) else _nothing
    if exporter is None and arguments.mode != "reuse":
        from evald.trainer.export import SnapshotExporter  # noqa: PLC0415 - needs torch
        from evald.trainer.export.meeting import fault_of  # noqa: PLC0415

        own: dict[str, Any] = {
            "base_dir": arguments.base_dir,
            "run": arguments.run,
            "mode": arguments.mode,
            "pattern": arguments.pattern,
            "marker": arguments.marker,
            "ranks": ranks,
        }
        takes = inspect.signature(SnapshotExporter).parameters.keys() - {"root", *own}
        known_names("export_options", export_options, takes)
        exporter = SnapshotExporter(arguments.root, **own, **export_options)
    if ranks.rank != 0:
        return Parts(ranks, exporter, fault_of, close_ranks)
    arguments.refuse_missing_base()
    link = ways.make_link(arguments)
    courier = ways.make_courier(arguments, link)
    node = Node(
        link,
        place=ways.place(arguments),
        run=arguments.run,
        cap=arguments.max_in_flight,
        dead_after_s=arguments.dead_after_s,
        after_seq=after_seq,
        monotonic=monotonic,
    )
    outbox = Outbox(arguments.root, pattern=arguments.pattern, courier=courier)
    traffic = Traffic(
        arguments, node=node, outbox=outbox, courier=courier, monotonic=monotonic, sleep=sleep
    )
    return Parts(ranks, exporter, fault_of, close_ranks, Desk(arguments, traffic), link, courier)
