"""A sample that was moved between engines is marked, and names all of them."""

from __future__ import annotations

from typing import Any

import msgspec
from evaluator_world import FakePosture, World

from evald.evals.custom.calls import Call
from evald.evals.custom.messages import Ask, Returned
from evald.postures.contract import GenerateRequest, Generation, Pin
from evald.results.samples import Piece


def piece(engine: int, tokens: int) -> Piece:
    return Piece(engine=f"engine-{engine}", weight_version=f"r:7:01234567:{engine}", tokens=tokens)


PIECES = (piece(3, 5), piece(4, 7), piece(0, 1))


class MovingPosture(FakePosture):
    """Moves every other question."""

    async def generate(self, pin: Pin, request: GenerateRequest) -> list[Generation]:
        answers = await super().generate(pin, request)
        moved = request.prompts[0][-1] % 2 == 0
        return [msgspec.structs.replace(one, pieces=PIECES if moved else ()) for one in answers]


async def test_moved_samples_are_marked_counted_and_resumed(world: World, make_set: Any) -> None:
    world.sets = [make_set(rows(6))]
    first = await world.evaluate(MovingPosture(str))
    assert (first.counts.n_scored, first.counts.n_moved) == (6, 3)
    assert first.engines == ["engine-0", "engine-3", "engine-4"]
    assert {one.weight_version for one in PIECES} < set(first.weight_versions)
    lines = world.journal("toy")
    assert [len(line["pieces"]) for line in lines].count(3) == 3
    [moved, *_] = [line["pieces"] for line in lines if line["pieces"]]
    assert msgspec.convert(moved, tuple[Piece, ...]) == PIECES

    posture = MovingPosture(str)
    second = await world.evaluate(posture)
    assert posture.requests == []
    assert (second.counts.n_resumed, second.counts.n_moved) == (6, 3)
    assert (second.engines, second.weight_versions) == (first.engines, first.weight_versions)


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i}", "label": f"q{i}"} for i in range(n)]


async def test_of_a_function_all_answers_are_pieces_once_one_was_moved() -> None:
    def answer(engine: int, tokens: int, pieces: tuple[Piece, ...] = ()) -> Generation:
        return Generation(
            output_ids=[7] * tokens,
            text="x",
            finish_reason="stop",
            weight_version=f"r:7:01234567:{engine}",
            engine=f"engine-{engine}",
            latency_s=0.1,
            pieces=pieces,
        )

    async def serve(_ask: Ask) -> Generation:
        return answer(1, 1)

    returned = Returned(call=1, text="two", grade=None, values={}, messages=None, in_thought=False)
    for answers, expected in (
        ([answer(1, 2), answer(2, 3)], ()),
        ([answer(1, 2), answer(0, 13, PIECES), answer(2, 3)], (piece(1, 2), *PIECES, piece(2, 3))),
    ):
        call = Call(1, serve)
        for one in answers:
            call.answered(one)
        call.returned(returned)
        generation = (await call.outcome).generation
        assert generation is not None
        assert generation.pieces == expected
        assert sum(one.tokens for one in expected) in {0, len(generation.output_ids)}
