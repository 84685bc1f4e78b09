"""Several ranks: rank 0 decides, all hear the same, and a lost one costs points alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from dispatch_rig import FakeExporter, Job, Untouchable

from evald.trainer.contract import PeerLost
from evald.trainer.dispatcher import Dispatched, EvalDispatcher

T = TypeVar("T")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int, timeout_s: float = 5.0) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)

    def rank(self, number: int) -> Rank:
        return Rank(self, number)


class Rank:
    def __init__(self, group: Threads, number: int) -> None:
        self.rank = number
        self.size = len(group.values)
        self.near = tuple(range(self.size))
        self.exchanged = 0
        self._group = group

    def exchange(self, value: Any) -> list[Any]:
        self.exchanged += 1
        try:
            self._group.values[self.rank] = value
            self._group.barrier.wait()
            values = list(self._group.values)
            self._group.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("cannot hear of rank 1: it is gone") from None
        return values


class NoLink:
    """A link, or clock, that only rank 0 may use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used on a rank other than 0")


def on_all(ranks: list[Rank], work: Callable[[Rank], T]) -> list[T]:
    """Call ``work`` on each rank at the same time."""
    results: dict[int, T] = {}
    threads = [
        threading.Thread(target=lambda one=rank: results.update({one.rank: work(one)}))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank.rank] for rank in ranks]


def life(job: Job, rank: Rank, **settings: Any) -> EvalDispatcher:
    if rank.rank:
        settings |= {"link": NoLink(), "results": None, "exporter": Silent()}
    return job.dispatcher(ranks=rank, **settings)


class Silent(FakeExporter):
    """Takes part in exports and writes nothing, as ranks other than 0 may."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def _write(self, weights: str, step: int, *, final: bool, run: str | None) -> Path:
        return self.root / weights / str(step) / str(final) / str(run)


def test_every_rank_hears_what_rank_0_decided(job: Job) -> None:
    group = Threads(3)
    ranks = [group.rank(number) for number in range(3)]

    def train(rank: Rank) -> list[str]:
        dispatcher = life(job, rank, max_in_flight=1, interval=2)
        said: list[str] = [dispatcher.baseline(completed_step=None).action]
        said += [dispatcher.maybe_dispatch(step, f"w{step}").action for step in range(1, 5)]
        said.append(dispatcher.finish(4, "w4").action)
        assert dispatcher.poll() == [] or rank.rank == 0
        dispatcher.close(1)
        return said

    job.daemon.beat()
    (job.base / "model.safetensors").unlink()
    job.clock.on_sleep = job.daemon.turn
    said = on_all(ranks, train)
    assert said[0] == said[1] == said[2]
    # the baseline holds the only place: step 2 is skipped, the last step has waited
    assert said[0] == ["requested", "not_due", "skipped", "not_due", "skipped", "published"]
    # one exchange for the baseline, one for each step that is due, one for the last
    assert [rank.exchanged for rank in ranks] == [4, 4, 4]


def test_a_long_wait_of_rank_0_is_no_timeout_of_the_others(job: Job) -> None:
    group = Threads(2)
    ranks = [group.rank(number) for number in range(2)]
    job.clock.on_sleep = job.daemon.beat
    job.daemon.scan()

    def train(rank: Rank) -> list[Dispatched]:
        dispatcher = life(
            job, rank, max_in_flight=1, overflow="backpressure", backpressure_timeout_s=300
        )
        return [dispatcher.maybe_dispatch(step, "w") for step in (1, 2)]

    said = on_all(ranks, train)
    assert said[0] == said[1]
    assert said[0][1].reason == "busy"
    assert 10 < ranks[0].exchanged == ranks[1].exchanged


def test_the_clock_of_rank_0_counts(job: Job) -> None:
    group = Threads(2)
    ranks = [group.rank(number) for number in range(2)]

    def train(rank: Rank) -> list[str]:
        now_s = 0.0
        dispatcher = life(job, rank, interval=None, every_minutes=1, monotonic=lambda: now_s)
        said: list[str] = []
        for step in range(1, 6):
            now_s += 40.0 if rank.rank == 0 else 0.0
            said.append(dispatcher.maybe_dispatch(step, "w").action)
        return said

    said = on_all(ranks, train)
    assert said[0] == said[1] == ["not_due", "published", "not_due", "published", "not_due"]


def test_a_lost_rank_costs_points_and_not_the_training(job: Job) -> None:
    alone = Threads(2, timeout_s=0.2).rank(0)
    dispatcher = life(job, alone)
    for step in (1, 2):
        lost = dispatcher.maybe_dispatch(step, Untouchable())
        assert (lost.reason, lost.detail) == ("export_failed", "cannot hear of rank 1: it is gone")
    assert set(job.words()) == {"step_1.skip", "step_2.skip"}
    assert dispatcher.baseline().action == "skipped"
    dispatcher.finish(3, "w3")
    dispatcher.close(1)
