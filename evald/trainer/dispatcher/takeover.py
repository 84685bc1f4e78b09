"""What an earlier life of the job has left behind in its root."""

from __future__ import annotations

import structlog

from evald.errors import EvaldError
from evald.point import Kind
from evald.staging.digest import fingerprint
from evald.staging.ended import EndedList
from evald.status.view import StagingView
from evald.trainer.dispatcher.arguments import Arguments
from evald.trainer.dispatcher.courier import Courier
from evald.trainer.dispatcher.inflight import Name
from evald.trainer.dispatcher.node import Node
from evald.trainer.dispatcher.staged import Staged, skipped, staged, words

log = structlog.get_logger(__name__)


def take_over(arguments: Arguments, node: Node, courier: Courier | None, *, now_s: float) -> None:
    """Count what the ledger does not know; with a ``courier``, bring it on its way.

    What names no run is the job's only where that is the run of such snapshots. What the root
    remembers as ended gets no record in a new ledger: it is not in flight. What had arrived
    and was only not cleared yet arrives once more: evald knows it by its digest.
    """
    run = node.run
    unnamed_are_ours = run is None or node.takes_unnamed(run)
    found = staged(arguments.root, arguments.pattern, arguments.marker)
    left_behind = [
        *((one.step, one.run, False) for one in _not_ended(arguments, found)),
        *((step, of_run, True) for step, of_run in skipped(arguments.root, arguments.pattern)),
    ]
    for step, of_run, is_skip in left_behind:
        if run is None or of_run == run or (of_run is None and unnamed_are_ours):
            node.points.inherit(Name(Kind.STEP, step), now_s=now_s, skipped=is_skip)
    if courier is None:
        return
    left: list[tuple[int, str, int | None]] = [
        *((one.mtime_ns, str(one.path), one.step) for one in found if one.run in {None, run}),
        *((mtime_ns, str(path), None) for mtime_ns, path in words(arguments.root)),
    ]
    for _, path, of_step in sorted(left, key=lambda one: one[:2]):
        log.info("spool_taken_over", path=path)
        courier.add(arguments.root / path, step=of_step)


def _not_ended(arguments: Arguments, found: list[Staged]) -> list[Staged]:
    """Return those that the root (or, for a run's folder, the one above) does not call ended."""
    lists = [EndedList(root) for root in (arguments.root, arguments.root.parent)]
    for one in lists if found else ():
        one.load()
    left = []
    for snapshot in found:
        try:
            seen, _ = fingerprint(snapshot.path, arguments.marker)
        except (EvaldError, OSError):
            continue  # gone meanwhile: evald has ended it
        if not any(one.find(snapshot.path, seen) for one in lists):
            left.append(snapshot)
    return left


def compare_names(arguments: Arguments, staging: StagingView | None) -> None:
    """Say it when the daemon looks for other names than this job's snapshots have."""
    if staging is None or not staging.pattern or arguments.mode == "reuse":
        return
    takes, gives = (staging.pattern, staging.marker), (arguments.pattern, arguments.marker)
    if takes != gives:
        log.warning(
            "names_differ",
            detail=f'evald takes "{takes[0]}" with the marker "{takes[1]}", and this job publishes '
            f'"{gives[0]}" with "{gives[1]}": evald will take none of them; give EvalDispatcher '
            "its pattern and marker",
        )
