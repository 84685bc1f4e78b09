"""The weights as a snapshot names them: pieces that are planned first, then gathered one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evald.trainer.contract import ExportError
from evald.trainer.export.checkpoint_names import is_transformers_model, revert_names
from evald.trainer.export.gather import canonical_name, unwrap
from evald.trainer.export.lora import (
    Layer,
    adapted_layers,
    follows_another,
    merged_piece,
    without_shell,
)
from evald.trainer.export.pieces import Piece, TensorSpec, converted, one_to_one

#: state of modules that is no tensor of the model.
_EXTRA_STATE = "_extra_state"
_HEAD = "lm_head.weight"
#: what the header of a safetensors file calls its metadata.
_METADATA = "__metadata__"
#: what ``dtype`` converts; fp8 and integers stay as they are.
#: what trainers call them.
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CONVERTIBLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def weights_bytes(weights: Any) -> int | None:
    """Estimate the bytes of a snapshot's weights; None for an iterator, which nobody can ask.

    Exact for plain weights; an adapter counts with the weights that it is merged into.
    """
    if isinstance(weights, nn.Module):
        tensors: Iterable[Any] = weights.parameters()  # each once, however often it is tied
    elif isinstance(weights, Mapping):
        tensors = [tensor for tensor in weights.values() if isinstance(tensor, torch.Tensor)]
        tensors = {_memory(tensor): tensor for tensor in tensors}.values()
    else:
        return None
    return sum(int(tensor.numel()) * int(tensor.dtype.itemsize) for tensor in tensors)


def plan_pieces(
    weights: Any, base_names: Iterable[str] | None, dtype: Any = None
) -> list[Piece] | None:
    """Return what becomes of a model or a state dict; None for an iterator: see ``stream``.

    ``base_names``: the base model's tensors, which say which one of two tied ones is written.
    ``dtype``: the type that floating-point weights get; None: their own. Local and cheap: nothing
    is gathered or copied. Raises ExportError with the cause.
    """
    if isinstance(weights, nn.Module):
        pieces = _module_pieces(unwrap(weights))
    elif isinstance(weights, Mapping):
        pieces = _mapping_pieces(weights, base_names)
    else:
        return None
    if dtype is None:
        return pieces
    return [converted(piece, lambda own: target_type(own, dtype)) for piece in pieces]


def stream(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield an iterator's tensors under their canonical names, each name once."""
    seen: dict[str, str] = {}
    for raw_name, tensor in weights:
        name = _name(raw_name)
        if seen.get(name) == raw_name:
            raise ExportError(f"the weights yield {name} twice; yield each tensor once")
        _note(seen, name, raw_name)
        yield name, _tensor(name, tensor)


def target_type(own: Any, dtype: Any) -> Any:
    """Return the type that a tensor of type ``own`` is written in."""
    return dtype if dtype is not None and own in _CONVERTIBLE else own


def torch_type(dtype: Any) -> Any:
    """Return the torch type that ``dtype`` names; raises ValueError with the remedy."""
    found = (
        getattr(torch, _SHORT_NAMES.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    )
    if found is None and dtype is None:
        return None
    if found not in _CONVERTIBLE:
        raise ValueError(
            f"cannot convert weights to {dtype}: give bfloat16, float16, float32 or None, which "
            "leaves them as they are"
        )
    return found


def main_type(specs: Iterable[TensorSpec]) -> Any:
    """Return the type of most of the weights; None where config.json has nothing to say of it."""
    sizes: dict[Any, int] = {}
    for spec in specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.size_bytes
    found = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return found if found in _CONVERTIBLE else None


def ties_head(config: Any) -> bool:
    """Tell whether a model's config says that its head is its embedding."""
    text = getattr(config, "text_config", None)
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, text))


def _module_pieces(shell: nn.Module) -> list[Piece]:
    model = without_shell(shell)
    layers = adapted_layers(model)
    planned = _planned(model, layers)
    dropped = _tied_copies(model, planned)
    pieces: list[Piece] = []
    merged: set[str] = set()
    for name, (tensor, path) in planned.items():
        layer = None if path is None else layers[path]
        if layer is not None and layer.tuner is not None:
            if name in dropped:
                if follows_another(layer):
                    continue
                raise ExportError(
                    f"the adapter trains {name}, which is tied to the embedding, and merged "
                    "weights cannot hold both; untie them before training, or leave it out of the "
                    "adapter"
                )
            if path not in merged:
                merged.add(str(path))
                pieces.append(merged_piece(str(path), layer))
        elif name not in dropped:
            pieces.append(one_to_one(name, tensor))
    return revert_names(model, pieces)


def _planned(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, tuple[Any, str | None]]:
    """Return name -> (tensor, path of the adapted layer that it is of) in the model's order."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    planned: dict[str, tuple[Any, str | None]] = {}
    seen: dict[str, str] = {}
    # keep_vars: tied tensors are one object then, also where they are sharded
    for raw_name, tensor in model.state_dict(keep_vars=True).items():
        path = _layer_path(raw_name, layers)
        entries = {raw_name: tensor}
        if path is not None:
            entries = {f"{path}.{name}": part for name, part in layers[path].state.items()}
        for entry, part in entries.items():
            name = _name(entry)
            if not name.endswith(_EXTRA_STATE) and name not in ignored:
                if name not in planned or planned[name][0] is not part:
                    _note(seen, name, entry)
                planned[name] = (_tensor(name, part), path)
    return planned


def _layer_path(name: str, layers: Mapping[str, Layer]) -> str | None:
    while name:
        if name in layers:
            return name
        name = name.rpartition(".")[0]
    return None


def _tied_copies(model: nn.Module, planned: Mapping[str, tuple[Any, Any]]) -> set[str]:
    """Return the names that ``save_pretrained`` leaves out: copies that loading ties again."""
    patterns = [
        canonical_name(f"{path}.{key}" if path else key)
        for path, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    copies: set[str] = set()
    for names in _twins({name: tensor for name, (tensor, _) in planned.items()}):
        tied = [name for name in names if any(re.search(key, name) for key in patterns)]
        copies.update(tied[: len(names) - 1])
    if is_transformers_model(model) and ties_head(model.config):
        for name in planned.keys() - copies:
            if is_head(name):
                raise ExportError(
                    f"{name} is trained apart from the embedding, but config.json ties the two, so "
                    "that engines would ignore it; train a model with tie_word_embeddings = false"
                )
    return copies


def _mapping_pieces(weights: Mapping[str, Any], base_names: Iterable[str] | None) -> list[Piece]:
    tensors: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for raw_name, tensor in weights.items():
        name = _name(raw_name)
        if not name.endswith(_EXTRA_STATE):
            _note(seen, name, raw_name)
            tensors[name] = _tensor(name, tensor)
    known = None if base_names is None else set(base_names)
    for names in _twins(tensors):
        written = [
            name for name in names if (not is_head(name) if known is None else name in known)
        ]
        for name in set(names) - set(written or names):
            del tensors[name]
    return [one_to_one(name, tensor) for name, tensor in tensors.items()]


def is_head(name: str) -> bool:
    """Tell whether a tensor is the model's head, which may be tied to its embedding."""
    return name == _HEAD or name.endswith("." + _HEAD)


def _name(raw_name: Any) -> str:
    """Return a tensor's name in the snapshot; raises ExportError for what cannot be one."""
    if not isinstance(raw_name, str):
        raise ExportError(
            f"the weights have a tensor called {raw_name!r}, of type {type(raw_name).__name__}; "
            "name every tensor by a text, as a state dict does"
        )
    name = canonical_name(raw_name)
    if name == _METADATA:
        raise ExportError(f"a tensor cannot be called {name}: safetensors keeps that for itself")
    return name


def _note(seen: dict[str, str], name: str, raw_name: str) -> None:
    """Note which tensor gets ``name``; raises ExportError when another one has it."""
    other = seen.setdefault(name, raw_name)
    if other != raw_name:
        raise ExportError(
            f"{other} and {raw_name} would both be called {name} in the snapshot, as the names of "
            "wrappers are left out; hand over one of them"
        )


def _tensor(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise ExportError(
            f"{name} is a {type(value).__name__}, not a tensor; quantized models and optimizer "
            "state are no snapshot: export the weights in floating point"
        )
    return value


def _twins(tensors: Mapping[str, Any]) -> list[list[str]]:
    """Return the groups of names whose tensors are the same memory, each sorted."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_memory(tensor), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def _memory(tensor: Any) -> Any:
    """Return what only tensors of the same memory have in common."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0 or local.is_meta:
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
