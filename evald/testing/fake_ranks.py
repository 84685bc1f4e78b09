"""The ranks of a training job as threads of one process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from evald.trainer.contract import PeerLost

T = TypeVar("T")


class FakeRanks:
    """One rank of ``FakeRanks.job(size)``; ``FakeRanks.on_all`` runs them side by side.

    As in a real job, what is exchanged is pickled, a rank that is late by ``timeout_s`` or that
    has left loses all the others, and an exchange that failed is the last one.
    """

    def __init__(self, rank: int, group: _Group, near: Sequence[int]) -> None:
        self.rank = rank
        self.size = group.size
        self.near = tuple(near)
        self._group = group
        #: values that this rank has given, oldest first.
        self.given: list[Any] = []

    @classmethod
    def job(
        cls, size: int, *, near: Sequence[int] | None = None, timeout_s: float = 30.0
    ) -> list[FakeRanks]:
        """Return all ranks of a job; ``near``: None for all."""
        group = _Group(size, timeout_s)
        return [cls(rank, group, range(size) if near is None else near) for rank in range(size)]

    @staticmethod
    def on_all(ranks: Sequence[FakeRanks], work: Callable[[FakeRanks], T]) -> list[T | Exception]:
        """Call ``work`` on all ranks at the same time; return its results, or what it raised."""
        results: dict[int, T | Exception] = {}

        def run(rank: FakeRanks) -> None:
            try:
                results[rank.rank] = work(rank)
            except Exception as error:  # noqa: BLE001 - the caller looks at it
                results[rank.rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank.rank] for rank in ranks]

    def exchange(self, value: Any) -> list[Any]:
        """Gather one value of each rank; raises PeerLost."""
        self.given.append(value)
        return self._group.exchange(self.rank, value)

    def leave(self) -> None:
        """End like a process that dies: nobody can exchange any more."""
        self._group.barrier.abort()


class _Group:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self._values: list[bytes] = [b""] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = pickle.dumps(value)
        try:
            self.barrier.wait()
            values = [pickle.loads(one) for one in self._values]  # noqa: S301 - this process's own
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("cannot exchange with the job's other ranks: one is gone") from None
        return values
