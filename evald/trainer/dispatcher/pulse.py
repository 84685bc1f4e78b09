"""Does the daemon live? Told by its beat counter alone: no clock and no process id is shared."""

from __future__ import annotations

from collections.abc import Callable

from evald.status.view import StatusView

#: beats after which what a daemon has written before is sure to have been read, on any file system.
SETTLED_BEATS = 2


class Pulse:
    """Watches the beat between looks that may lie seconds or hours apart.

    The first status that is seen counts as a sign of life: whether it is an old one shows within
    ``dead_after_s``. ``monotonic`` gives seconds.
    """

    def __init__(self, dead_after_s: float, monotonic: Callable[[], float]) -> None:
        self.dead_after_s = dead_after_s
        self._monotonic = monotonic
        self._mark: tuple[int, int] | None = None
        self._moved_s = 0.0
        #: the beat was seen to go on: it is no status of a daemon that is gone.
        self.confirmed = False
        #: since when nothing has moved; None: the newest look saw a movement.
        self._quiet_since_s: float | None = None

    @property
    def seen(self) -> bool:
        """Whether any status was ever there."""
        return self._mark is not None

    @property
    def alive(self) -> bool:
        """Whether there is a daemon, as far as can be told."""
        return self.seen and not self.dead

    @property
    def moved(self) -> bool:
        """Whether the newest look saw the beat go on."""
        return self._mark is not None and self._quiet_since_s is None

    @property
    def dead(self) -> bool:
        """Whether the beat has stood still, or the status was missing, for too long."""
        quiet = self._quiet_since_s
        return quiet is not None and self._monotonic() - quiet >= self.dead_after_s

    def see(self, status: StatusView | None) -> None:
        """Take in what a look has found."""
        now_s = self._monotonic()
        if status is None:
            # one lost answer is not a death: it counts from now
            if self._quiet_since_s is None:
                self._quiet_since_s = now_s
        elif (mark := (status.pid, status.beat)) != self._mark:
            self.confirmed = self._mark is not None
            self._mark, self._moved_s, self._quiet_since_s = mark, now_s, None
        elif self._quiet_since_s is None:
            self._quiet_since_s = self._moved_s

    def give_time(self) -> None:
        """Take a dead daemon for one that may be on its way back, for another ``dead_after_s``."""
        if self._quiet_since_s is not None:
            self._quiet_since_s = self._monotonic()
