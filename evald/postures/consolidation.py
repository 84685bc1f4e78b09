"""Which engines can be freed of a point's last answers, because others have room: a pure function.

A step of an engine takes longer the more answers it works on, but by far not in proportion: what
two engines do at a quarter of their size, one does nearly as fast, and the other is of use to the
next point.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

#: shares of an engine's limit, and of its KV cache, that are filled with answers of other engines:
#: those that are there grow on.
FILL = 0.75
KV_FILL = 0.7


class Straggling(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that answers for a point whose questions are all handed over."""

    #: samples that it works on, and how many it may.
    running: int
    limit: int
    #: share of its KV cache that is in use; 0 if it does not say.
    kv_use: float = 0.0
    #: all of them can go on elsewhere.
    movable: bool = True


def engines_to_free(engines: Sequence[Straggling], most: int) -> list[int]:
    """Choose up to ``most`` engines whose answers fit beside those of the others; the emptiest."""
    freed: list[int] = []
    moved, moved_kv = 0, 0.0
    most = min(most, len(engines) - 1)
    room, kv_room = sum(map(_room, engines)), sum(map(_kv_room, engines))
    for i in sorted(range(len(engines)), key=lambda i: engines[i].running):
        if len(freed) == most:
            break
        one = engines[i]
        rest, kv_rest = room - _room(one), kv_room - _kv_room(one)
        if one.movable and moved + one.running <= rest and moved_kv + one.kv_use <= kv_rest:
            freed.append(i)
            room, kv_room = rest, kv_rest
            moved += one.running
            moved_kv += one.kv_use
    return freed


def _room(one: Straggling) -> int:
    return max(0, int(FILL * one.limit) - one.running)


def _kv_room(one: Straggling) -> float:
    return max(0.0, KV_FILL - one.kv_use)
