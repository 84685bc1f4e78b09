"""One request under way: what each of its samples has so far, and what went wrong last."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.errors import GenerationFailed
from evald.postures.contract import GenerateRequest, Generation
from evald.postures.lane import Lane
from evald.results.samples import Piece

#: answers that are none (500, no JSON) before the request fails.
MAX_ERRORS = 3
#: pieces of one sample: each further one costs the reading of its prompt and of all that is there.
MAX_PIECES = 8
#: the newest tokens of an aborted answer that the server has not looked at yet.
UNCHECKED = 1
#: sampling parameters that a sample may have and be moved, whatever their values. A seed counts in
#: deterministic inference only, and there nobody asks for a move.
_ANY_VALUE = frozenset({
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos",
    "stop_token_ids", "logit_bias", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens", "sampling_seed",
})  # fmt: skip
#: the same, but only with a value that means nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "stop": ([], "", None),
    "stop_regex": ([], "", None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "n": (1, None),
}


def can_move(sampling: dict[str, Any]) -> bool:
    """Whether an answer can be continued elsewhere from any of its tokens on.

    What it has so far is prompt to the new server. So nothing may look back over the answer: a stop
    string may span the seam, penalties count what was generated (or count the prompt differently),
    a grammar would begin again, and what a parameter that is not known here does, nobody knows.
    """
    # (without a limit the server has its own, for each request anew)
    return isinstance(sampling.get("max_new_tokens"), int) and all(
        name in _ANY_VALUE or value in _NEUTRAL.get(name, ()) for name, value in sampling.items()
    )


class Wanted(msgspec.Struct):
    """One sample of a request, and what engines have given of it."""

    prompt: list[int]
    sampling: dict[str, Any]
    movable: bool
    answer: Generation | None = None
    #: of an answer that was moved: what it has so far, and from whom.
    pieces: tuple[Piece, ...] = ()
    ids: list[int] = []
    #: when its first piece began.
    began: float = 0.0

    @property
    def input_ids(self) -> list[int]:
        """What to ask with."""
        return self.prompt + self.ids

    @property
    def parameters(self) -> dict[str, Any]:
        """Sampling parameters of what is missing."""
        done = len(self.ids)
        if not done:
            return self.sampling
        fewer = {
            name: max(self.sampling[name] - done, 0)
            for name in ("max_new_tokens", "min_new_tokens")
            if self.sampling.get(name) is not None
        }
        return self.sampling | fewer

    def add(self, piece: Piece, ids: list[int], began: float) -> None:
        """Take in what an engine gave before the sample was moved."""
        if not self.pieces:
            self.began = began
        self.pieces = (*self.pieces, piece)
        self.ids = self.ids + ids
        self.movable = self.movable and len(self.pieces) < MAX_PIECES

    def start_again(self) -> None:
        """Give up what there is of an answer; it stays where it is then."""
        if self.pieces:
            self.pieces, self.ids, self.movable = (), [], False


class Progress:
    """One request under way."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.samples = [
            Wanted(prompt, sampling, request.score_from is None and can_move(sampling))
            for prompt, sampling in zip(request.prompts, request.sampling, strict=True)
        ]
        #: times that it was sent, and those of them that brought less than they should have.
        self.attempts = self.setbacks = 0
        self.trouble = "no engine was free"
        #: the lane that it was last sent to, and the one that it was last moved from.
        self.avoid: Lane | None = None
        self.left: Lane | None = None
        #: lanes, with the number of their process, that were cut off while they answered.
        self.cut_off: set[tuple[Lane, int]] = set()
        self._errors = 0

    def deaths(self) -> int:
        """Count the engines that have died under it."""
        return sum(lane.is_dead(life) for lane, life in self.cut_off)

    def failed(self, trouble: str) -> None:
        """Take in an answer that is none; raises GenerationFailed for one too many."""
        self.trouble = trouble
        self._errors += 1
        if self._errors >= MAX_ERRORS:
            raise GenerationFailed("error", trouble)

    def missing(self) -> list[int]:
        """Give the numbers of the samples without an answer."""
        return [number for number, one in enumerate(self.samples) if one.answer is None]

    def answers(self) -> list[Generation]:
        """Give all answers."""
        return [one.answer for one in self.samples if one.answer is not None]
