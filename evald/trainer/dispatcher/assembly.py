"""Builds a dispatcher's parts; what needs torch or HTTP is imported only where it is used."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evald.errors import EvaldError
from evald.trainer.contract import Alone, Carrier, Link, Ranks
from evald.trainer.dispatcher.arguments import Arguments, is_far
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.desk import Desk
from evald.trainer.dispatcher.node import Node
from evald.trainer.dispatcher.outbox import Outbox
from evald.trainer.links.file_link import FileLink


class Exporter(Protocol):
    """Publishes weights as snapshots; every rank calls it. ``SnapshotExporter`` is one."""

    def export(
        self, weights: Any, step: int, *, final: bool = False
    ) -> concurrent.futures.Future[Path]:
        """Begin an export, at the latest once the one before has ended; failures are its result."""
        ...

    def close(self, timeout_s: float = ...) -> None:
        """Wait for what is under way."""
        ...


def find_ranks() -> tuple[Ranks, Callable[[], None]]:
    """Return the job's processes, by torch.distributed if it is in use, and what closes them."""
    if "torch" not in sys.modules:
        return Alone(), _nothing
    from evald.trainer.ranks import Processes, current_ranks  # noqa: PLC0415 - needs torch

    ranks = current_ranks()
    return ranks, ranks.close if isinstance(ranks, Processes) else _nothing


def _nothing() -> None:
    """Close nothing."""


def build_exporter(arguments: Arguments, ranks: Ranks, options: Mapping[str, Any]) -> Exporter:
    """Build the exporter of this package; raises ValueError for ``options`` that it refuses."""
    from evald.trainer.export import SnapshotExporter  # noqa: PLC0415 - needs torch

    return SnapshotExporter(
        arguments.root,
        base_dir=arguments.base_dir,
        run=arguments.run,
        mode="async" if arguments.mode == "async" else "sync",
        pattern=arguments.pattern,
        marker=arguments.marker,
        ranks=ranks,
        **options,
    )


class Ways:
    """How the job reaches the daemon, as it was told; built only on rank 0."""

    def __init__(
        self,
        *,
        results: Any,
        url: str | None,
        token: str | None,
        token_file: Any,
        destination: str | None,
        link: Link | None,
        carrier: Carrier | None,
    ) -> None:
        self._results = results
        self._url = url
        self._token = token
        self._token_file = token_file
        self._destination = destination
        self._link = link
        self._carrier = carrier

    def root(self, arguments: Arguments) -> Path:
        """Return where the daemon's root is seen from here: a spool is not it."""
        local = self._destination is not None and not is_far(self._destination)
        return Path(self._destination or "").expanduser() if local else arguments.root

    def link(self, arguments: Arguments) -> Link:
        """Build the way to ask; raises ValueError or EvaldError for a bad URL or token.

        A token that the daemon refuses is told now; a daemon that is not there yet is no error.
        """
        if self._link is not None:
            return self._link
        if self._url is None:
            return FileLink(self.root(arguments), self._results)
        from evald.trainer.links.http_link import HttpLink  # noqa: PLC0415 - one host does without

        link = HttpLink(self._url, self._token, self._token_file)
        try:
            link.check()
        except EvaldError as error:
            link.close()
            raise ValueError(str(error)) from error
        return link

    def courier(self, arguments: Arguments, link: Link) -> Courier | None:
        """Build the way for snapshots; None: the root is the daemon's own.

        Raises ValueError for a destination that is none, EvaldError where a program is missing.
        """
        carrier = self._carrier
        if self._destination is not None:
            from evald.trainer.push import carrier_for  # noqa: PLC0415 - one host does without

            carrier = carrier_for(
                self._destination, root=arguments.root, marker=arguments.marker, link=link
            )
        if carrier is None:
            return None
        return Courier(carrier, arguments.root, marker=arguments.marker)


class Parts(NamedTuple):
    """A dispatcher's parts; the last three are rank 0's."""

    ranks: Ranks
    exporter: Exporter | None
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
    ranks, close_ranks = (ranks, _nothing) if ranks is not None else find_ranks()
    if exporter is None and arguments.mode != "reuse":
        exporter = build_exporter(arguments, ranks, export_options)
    if ranks.rank != 0:
        return Parts(ranks, exporter, close_ranks)
    link = ways.link(arguments)
    courier = ways.courier(arguments, link)
    node = Node(
        link,
        root=ways.root(arguments),
        run=arguments.run,
        cap=arguments.max_in_flight,
        dead_after_s=arguments.dead_after_s,
        after_seq=after_seq,
        monotonic=monotonic,
    )
    outbox = Outbox(arguments.root, run=arguments.run, pattern=arguments.pattern, courier=courier)
    desk = Desk(
        arguments, node=node, outbox=outbox, courier=courier, monotonic=monotonic, sleep=sleep
    )
    return Parts(ranks, exporter, close_ranks, desk, link, courier)
