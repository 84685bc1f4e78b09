"""From the names that a transformers model has in memory to those of its checkpoints.

transformers 5 renames, fuses and splits tensors while it loads (the experts of a layer are one
tensor in memory), and ``save_pretrained`` turns that round for the whole model at once. Here the
same is planned on tensors without data, then done piece by piece.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from evald.trainer.export.pieces import Piece, chained, spec_of

_Revert = Callable[[nn.Module, dict[str, Any]], dict[str, Any]]
#: the same for one model.
_Turned = Callable[[dict[str, Any]], dict[str, Any]]


def is_transformers_model(model: Any) -> bool:
    """Tell whether ``model`` is a PreTrainedModel, without importing transformers for it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def revert_names(model: nn.Module, pieces: list[Piece]) -> list[Piece]:
    """Return the pieces as ``model.save_pretrained`` would name and shape them."""
    revert = _find_revert()
    if revert is None or not is_transformers_model(model):
        return pieces
    turned = functools.partial(revert, model)
    shells = _shells(pieces)
    wanted = turned(dict(shells))
    own_names = {id(shell): name for name, shell in shells.items()}
    # what came back as the same object was at most renamed
    new_names = {
        own_names[id(shell)]: name for name, shell in wanted.items() if id(shell) in own_names
    }
    kept, changed = [], []
    for piece in pieces:
        if all(spec.name in new_names for spec in piece.outputs):
            outputs = tuple(replace(spec, name=new_names[spec.name]) for spec in piece.outputs)
            kept.append(replace(piece, outputs=outputs))
        else:
            changed.append(piece)
    taken = {spec.name for piece in kept for spec in piece.outputs}
    rest = {spec_of(name, shell) for name, shell in wanted.items() if name not in taken}
    groups = [_converted(group, turned) for group in _groups(changed, turned)]
    if {spec for piece in groups for spec in piece.outputs} != rest:
        # they belong together in a way that no part of them shows
        groups = [_converted(changed, turned)]
    return kept + groups


def _find_revert() -> _Revert | None:
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415
    except ImportError:  # before transformers 5: the names in memory are the checkpoint's
        return None
    return revert_weight_conversion  # type: ignore[no-any-return]


def _shells(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return what the pieces become, as tensors without data."""
    return {
        spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for piece in pieces
        for spec in piece.outputs
    }


def _groups(pieces: list[Piece], turned: _Turned) -> list[list[Piece]]:
    """Put pieces together that end in the same tensors."""
    group_of: dict[str, _Group] = {}
    for piece in pieces:
        try:
            names = set(turned(_shells([piece])))
        except Exception:  # noqa: BLE001 - foreign code, on less than it expects, may raise any
            return [pieces]
        group = _Group([piece], names)
        for other in {id(found): found for name in names if (found := group_of.get(name))}.values():
            group = _Group(other.pieces + group.pieces, other.names | group.names)
        group_of |= dict.fromkeys(group.names, group)
    return [group.pieces for group in {id(group): group for group in group_of.values()}.values()]


def _converted(pieces: list[Piece], turned: _Turned) -> Piece:
    """Return one piece that turns a group of them into what the checkpoint holds."""
    names = [spec.name for piece in pieces for spec in piece.outputs]
    specs = [spec_of(name, shell) for name, shell in turned(_shells(pieces)).items()]

    def build(parts: list[Any]) -> list[Any]:
        made = turned(dict(zip(names, parts, strict=True)))
        return [made[spec.name] for spec in specs]

    return chained(pieces, specs, build)


class _Group(NamedTuple):
    pieces: list[Piece]
    #: of the tensors that they end in.
    names: set[str]
