"""What an answer, or a piece of one, adds to the sample that it answers."""

from __future__ import annotations

import time

from evald.engines.answers import Answer
from evald.postures.contract import GenerateRequest, Generation
from evald.postures.lane import Lane
from evald.postures.progress import UNCHECKED, Wanted
from evald.results.samples import Piece


def take_piece(lane: Lane, wanted: Wanted, answer: Answer, began: float) -> None:
    """Keep what an aborted answer has.

    Not its newest token: SGLang ends an aborted answer before it looks whether that one would have
    ended it. Always left out, whatever it is, it is drawn again with the same probabilities.
    """
    room = wanted.sampling["max_new_tokens"] - len(wanted.ids) - UNCHECKED
    ids = (answer.output_ids or [])[:-UNCHECKED][:room]
    if ids:
        wanted.add(_credit(lane, wanted, answer, len(ids), whole=False), ids, began)


def take_whole(
    lane: Lane,
    wanted: Wanted,
    answer: Answer,
    text: str,
    began: float,
    prompt_logprobs: list[float],
) -> None:
    """Put an answer together that is complete now; ``text`` is that of all its pieces."""
    output_ids = answer.output_ids or []
    last = _credit(lane, wanted, answer, len(output_ids), whole=True)
    wanted.answer = Generation(
        output_ids=wanted.ids + output_ids,
        text=text,
        finish_reason=answer.reason or "",
        weight_version=last.weight_version,
        engine=last.engine,
        latency_s=time.monotonic() - (wanted.began if wanted.pieces else began),
        prompt_logprobs=prompt_logprobs,
        pieces=(*wanted.pieces, last) if wanted.pieces else (),
    )


def starts(request: GenerateRequest, numbers: list[int]) -> list[int] | None:
    """Tell from which tokens on log-probabilities are wanted, of some prompts of a request."""
    score_from = request.score_from
    return None if score_from is None else [score_from[number] for number in numbers]


def scored(request: GenerateRequest, number: int, answer: Answer) -> list[float]:
    """Log-probabilities of a prompt, if they were asked for; raises ValueError."""
    if request.score_from is None:
        return []
    return answer.prompt_logprobs(len(request.prompts[number]) - request.score_from[number])


def _credit(lane: Lane, wanted: Wanted, answer: Answer, tokens: int, *, whole: bool) -> Piece:
    # a label of the pin, whichever of its spans it names
    version = answer.meta_info.weight_version or max(answer.versions)
    # what was generated elsewhere is no prompt, and the prompt was credited with the first piece
    prompt_tokens = 0 if wanted.pieces else len(wanted.prompt)
    engine = lane.credit(version, tokens, prompt_tokens=prompt_tokens, whole=whole)
    return Piece(engine=engine, weight_version=version, tokens=tokens)
