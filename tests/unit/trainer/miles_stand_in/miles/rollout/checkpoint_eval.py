"""The contract of a checkpoint evaluation."""

from __future__ import annotations

import abc
from typing import Any


class EvalSkip(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CheckpointEvalFn(abc.ABC):
    def __init__(self, input: Any) -> None:  # noqa: A002 - miles' name
        self.constructor_input = input

    @abc.abstractmethod
    async def evaluate_checkpoint(self, checkpoint_dir: str, input: Any) -> Any: ...  # noqa: A002

    async def __call__(self, input: Any) -> Any:  # noqa: A002
        return await self.evaluate_checkpoint(input.hf_dir, input)

    def dispose(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Called when miles ends."""
