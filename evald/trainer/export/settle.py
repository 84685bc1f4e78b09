"""How the ranks of a job come to the same end of an export: all succeed, or all fail alike."""

from __future__ import annotations

from typing import Any

from evald.trainer.contract import PeerLost, Ranks
from evald.trainer.failure import Failure, failure_of


def settle(ranks: Ranks, step: int, value: Any, failure: Failure | None) -> list[Any]:
    """Exchange ``value``, or why there is none; return the values in rank order.

    Collective, also for a rank that failed: nobody waits for it in vain. If one or more failed,
    every rank raises the error of the first of them. Raises PeerLost when a rank does not come.
    """
    try:
        outcomes = ranks.exchange((value, failure))
    except PeerLost as lost:
        told = failure_of(lost)
        if failure is not None:
            told = told._replace(cause=f"{told.cause}; on this rank: {failure.cause}")
        raise told.error(step) from lost
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            raise other.error(step, rank if ranks.size > 1 else None)
    return [outcome[0] for outcome in outcomes]
