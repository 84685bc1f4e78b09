"""Which engines can be freed of a point's last answers."""

from __future__ import annotations

import random

import pytest

from evald.postures.consolidation import FILL, KV_FILL, Straggling, engines_to_free


def on(*running: int, **fields: float) -> list[Straggling]:
    return [Straggling(running=n, limit=64, **fields) for n in running]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("running", "freed"),
    [
        ((3, 1, 2), [1, 2]),
        ((40, 8), [1]),
        ((40, 9), []),  # 48 of 64 is the most
        ((40, 9, 40), [1]),  # eight there, one here
        ((40, 17, 40), []),
        ((60, 5), []),
        ((20, 20, 20, 20), [0, 1]),  # 40 beside 40: the third would make 80 of two
        ((5,), []),
        ((), []),
    ],
)
def test_the_emptiest_go_as_long_as_the_others_have_room(
    running: tuple[int, ...], freed: list[int]
) -> None:
    assert engines_to_free(on(*running), 8) == freed


def test_no_more_than_are_wanted() -> None:
    assert engines_to_free(on(3, 1, 2), 1) == [1]
    assert engines_to_free(on(3, 1, 2), 0) == []


def test_what_cannot_be_moved_stays_and_others_may_join_it() -> None:
    fixed = Straggling(running=1, limit=64, movable=False)
    assert engines_to_free([fixed, *on(3, 2)], 8) == [2, 1]
    assert engines_to_free([fixed, fixed], 8) == []


def test_a_cache_that_is_nearly_full_takes_nobody() -> None:
    assert engines_to_free([*on(3, kv_use=0.1), *on(9, kv_use=0.65)], 8) == []
    assert engines_to_free([*on(3, kv_use=0.1), *on(9, kv_use=0.5)], 8) == [0]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_left_has_room_for_all(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 (no secret)
    engines = [
        Straggling(
            running=rng.randint(1, 64),
            limit=rng.choice([16, 64]),
            kv_use=rng.random(),
            movable=rng.random() < 0.8,
        )
        for _ in range(rng.randint(1, 8))
    ]
    freed = engines_to_free(engines, 8)
    rest = [one for i, one in enumerate(engines) if i not in freed]
    assert rest
    assert all(engines[i].movable for i in freed)
    room = sum(max(0, int(FILL * one.limit) - one.running) for one in rest)
    assert sum(engines[i].running for i in freed) <= room
    kv_room = sum(max(0, KV_FILL - one.kv_use) for one in rest)
    assert sum(engines[i].kv_use for i in freed) <= kv_room + 1e-9
