"""Which engine works for which point: a pure function of what points need and where engines are."""

from __future__ import annotations

import random

import pytest

from evald.postures.assignment import Need, Seat, assign, can_spare

FEEDS = Need(feeds=True)


def tail(samples: int, waiting: int = 0, **fields: bool) -> Need:
    return Need(feeds=False, samples=samples, waiting=waiting, **fields)


def serves(at: int, in_flight: int = 0) -> Seat:
    return Seat(alive=True, at=at, arrived=True, in_flight=in_flight, limit=64)


def on_its_way(at: int, in_flight: int = 0) -> Seat:
    return Seat(alive=True, at=at, in_flight=in_flight, limit=64)


FREE = Seat(alive=True, limit=64)


def down(at: int | None = None) -> Seat:
    return Seat(alive=False, at=at, limit=64)


def test_one_point_has_all_engines_until_its_questions_are_out() -> None:
    assert assign([FEEDS], [FREE, serves(0, 3), on_its_way(0), down()]) == [0, 0, 0, 0]
    assert not can_spare([FEEDS], [FREE, serves(0, 3), serves(0)])
    assert assign([], [FREE, down()]) == [None, None]


def test_engines_stay_where_they_are_while_nobody_waits() -> None:
    seats = [serves(0, 3), serves(0), on_its_way(0)]
    assert assign([tail(3)], seats) == [0, 0, 0]
    assert assign([tail(0)], seats) == [0, 0, 0]
    assert can_spare([tail(3)], seats)


def test_an_engine_with_nothing_in_flight_goes_to_the_next_point() -> None:
    assert assign([tail(3), FEEDS], [serves(0, 3), serves(0), serves(0)]) == [0, 1, 1]
    assert assign([tail(6), FEEDS], [serves(0, 3), serves(0, 3), on_its_way(1)]) == [0, 0, 1]
    assert assign([tail(0), FEEDS], [serves(0), serves(0)]) == [1, 1]


def test_an_engine_that_came_too_late_for_the_questions_goes_on() -> None:
    assert assign([tail(3), FEEDS], [serves(0, 3), on_its_way(0)]) == [0, 1]


def test_a_point_with_an_open_question_keeps_an_engine() -> None:
    """A function of the user's thinks, and may ask again."""
    assert assign([tail(1), FEEDS], [serves(0), serves(0)]).count(0) == 1
    assert assign([tail(1), FEEDS], [serves(0)]) == [0]
    assert not can_spare([tail(1)], [serves(0)])
    assert can_spare([tail(0)], [serves(0)])


def test_as_many_stay_as_the_open_samples_may_come_to_need() -> None:
    seats = [serves(0, 1), *[serves(0)] * 5]
    assert assign([tail(129), FEEDS], seats) == [0, 0, 0, 1, 1, 1]
    assert assign([tail(64), FEEDS], seats) == [0, 1, 1, 1, 1, 1]


def test_an_idle_engine_is_not_given_away_while_samples_wait() -> None:
    assert assign([tail(65, waiting=1), FEEDS], [serves(0, 64), serves(0)]) == [0, 0]


def test_samples_that_wait_get_the_engine_that_comes_back_but_turn_none_around() -> None:
    needs = [tail(80, waiting=16), FEEDS]
    assert assign(needs, [serves(0, 64), serves(1, 9), down(0)]) == [0, 1, 1]
    assert assign(needs, [serves(0, 64), serves(1, 9), FREE]) == [0, 1, 0]
    # one is enough for them
    assert assign(needs, [serves(0, 64), FREE, FREE]).count(0) == 2


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ([serves(1, 9), serves(1)], 1),
        ([serves(1, 9), serves(1, 5), serves(1, 7)], 1),
        ([on_its_way(1), serves(1)], 1),
        ([serves(1, 9), FREE], 1),
        ([serves(1, 9)], 0),
        # rather than the only one of a point that is nearly done
        ([serves(1, 1), serves(2, 9), serves(2, 8)], 2),
    ],
)
def test_a_point_that_lost_its_last_engine_gets_one_again(others: list[Seat], taken: int) -> None:
    needs = [tail(5), FEEDS] if max(o.at or 0 for o in others) < 2 else [tail(5), tail(1), FEEDS]
    numbers = assign(needs, [down(0), *others])
    assert numbers[1 + taken] == 0
    assert numbers.count(0) == 1
    # and it is not turned around a second time
    seats = [
        seat if number == seat.at else on_its_way(number or 0, seat.in_flight)
        for seat, number in zip(others, numbers[1:], strict=True)
    ]
    assert assign(needs, [down(0), *seats])[1:] == numbers[1:]


def test_nobody_takes_from_an_older_point() -> None:
    assert assign([tail(2), FEEDS], [serves(0, 1), serves(0, 1), down(1)]) == [0, 0, 1]
    assert assign([tail(2), tail(1), FEEDS], [serves(0, 2), down(1)]) == [0, 1]


def test_when_all_are_down_one_is_for_the_oldest() -> None:
    assert sorted(map(str, assign([tail(2), FEEDS], [down(1), down(0), down()]))) == ["0", "1", "1"]
    assert assign([tail(2), FEEDS], [down(1), down(0)]) == [1, 0]


def test_an_engine_that_comes_back_helps_the_newest_point() -> None:
    assert assign([tail(2), tail(3)], [serves(0, 2), serves(1, 3), down(0)]) == [0, 1, 1]
    assert assign([tail(2), tail(0)], [serves(0, 2), serves(1), FREE]) == [0, 1, 0]
    assert assign([tail(0)], [serves(0), FREE]) == [0, None]


def test_nobody_joins_a_point_whose_snapshot_is_gone() -> None:
    gone = Need(feeds=True, joinable=False)
    seats = [serves(0, 3), serves(0), on_its_way(0), FREE]
    assert assign([gone, FEEDS], seats) == [0, 0, 1, 1]
    assert assign([gone], seats)[:2] == [0, 0]
    assert assign([gone], [serves(0, 3), FREE]) == [0, None]
    assert assign([tail(3, joinable=False), FEEDS], seats) == [0, 1, 1, 1]
    assert assign([tail(3, joinable=False), FEEDS], [down(0), serves(1)]) == [1, 1]


@pytest.mark.parametrize("seed", range(300))
def test_what_holds_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 (no secret)
    n = rng.randint(1, 4)
    needs = [
        tail(samples := rng.choice([0, 1, 5, 200]), rng.choice([0, 0, min(samples, 70)]))
        for _ in range(n)
    ]
    if rng.random() < 0.7:
        needs[-1] = FEEDS
    seats = [
        rng.choice([
            FREE, down(), down(rng.randrange(n)), on_its_way(rng.randrange(n), rng.randint(0, 2)),
            serves(rng.randrange(n), rng.choice([0, 0, 3, 64])),
        ])
        for _ in range(rng.randint(1, 8))
    ]  # fmt: skip
    numbers = assign(needs, seats)
    alive = [number for number, seat in zip(numbers, seats, strict=True) if seat.alive]
    if alive and needs[0].samples:
        assert 0 in alive
    if needs[-1].feeds:
        assert None not in numbers
    busy = [seat for seat in seats if seat.arrived and seat.in_flight]
    for seat, number in zip(seats, numbers, strict=True):
        at = seat.at
        if at is None or number == at or seat not in busy or not needs[at].samples:
            continue
        # taken from its answers only for an older point that has no other
        assert number is not None
        assert number < at
        assert alive.count(number) == 1
    # nothing changes by looking twice
    settled = [
        seat if number == seat.at else Seat(
            alive=seat.alive, at=number, in_flight=seat.in_flight, limit=seat.limit
        )
        for seat, number in zip(seats, numbers, strict=True)
    ]  # fmt: skip
    assert assign(needs, settled) == numbers
