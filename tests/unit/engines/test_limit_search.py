from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from evald.engines.limit_search import LimitSearch, Load, Rates, Reading
from evald.engines.server_size import MOST, START_LIMIT

TOKENS = 20


@dataclass
class Server:
    """A server with enough to do: the rate grows with what runs up to ``knee``, then stands."""

    knee: float = 100
    max_running: int = 10_000
    #: samples that fill the KV cache.
    kv_samples: int = 10_000
    tokens_per_s: float = 50.0
    #: share by which each measurement is off, at most.
    noise: float = 0.0
    #: beyond this many the rate falls to a third.
    cliff: int = 10_000
    tells: bool = True
    answers: bool = True
    in_flight: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311 (noise)

    @property
    def running(self) -> int:
        return min(self.in_flight, self.max_running, self.kv_samples)

    @property
    def rate(self) -> float:
        rate = min(self.running, self.knee) * self.tokens_per_s
        return rate / 3 if self.running > self.cliff else rate

    def look(self, limit: int) -> Reading:
        # up at once; down only as fast as samples end
        self.in_flight = limit if limit > self.in_flight else max(limit, int(self.in_flight * 0.6))
        rate = self.rate * (1 + self.random.uniform(-self.noise, self.noise))
        load = Load(
            running=self.running,
            waiting=self.in_flight - self.running,
            token_usage=min(self.running / self.kv_samples, 1.0),
            tokens_per_s=rate,
        )
        tokens = int(rate) if self.answers else 0
        return Reading(
            elapsed_s=1.0,
            in_flight=self.in_flight,
            full=True,
            answers=tokens // TOKENS,
            tokens=tokens,
            load=load if self.tells else None,
        )


def limits(search: LimitSearch, server: Server, looks: int) -> list[int]:
    return [search.look(server.look(search.limit)) for _ in range(looks)]


@pytest.mark.parametrize(
    ("server", "low", "high", "looks"),
    [
        (Server(knee=100), 100, 160, 15),
        (Server(knee=400), 400, MOST, 20),
        (Server(knee=5000), MOST, MOST, 20),
        (Server(knee=20), 20, 40, 15),
        (Server(knee=100, noise=0.03), 80, 250, 20),
        (Server(knee=100, tells=False), 100, 160, 40),
        (Server(knee=100, answers=False), 100, 160, 15),
        (Server(knee=100, tells=False, noise=0.03), 80, 250, 40),
        (Server(knee=5000, max_running=100), 100, 120, 60),
        (Server(knee=5000, max_running=8), 8, 12, 60),
        (Server(knee=5000, kv_samples=200), 140, 190, 40),
        (Server(knee=5000, kv_samples=20), 12, 19, 40),
        (Server(knee=5000, cliff=64), 50, 64, 20),
        # a machine that others work on, too
        (Server(knee=400, noise=0.5), 400, MOST, 90),
        (Server(knee=100, noise=0.5), 100, MOST, 90),
        (Server(knee=5000, kv_samples=200, noise=0.5), 120, 190, 60),
        (Server(knee=5000, max_running=64, noise=0.5), 64, 140, 60),
    ],
)
def test_the_limit_comes_to_the_knee_and_stays(
    server: Server, low: int, high: int, looks: int
) -> None:
    search = LimitSearch()
    assert search.limit == START_LIMIT
    limits(search, server, looks)
    settled = limits(search, server, 200)
    print(settled)
    # a step that is being tried is allowed to lie beyond
    inside = [low <= limit <= high for limit in settled]
    assert sum(inside) >= 0.85 * len(settled)
    assert max(settled) <= max(2 * high, high + 1)


@pytest.mark.parametrize("most", [268, MOST])
def test_a_told_start_is_no_guess(most: int) -> None:
    """Nothing is lost to trying while the server does what it was started for."""
    search, server = LimitSearch(), Server(knee=5000, max_running=256)
    limits(search, server, 3)
    search.begin(268, most)
    path = limits(search, server, 12)
    assert path == [268] * 12
    # it may still turn out to be too much: the KV cache decides
    full = Server(knee=5000, kv_samples=100)
    path = limits(search, full, 60)
    assert path[-1] < 100


def test_a_told_start_below_what_runs_is_left_behind_where_that_pays() -> None:
    """A small graph, and a model so large that batches beyond it are faster all the same."""
    search, server = LimitSearch(), Server(knee=400)
    search.begin(64, MOST)
    path = limits(search, server, 80)
    assert path[:8] == [64] * 8
    assert path[-1] >= 400


def test_what_was_found_is_tried_less_and_less_often() -> None:
    server, search = Server(knee=100), LimitSearch()
    limits(search, server, 20)
    path = limits(search, server, 1000)
    changes = [i for i in range(1, len(path)) if path[i] != path[i - 1]]
    assert 2 <= len(changes) <= 30
    late = [i for i in changes if i >= 500]
    assert len(late) <= len(changes) / 2


def test_noise_is_not_taken_for_gain() -> None:
    ends = []
    for seed in range(15):
        search = LimitSearch()
        noise = random.Random(seed)  # noqa: S311 (noise)
        ends.append(limits(search, Server(knee=20, noise=0.3, random=noise), 1500)[-1])
    print(ends)
    assert sorted(ends)[len(ends) // 2] <= 2 * START_LIMIT


@pytest.mark.parametrize("most", [1, 2, 5, 48])
def test_the_bounds_hold(most: int) -> None:
    search = LimitSearch(most=most)
    path = limits(search, Server(knee=5000, noise=0.2), 300)
    path += limits(search, Server(knee=5000, max_running=1, kv_samples=1, noise=0.2), 300)
    assert all(1 <= limit <= most for limit in path)
    assert path[250] == most
    assert path[-1] <= 2


def test_a_sudden_slowdown_with_a_queue() -> None:
    server, search = Server(knee=5000, max_running=256), LimitSearch()
    limits(search, server, 60)
    assert 256 <= search.limit <= 300
    server.max_running, server.tokens_per_s = 32, 20.0
    path = limits(search, server, 120)
    print(path)
    assert 32 <= path[-1] <= 40
    server.max_running, server.tokens_per_s = 256, 50.0
    assert max(limits(search, server, 300)) >= 200


def test_slower_answers_alone_cost_no_concurrency() -> None:
    server, search = Server(knee=400), LimitSearch()
    limits(search, server, 40)
    before = search.limit
    server.tokens_per_s /= 4
    path = limits(search, server, 60)
    assert path[-1] == before
    assert min(path) >= before // 2 - 1


def test_a_queue_that_feeds_the_rate_is_left_alone() -> None:
    """Prompts much longer than answers wait for their prefill, and that keeps the server busy."""
    search = LimitSearch(start=64, most=64)
    path = []
    for _ in range(100):
        limit = search.limit
        load = Load(running=limit // 4, waiting=limit - limit // 4, token_usage=0.1)
        tokens = limit * 50
        path.append(
            search.look(
                Reading(
                    elapsed_s=1.0,
                    in_flight=limit,
                    full=True,
                    answers=tokens,
                    tokens=tokens,
                    load=load,
                )
            )
        )
    assert path.count(64) >= 60
    assert min(path) >= 44


def test_requests_thrown_out_of_the_cache_cut_at_once() -> None:
    search = LimitSearch(start=100)
    load = Load(running=100, waiting=0, token_usage=0.5, retracted=3)
    reading = Reading(elapsed_s=1.0, in_flight=100, full=True, answers=0, tokens=0, load=load)
    search.look(reading)
    assert search.look(reading) == 85
    # nothing more until the cut has had its effect
    assert [search.look(reading) for _ in range(10)] == [85] * 10


def test_too_little_to_do_teaches_nothing() -> None:
    server, search = Server(knee=5000), LimitSearch()
    limits(search, server, 4)
    tried = search.limit
    assert tried > START_LIMIT
    for _ in range(50):
        reading = server.look(search.limit)
        search.look(
            Reading(elapsed_s=1.0, in_flight=3, full=False, answers=3, tokens=60, load=reading.load)
        )
    assert search.limit <= tried
    assert limits(search, server, 30)[-1] == MOST


def test_long_answers_without_metrics_are_waited_for() -> None:
    search = LimitSearch()
    path = []
    for second in range(600):
        done = search.limit if second % 50 == 49 else 0
        path.append(
            search.look(
                Reading(
                    elapsed_s=1.0,
                    in_flight=search.limit,
                    full=True,
                    answers=done,
                    tokens=done * 1000,
                    load=None,
                )
            )
        )
    assert path[40] == START_LIMIT
    assert path[-1] > START_LIMIT


def test_rates_are_compared_in_a_common_measure() -> None:
    both = Rates(completed=100.0, decoded=50.0)
    assert both.over(Rates(completed=50.0, decoded=100.0)) == 1.25
    assert Rates(completed=None, decoded=100.0).over(both) == 2.0
    assert Rates(completed=None, decoded=1.0).over(Rates(completed=1.0, decoded=None)) is None
    assert both.over(None) is None
