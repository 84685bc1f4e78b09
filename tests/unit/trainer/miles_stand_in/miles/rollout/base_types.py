"""What goes into and comes out of miles' rollout functions."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    args: Namespace
    data_source: Any = None


@dataclass(frozen=True)
class RolloutFnEvalInput:
    rollout_id: int
    generate_state: Any = None
    weight_version: str | None = None
    hf_dir: str | None = None

    @property
    def evaluation(self) -> bool:
        return True


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None
