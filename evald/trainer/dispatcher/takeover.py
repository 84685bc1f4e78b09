"""What an earlier life of the job has left behind in its root."""

from __future__ import annotations

import structlog

from evald.point import Kind
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.inflight import Name
from evald.trainer.dispatcher.node import Node
from evald.trainer.dispatcher.staged import staged, words

log = structlog.get_logger(__name__)


def take_over(arguments: Arguments, node: Node, courier: Courier | None, *, now_s: float) -> None:
    """Count snapshots that the ledger does not know; with a ``courier``, bring them on their way.

    What had arrived and was only not cleared yet arrives once more: evald knows it by its digest.
    """
    run = node.run
    found = [
        one
        for one in staged(arguments.root, arguments.pattern, arguments.marker)
        if run is None or one.run in {None, run}
    ]
    for one in found:
        node.points.inherit(Name(Kind.STEP, one.step), now_s=now_s)
    if courier is None:
        return
    left: list[tuple[int, str, int | None]] = [
        *((one.mtime_ns, str(one.path), one.step) for one in found),
        *((mtime_ns, str(path), None) for mtime_ns, path in words(arguments.root)),
    ]
    for _, path, step in sorted(left, key=lambda one: one[:2]):
        log.info("spool_taken_over", path=path)
        courier.add(arguments.root / path, step=step)
