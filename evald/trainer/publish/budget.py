"""Room for one snapshot within a staging root's budget, for whoever writes into the root.

The budget is what the daemon's status says, also a dead daemon's. Where there is none (no daemon
has ever served here, a spool, another user's root) nothing is counted.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from evald.trainer.publish.faults import NoRoom
from evald.trainer.publish.names import read_small
from evald.trainer.publish.reservation import Reservations, largest_bytes


class _Budget(NamedTuple):
    root: Path
    max_bytes: int | None
    min_free_bytes: int


class Claim:
    """Room for one snapshot in ``root``: a staging root, or a run's folder in it.

    ``name`` is the step, or another name, under which this process writes it.

    A ``final`` snapshot may go over the budget; that others hear of it is enough.
    """

    def __init__(self, root: Path, name: int | str, *, final: bool) -> None:
        self._root = root
        self._name = name
        self._final = final
        self._reservations: Reservations | None = None

    def take(self, need_bytes: int | None) -> None:
        """Reserve room; more than once, it is the largest number that counts.

        ``need_bytes`` None: nobody knows yet. Then it is as much as the largest snapshot in the
        root takes, or all that is left for the first one. Raises NoRoom.
        """
        budget = _find_budget(self._root)
        if budget is None:
            return
        reservations = self._reservations
        if reservations is None:
            reservations = self._reservations = Reservations(budget.root, self._root)
        try:
            if need_bytes is None and reservations.covers(self._name):
                return
            refusal = self._take(reservations, budget, need_bytes)
        except TimeoutError as error:
            raise NoRoom(f"cannot reserve room for the snapshot: {error}") from error
        except OSError:
            return  # another user's: the daemon's own judgement must do
        if refusal is not None:
            raise NoRoom(refusal)

    def _take(
        self, reservations: Reservations, budget: _Budget, need_bytes: int | None
    ) -> str | None:
        most, least = budget.max_bytes, budget.min_free_bytes
        known = largest_bytes(budget.root) if need_bytes is None else need_bytes

        def need(used_bytes: int) -> int:
            return known if known or most is None else max(most - used_bytes, 1)

        def judge(used_bytes: int) -> str | None:
            disk = os.statvfs(budget.root)
            free = disk.f_bavail * disk.f_frsize
            if least and free - known < least:
                return no_room(known, budget.root, free)
            return over_budget(known, used_bytes, most, final=self._final)

        return reservations.take(self._name, need, judge)

    def give_back(self) -> None:
        """End it: the snapshot is published, or will not be."""
        if self._reservations is not None:
            self._reservations.give_back(self._name)
            self._reservations = None


def no_room(need_bytes: int, where: object, free_bytes: int) -> str:
    """Say that a file system has too little free."""
    return (
        f"the snapshot takes about {_size(need_bytes)}, and {where} has {_size(free_bytes)} free; "
        "make room there, or lower staging.keep or dispatch.max_in_flight"
    )


def over_budget(
    need_bytes: int, used_bytes: int, max_bytes: int | None, *, final: bool
) -> str | None:
    """Say that a snapshot does not fit into the budget; None: it does."""
    if final or max_bytes is None or used_bytes + need_bytes <= max_bytes:
        return None
    return (
        f"the snapshot takes about {_size(need_bytes)}, and {_size(used_bytes)} of "
        f"staging.max_bytes = {max_bytes} are used; raise it, or lower staging.keep or "
        "dispatch.max_in_flight"
    )


def _find_budget(root: Path) -> _Budget | None:
    """Find the budget of the root itself, or of the one in which it is a run's folder."""
    for folder in (root, root.parent):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            staging = json.loads(read_small(folder / ".evald" / "status.json"))["staging"]
            most, least = staging["max_bytes"], int(staging.get("min_free_bytes", 0))
            if most is not None or least:
                return _Budget(folder, None if most is None else int(most), least)
            return None
    return None


def _size(number: int) -> str:
    """Show bytes for people."""
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"  # noqa: PLR2004
