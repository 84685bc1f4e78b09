"""Kind ``custom``: the user's own function asks, as often as it likes, and says what is graded."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from evald.config import EvalSet
from evald.config_convert import build_table
from evald.errors import GenerationFailed
from evald.evals.custom.functions import Work
from evald.evals.custom.messages import Ask
from evald.evals.custom.settings import FunctionSettings
from evald.evals.graders import check_grader, label_problem
from evald.evals.kinds.contract import Answer, Asker
from evald.evals.prompts import PromptEncoder
from evald.evals.rows import BadRow, Question, prompt_fault, take
from evald.evals.sampling import check_stop, sample_seed
from evald.postures.contract import Generation


class Unsent(msgspec.Struct, frozen=True, tag=True):
    """Nothing yet: only the function knows which prompts there will be."""


class Custom:
    """Calls the function (``evald/custom``) once for each sample.

    What it returns goes to the set's grader, unless it has graded by itself. The sample's tokens
    are those of all answers that the function got; engine and weight version are the last one's.
    """

    single = False
    apart = True

    def __init__(self, eval_set: EvalSet) -> None:
        self._set = eval_set

    def check(self) -> list[str]:
        """One sentence for each fault of function, grader and stop strings."""
        problems = check_grader(self._set) + check_stop(self._set)
        if self._set.function is None:
            problems.append('function: kind "custom" needs one; give "module:function"')
        build_table(FunctionSettings, self._set.function_config, "function_config", problems)
        return problems

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Take prompt and reference, if there is one; raises BadRow."""
        key = self._set.input_key
        prompt = take(row, key, "input_key")
        if fault := prompt_fault(prompt):
            raise BadRow(f"key {key!r}: {fault}")
        label = row.get(self._set.label_key)
        if label is not None and (fault := label_problem(self._set, label)):
            raise BadRow(f"key {self._set.label_key!r}: {fault}")
        return {"prompt": prompt, "label": label}

    def encode(self, encoder: PromptEncoder, question: Question) -> Unsent:  # noqa: ARG002 - the contract
        """Encode nothing: the function's process does it (``Functions``)."""
        return Unsent()

    def width(self, encoded: Unsent, samples: list[int]) -> int:  # noqa: ARG002 - the contract
        """One sequence for each sample, as long as the function asks for one at a time."""
        return len(samples)

    async def ask(
        self,
        asker: Asker,
        question: Question,
        encoded: Unsent,  # noqa: ARG002 - the contract
        samples: list[int],
    ) -> list[Answer]:
        """Call the function, one sample after another (there is one)."""
        return [await self._one(asker, question, sample) for sample in samples]

    async def _one(self, asker: Asker, question: Question, sample: int) -> Answer:
        async def serve(ask: Ask) -> Generation:
            seed = sample_seed(self._set.name, question.id, sample, self._set.seed, turn=ask.turn)
            sampling = ask.sampling | {"n": 1, "sampling_seed": seed}
            (generation,) = await asker.generate([ask.ids], [sampling])
            return generation

        work = Work(eval_set=self._set, question=question, sample=sample)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        outcome = await asker.run_function(work, serve)
        returned, last = outcome.returned, outcome.generation
        if last is None:
            raise GenerationFailed(
                "error",
                f"{self._set.function} returned without an answer of the engines: its score would "
                "be of no weights",
            )
        return Answer.of(
            msgspec.structs.replace(last, text=returned.text, latency_s=loop.time() - began_s),
            grade=returned.grade,
            in_thought=returned.in_thought,
            values=returned.values,
            messages=returned.messages,
        )
