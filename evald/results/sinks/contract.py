"""What the places that results are delivered to have in common."""

from __future__ import annotations

from typing import Protocol

from evald.errors import EvaldError
from evald.results.sinks.cursor import Cursor
from evald.results.sinks.rows import Row


class SinkFault(EvaldError):
    """The target does not take rows now (no network, disk full): the same call may work later."""


class Sink(Protocol):
    """A target that shows the rows of one run; blocking, for one thread.

    Every method raises SinkFault where trying again may help, and EvaldError where it cannot.
    """

    #: where rows go, for people.
    target: str

    def cursor(self) -> Cursor | None:
        """Return how far an earlier life got; None: the target has nothing."""

    def known(self, row: Row) -> None:
        """Take in a row that the target has: later ones may depend on it."""

    def forget(self) -> None:
        """Begin again: what the target has is of another ledger."""

    def take(self, row: Row) -> None:
        """Accept a row that is to be delivered, in the ledger's order; reaches for nothing."""

    def flush(self) -> None:
        """Deliver what was taken; may be called again after a fault, and then gives nothing twice.

        What a life leaves undelivered, the next is given again.
        """

    def close(self) -> None:
        """Deliver the rest and let go; a later ``take`` begins again where it stopped."""
