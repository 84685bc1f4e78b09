"""The far end of a push: what a carrier asks of it, and who is measuring what lies there."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import Literal, Protocol

import msgspec

from evald.point import SkipReason
from evald.status.view import StatusView
from evald.trainer.contract import NoSpace, PushError
from evald.trainer.push.manifest import SourceFile
from evald.trainer.push.plan import Parcel

#: a daemon whose beat stands still this long is taken for dead: nobody waits for it.
DEAD_AFTER_S = 10.0
_POLL_S = 1.0
#: hidden directories of pushes that were given up are swept after this long.
STALE_MINUTES = 24 * 60
#: of the daemon; the root of a push may be a run's folder in the daemon's.
_BOARDS = (".evald/status.json", "../.evald/status.json")

#: what lies under the final name: nothing, a directory, a directory with its marker.
State = Literal["absent", "unmarked", "marked"]
#: the hidden directory, or the one under the final name.
Where = Literal["temporary", "final"]


class StillHeld(PushError):
    """The step was pushed before with other bytes, and evald has not ended its point yet."""

    reason = SkipReason.BUSY


class FarEnd(Protocol):
    """The root on the eval node. Every call ends by its ``deadline`` (of ``time.monotonic()``).

    Raises PushError, and NoSpace when the file system there is full.
    """

    def read(self, names: Sequence[str], deadline: float) -> bytes:
        """Return the first of some small files, named from the root; empty where there is none."""
        ...

    def prepare(self, parcel: Parcel, deadline: float, *, replace: bool) -> State:
        """Make the hidden directory, unless there is something under the final name: tell what.

        ``replace``: that makes way, its marker first. Checks that there is room. Until ``release``
        nobody else writes into the hidden directory, as far as the far end can tell.
        """
        ...

    def send(
        self, parcel: Parcel, files: Sequence[SourceFile], deadline: float, *, again: bool
    ) -> None:
        """Copy files into the hidden directory; ``again``: whatever lies there, from the start."""
        ...

    def differences(self, parcel: Parcel, where: Where, deadline: float) -> set[str]:
        """Read every file there and return the names of those that are not as here."""
        ...

    def publish(self, parcel: Parcel, deadline: float) -> None:
        """Open the hidden directory up for evald's user, rename it, write the marker."""
        ...

    def write(self, name: str, content: bytes, deadline: float) -> None:
        """Write a small file below the root: nobody ever sees half of it."""
        ...

    def discard(self, name: str, deadline: float) -> None:
        """Remove the hidden directories of a name."""
        ...

    def release(self) -> None:
        """Let go of the hidden directory; what is in it stays."""
        ...


def check_room(parcel: Parcel, far: FarEnd, *, there_bytes: int, free_bytes: int) -> None:
    """Raise NoSpace where what is still to come does not fit."""
    if parcel.size_bytes - there_bytes > free_bytes:
        raise NoSpace(
            f"cannot push {parcel.name} to {far}: it has {parcel.size_bytes} bytes, and "
            f"{free_bytes} are free there"
        )


def late(far: FarEnd) -> PushError:
    """Return what to raise when the deadline is over."""
    return PushError(
        f"cannot push to {far}: not done within the timeout; what has arrived stays, and the next "
        "push goes on from there"
    )


def no_root(far: FarEnd) -> PushError:
    """Return what to raise where there is no root."""
    return PushError(
        f"cannot push to {far}: there is no such directory, or this user may not enter it; start "
        "evald there first, or correct the path"
    )


def taken(far: FarEnd) -> PushError:
    """Return what to raise when somebody else has made what is to be published."""
    return PushError(
        f"cannot push to {far}: another snapshot appeared under the same name meanwhile; let one "
        "process push it"
    )


def linked(far: FarEnd, hidden: str) -> PushError:
    """Return what to raise where the hidden directory is a link to somewhere else."""
    return PushError(
        f"cannot push to {far}: {hidden} there is a symbolic link, which no push makes; remove it"
    )


def read_board(far: FarEnd, deadline: float) -> StatusView | None:
    """Read ``status.json``; None where no daemon has served, or one of another version."""
    try:
        return msgspec.json.decode(far.read(_BOARDS, deadline), type=StatusView)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def wait_until_ended(
    ask: Callable[[], StatusView | None],
    *,
    runs: Container[str | None] | None,
    step: int | None,
    timeout_s: float,
) -> None:
    """Wait while a living daemon has a point of this step queued or running.

    ``runs``: of which one the point can be; None: any. Raises StillHeld after ``timeout_s``.
    """
    give_up = time.monotonic() + timeout_s
    beat, moved = None, time.monotonic()
    while (status := ask()) is not None and _holds(status, runs, step):
        now = time.monotonic()
        if (status.pid, status.beat) != beat:
            beat, moved = (status.pid, status.beat), now
        elif now - moved > DEAD_AFTER_S:
            return
        if now >= give_up:
            raise StillHeld(
                f"cannot push step {step} again: evald has not ended its point within "
                f"{timeout_s:g} s; push it later, or report the step as skipped (busy)"
            )
        time.sleep(_POLL_S)


def _holds(status: StatusView, runs: Container[str | None] | None, step: int | None) -> bool:
    return any(
        step in {None, point.step} and (runs is None or point.run in runs)
        for point in (*status.queued, *status.running)
    )
