"""Before an export: has every rank come for the same one, with arguments that can be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from evald.trainer.contract import ExportError, Ranks


def fault_of(weights: Any, step: Any) -> str | None:
    """Say what is wrong with an export's arguments; None: nothing."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return f"cannot export step {step!r}: steps are whole numbers from 0 up"
    if isinstance(weights, str | bytes) or not isinstance(weights, nn.Module | Mapping | Iterable):
        return (
            f"cannot export a {type(weights).__name__}: give a model, a state dict, or an iterator "
            "of (name, tensor)"
        )
    if isinstance(weights, list | tuple) and not all(map(_is_named, weights)):
        return (
            f"cannot export a {type(weights).__name__} of tensors without names: give the model "
            "itself, its state dict, or (name, tensor) pairs as model.named_parameters() has them"
        )
    return None


def _is_named(one: Any) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)  # noqa: PLR2004 - a pair


def meet(ranks: Ranks, step: Any, run: str | None, fault: str | None) -> str | None:
    """Return what is wrong with the arguments of any rank, ``fault`` being this one's; collective.

    Raises ExportError, on every rank, where they have come with different steps or runs.
    """
    told = ranks.exchange((fault, None if fault else step, run))
    for rank, (other, _, _) in enumerate(told):
        if other is not None:
            return str(other) if ranks.size == 1 else f"{other} (on rank {rank})"
    steps = sorted({one for _, one, _ in told})
    runs = sorted({one for _, _, one in told if one is not None})
    if len(steps) > 1 or len(runs) > 1:
        raise ExportError(
            f"the ranks have come with steps {_list(steps)} of runs {_list(runs)}; every rank must "
            "export the same step of one run"
        )
    return None


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values)) or "-"
