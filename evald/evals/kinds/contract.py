"""How a question of an eval set is asked: one class for each ``kind`` of the config."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from evald.evals.custom.calls import Outcome, Serve
from evald.evals.custom.functions import Work
from evald.evals.graders import Grade
from evald.evals.prompts import PromptEncoder
from evald.evals.rows import Question
from evald.postures.contract import Generation


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one sample; made by ``of``."""

    #: without its token ids and log-probabilities: where a response waits for its grader, those
    #: would take ten times the memory of its text.
    generation: Generation
    n_tokens: int
    #: known without a grader; None: the set's grader decides.
    grade: Grade | None = None
    #: the prompt ended inside an open thought, so that the response begins in it.
    in_thought: bool = False
    #: further numbers, kept with the sample.
    values: dict[str, float] = {}
    #: the conversation behind the response, kept with the sample.
    messages: list[Any] | None = None

    @classmethod
    def of(cls, generation: Generation, **more: Any) -> Answer:
        """Keep of ``generation`` what a record needs; ``more``: the other fields."""
        n_tokens = len(generation.output_ids)
        kept = msgspec.structs.replace(generation, output_ids=[], prompt_logprobs=[])
        return cls(generation=kept, n_tokens=n_tokens, **more)


class Asker(Protocol):
    """The engines, bound to one point's weights and to the sample's deadline."""

    async def generate(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        *,
        score_from: list[int] | None = None,
    ) -> list[Generation]:
        """Send one list request; one answer for each prompt. See ``GenerateRequest``.

        Raises GenerationFailed, and what ends the point (Unhealthy, VersionChanged).
        """
        ...

    async def run_function(self, work: Work, serve: Serve) -> Outcome:
        """Have the user's function answer one sample, in a process of its own.

        ``serve`` answers its requests. Raises what ``generate`` raises.
        """
        ...


class Kind(Protocol):
    """A way of asking; one object for each eval set, without state of a point."""

    #: asking again would give the same: each question has one sample, whatever the config says.
    single: bool
    #: the samples of one question are asked one by one, whatever the config says.
    apart: bool

    def check(self) -> list[str]:
        """One sentence for each fault of the settings that belong to this kind."""
        ...

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Take what the kind needs of a row, as fields of Question; raises BadRow."""
        ...

    def encode(self, encoder: PromptEncoder, question: Question) -> Any:
        """Make what ``ask`` sends, out of a question; raises PromptError. Blocking."""
        ...

    def width(self, encoded: Any, samples: list[int]) -> int:
        """Count the sequences that the question puts on the engines at a time."""
        ...

    async def ask(
        self, asker: Asker, question: Question, encoded: Any, samples: list[int]
    ) -> list[Answer]:
        """Ask; one answer for each of ``samples``, in order. Raises what ``asker`` raises."""
        ...
