"""Models to export, and what lies in a snapshot afterwards."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from evald.demo.model import new_model, write_tokenizer
from evald.staging.manifest import read_manifest
from evald.staging.validate import BaseModel, validate

with warnings.catch_warnings():
    # CPU mode has an old torchvision beside a newer torch; nothing here looks at images
    warnings.simplefilter("ignore")
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
    from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(1)  # the cores are shared

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def tied() -> Any:
    """The demo's model: the head is the embedding."""
    return new_model(seed=1)


def untied() -> Any:
    torch.manual_seed(2)
    return Qwen3ForCausalLM(Qwen3Config(**_SMALL, tie_word_embeddings=False))


def experts() -> Any:
    """In memory, the experts of a layer are one tensor; in a checkpoint, they are many."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        **_SMALL,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


def fused() -> Any:
    """In memory, parts of the attention are tensors of their own; in a checkpoint, they are one."""
    torch.manual_seed(4)
    settings = _SMALL | {"num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**settings, tie_word_embeddings=False))
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    model._weight_conversions = [  # as from_pretrained leaves them
        WeightConverter("self_attn.qkv_proj.weight", parts, [Chunk(dim=0)]),
        WeightRenaming("mlp.down_proj", "mlp.down_proj"),
        WeightRenaming("model.final_norm", "model.norm"),
    ]
    return model


def saved(model: Any, directory: Path) -> Path:
    """What transformers makes of a model, and a tokenizer: a base model, or a reference."""
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def changed(model: Any) -> Any:
    """Train it, so to say."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def stored(directory: Path) -> dict[str, Any]:
    """All tensors in the top of a directory."""
    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def raw(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Byte for byte, with types and shapes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def assert_valid(snapshot: Path, base: Path) -> dict[str, Any]:
    """What evald checks before an engine sees a snapshot; return the manifest as JSON."""
    manifest = read_manifest(snapshot / ".complete", step=None)
    validate(snapshot, BaseModel.read(base), manifest=manifest)
    content: dict[str, Any] = json.loads((snapshot / ".complete").read_bytes())
    return content


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
