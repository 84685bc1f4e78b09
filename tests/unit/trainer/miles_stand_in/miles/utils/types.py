"""miles' sample: the fields that its evaluation metrics read."""

from __future__ import annotations

import enum
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    status: Status = Status.PENDING
    weight_versions: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_reward_value(self, args: Namespace) -> Any:
        if not args.reward_key:
            return self.reward
        assert isinstance(self.reward, dict)  # miles looks it up, whatever it is
        return self.reward[args.reward_key]
