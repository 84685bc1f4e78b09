"""What the weights are made of on their way into a snapshot: plain types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from evald.trainer.export.gather import full_tensor, is_sharded


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the snapshot: its name in the checkpoint, type and shape."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return int(math.prod(self.shape) * self.dtype.itemsize)


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """Return what the whole of ``tensor`` becomes under ``name``; no communication."""
    # (a DTensor's own shape is that of the whole)
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def _as_they_are(parts: list[Any]) -> list[Any]:
    return parts


@dataclass(frozen=True, slots=True)
class Piece:
    """A few tensors of the model that become, together, a few tensors of the snapshot."""

    #: as the model holds them, perhaps sharded.
    inputs: tuple[Any, ...]
    outputs: tuple[TensorSpec, ...]
    #: whole inputs -> outputs; local, and never changes the inputs.
    build: Callable[[list[Any]], list[Any]] = _as_they_are

    def gather(self, *, keep: bool) -> list[Any]:
        """Return the whole inputs, [] with ``keep=False``; collective where they are sharded."""
        name = self.outputs[0].name
        parts = [full_tensor(tensor, keep=keep, name=name) for tensor in self.inputs]
        return parts if keep else []

    @property
    def is_in_place(self) -> bool:
        """Whether the outputs are the model's own memory, and not made for the snapshot."""
        return self.build is _as_they_are and not any(map(is_sharded, self.inputs))

    def make(self, parts: list[Any]) -> list[Any]:
        """Return the outputs, in their own types: who takes them converts."""
        if self.build is _as_they_are:
            return parts
        with torch.no_grad():
            return self.build(parts)


def one_to_one(name: str, tensor: Any) -> Piece:
    """Return the piece of a tensor that is written as it is."""
    return Piece((tensor,), (spec_of(name, tensor),))


def chained(
    pieces: Iterable[Piece], outputs: Iterable[TensorSpec], build: Callable[[list[Any]], list[Any]]
) -> Piece:
    """Return one piece whose ``build`` takes the outputs of all ``pieces``."""
    links = tuple(pieces)

    def build_all(parts: list[Any]) -> list[Any]:
        made: list[Any] = []
        rest = iter(parts)
        for piece in links:
            made += piece.make([next(rest) for _ in piece.inputs])
        return build(made)

    inputs = tuple(tensor for piece in links for tensor in piece.inputs)
    return Piece(inputs, tuple(outputs), build_all)


def converted(piece: Piece, convert: Callable[[Any], Any]) -> Piece:
    """Return the piece with the type of each output replaced by ``convert(type)``."""
    outputs = tuple(replace(spec, dtype=convert(spec.dtype)) for spec in piece.outputs)
    return replace(piece, outputs=outputs)
