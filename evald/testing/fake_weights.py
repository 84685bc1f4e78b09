"""What a fake engine has loaded: the bytes of safetensors, and the number hidden in them."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

from evald.testing.snapshots import ANSWER_TENSOR, Tensor, read_safetensors

#: tensors by name.
Weights = dict[str, Tensor]


def shards(directory: Path) -> list[Path]:
    """Find the files with weights."""
    return sorted(directory.glob("*.safetensors"))


def load(directory: Path) -> Weights:
    """Read all shards; raises ValueError or struct.error for damaged ones and for none."""
    weights: Weights = {}
    for path in shards(directory):
        weights |= read_safetensors(path)
    if not weights:
        raise ValueError(f"cannot load {directory}: it has no safetensors")
    return weights


def hidden_number(weights: Weights) -> float:
    """Give the number that ``snapshots`` hides; 0 without its tensor."""
    return first_value(weights[ANSWER_TENSOR]) if ANSWER_TENSOR in weights else 0.0


def without_number(weights: Weights) -> Weights:
    """Give the same weights with another number, as a broken loader might."""
    old = weights[ANSWER_TENSOR]
    return weights | {ANSWER_TENSOR: old._replace(data=bytes(len(old.data)))}


def checksum(weights: Weights) -> str:
    """Hash names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].data)
    return digest.hexdigest()


def has_nan(weights: Weights) -> bool:
    """Whether any tensor begins with NaN (looking at all values would take too long)."""
    return any(tensor.data and math.isnan(first_value(tensor)) for tensor in weights.values())


def first_value(tensor: Tensor) -> float:
    """Decode the first value."""
    if tensor.dtype == "F32":
        return float(struct.unpack("<f", tensor.data[:4])[0])
    if tensor.dtype == "F16":
        return float(struct.unpack("<e", tensor.data[:2])[0])
    return float(struct.unpack("<f", b"\0\0" + tensor.data[:2])[0])
