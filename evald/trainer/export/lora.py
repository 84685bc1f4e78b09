"""Adapters of peft: merged weights, one layer at a time, and the adapter by itself.

peft's own code merges, on a copy of one layer: the model that trains is never changed, and no
second copy of it exists. What comes out is what ``merge_and_unload`` would give, byte for byte.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from evald.trainer.contract import ExportError
from evald.trainer.export.gather import canonical_name, is_sharded
from evald.trainer.export.pieces import Piece, one_to_one, spec_of

#: the folder of a snapshot that holds the adapter.
FOLDER = "adapter"
WEIGHTS = "adapter_model.safetensors"


class Adapter(NamedTuple):
    """An active adapter by itself, as peft saves it."""

    #: relative to the snapshot.
    folder: str
    pieces: list[Piece]
    #: a copy of peft's config of it.
    config: Any
    auto_mapping: dict[str, str] | None

    def write_config(self, snapshot: Path) -> None:
        """Write ``adapter_config.json``."""
        folder = snapshot / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(folder), auto_mapping_dict=self.auto_mapping)


class Layer(NamedTuple):
    """A module of the model in which peft keeps something apart from the base weights."""

    #: the merged tensors' own state, before the merge: name in the module -> tensor.
    state: dict[str, Any]
    #: what merges; None: ``state`` is written as it is.
    tuner: Any


def without_shell(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel; any other model as it is.

    Raises ExportError for prompts that are learned, which no weights can hold.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ExportError(
            f"an adapter of type {model.active_peft_config.peft_type} cannot be merged into "
            "weights, so engines cannot serve it; train with LoRA, or export by another way"
        )
    return model.get_base_model()


def adapted_layers(model: nn.Module) -> dict[str, Layer]:
    """Return the outermost modules that peft has put into ``model``, by their path in it."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - only where it is used
    from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: PLC0415

    found: dict[str, Layer] = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not any(
            path.startswith(outer + ".") for outer in found
        ):
            found[path] = _layer(module, BaseTunerLayer)
    return found


def follows_another(layer: Layer) -> bool:
    """Tell whether a layer has no values of its own, but those of the one that it is tied to."""
    return getattr(layer.tuner, "tied_adapter", None) is not None


def merged_piece(path: str, layer: Layer) -> Piece:
    """Return the piece that merges a layer, as ``merge_and_unload`` would."""
    tuner, names = layer.tuner, list(layer.state)
    tensors = [*tuner.parameters(), *tuner.buffers()]
    written = {id(tensor) for tensor in layer.state.values()}
    # a merge adds to the base weights in place
    own = [id(tensor) in written and not is_sharded(tensor) for tensor in tensors]

    def build(parts: list[Any]) -> list[Any]:
        memo = _without_hooks(tuner)
        for tensor, whole, is_written in zip(tensors, parts, own, strict=True):
            value = whole.clone() if is_written else whole
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        state = _merge(copy.deepcopy(tuner, memo)).state_dict()
        return [state[name] for name in names]

    outputs = tuple(
        spec_of(canonical_name(f"{path}.{name}"), tensor) for name, tensor in layer.state.items()
    )
    return Piece(tuple(tensors), outputs, build)


def adapters(model: nn.Module) -> list[Adapter]:
    """Return the active adapters of a model; [] where peft has no part in it."""
    configs = getattr(model, "peft_config", None)
    if "peft" not in sys.modules or not configs:
        return []
    active = model.active_adapters
    names = list(active() if callable(active) else active)
    return [
        _adapter(model, name, FOLDER if len(names) == 1 else f"{FOLDER}/{name}") for name in names
    ]


def _adapter(model: Any, name: str, folder: str) -> Adapter:
    from peft import PeftModel, get_peft_model_state_dict  # noqa: PLC0415 - only where it is used
    from peft.utils.other import EMBEDDING_LAYER_NAMES  # noqa: PLC0415

    config = copy.deepcopy(model.peft_config[name])
    targets = getattr(config, "target_modules", None) or ()
    state = get_peft_model_state_dict(
        model,
        state_dict=model.state_dict(),
        adapter_name=name,
        # "auto" would look for the base model on the hub
        save_embedding_layers=any(layer in targets for layer in EMBEDDING_LAYER_NAMES),
    )
    # what transformers' own add_adapter makes lacks the shell, and its files name it all the same
    is_shell = isinstance(model, PeftModel)
    prefix = "" if is_shell else "base_model.model."
    pieces = [one_to_one(prefix + canonical_name(key), value) for key, value in state.items()]
    inner = without_shell(model)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(inner, "name_or_path", None) or None
    mapping = None
    if is_shell and config.task_type is None:
        mapping = {
            "base_model_class": type(inner).__name__,
            "parent_library": type(inner).__module__,
        }
    return Adapter(folder, pieces, config, mapping)


def _layer(module: Any, tuner_type: type) -> Layer:
    if hasattr(module, "token_adapter"):  # trainable tokens of an embedding
        module = module.token_adapter
    elif hasattr(module, "modules_to_save"):  # a whole module is trained in place of the original
        active = module.active_adapters
        module = module.modules_to_save[active[0]] if active else module.original_module
    if not isinstance(module, tuner_type):
        return Layer(module.state_dict(keep_vars=True), None)
    base: Any = module
    return Layer(base.get_base_layer().state_dict(keep_vars=True), module)


def _merge(tuner: Any) -> Any:
    """Merge the copy of a layer; return its base module."""
    if set(tuner.active_adapters) <= set(tuner.merged_adapters):
        return tuner.get_base_layer()  # peft would warn
    if hasattr(tuner, "unload_and_optionally_merge_module"):
        return tuner.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    tuner.merge(safe_merge=False, adapter_names=None)
    return tuner.get_base_layer()


def _without_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a memo for ``deepcopy`` that leaves hooks out: they may reach the whole model."""
    return {id(hooks): type(hooks)() for hooks in _hooks(module)}


def _hooks(module: nn.Module) -> Iterator[dict[Any, Any]]:
    for part in module.modules():
        for name, value in vars(part).items():
            if name.endswith(("_hooks", "_with_kwargs", "_always_called")) and value:
                yield value
