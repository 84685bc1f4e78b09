"""Safetensors files: which tensor goes into which, and one pass that writes and hashes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evald.trainer.contract import ExportError
from evald.trainer.export.hashing import Behind, new_hasher
from evald.trainer.export.pieces import Piece, TensorSpec

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 4 << 20
#: the format's names of types.
_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


class Part(NamedTuple):
    """What one piece puts into one file: some of its outputs, by their number."""

    piece: Piece
    numbers: tuple[int, ...]

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors, in the order in which they are written."""
        return [self.piece.outputs[number] for number in self.numbers]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(spec.size_bytes for spec in self.specs)


class ShardFile(NamedTuple):
    """A file of the snapshot, as planned; ``name`` is relative to the snapshot."""

    name: str
    parts: list[Part]

    @property
    def specs(self) -> list[TensorSpec]:
        """All its tensors, in their order in the file."""
        return [spec for part in self.parts for spec in part.specs]


def plan_files(pieces: Iterable[Piece], max_shard_bytes: int) -> list[ShardFile]:
    """Divide the tensors among files of at most ``max_shard_bytes``; a larger one is alone.

    Wider types come first, as loaders need each tensor at a multiple of its type's width.
    """
    shards: list[list[Part]] = []
    room = 0
    for part in sorted(_by_width(pieces), key=_width, reverse=True):
        numbers: list[int] = []
        for number in part.numbers:
            size = part.piece.outputs[number].size_bytes
            if size > room or not shards:
                if numbers:
                    shards[-1].append(part._replace(numbers=tuple(numbers)))
                    numbers = []
                if not shards or shards[-1]:
                    shards.append([])
                room = max_shard_bytes
            numbers.append(number)
            room -= size
        shards[-1].append(part._replace(numbers=tuple(numbers)))
    return [
        ShardFile(shard_name(number, len(shards)), parts) for number, parts in enumerate(shards)
    ]


def shard_name(number: int, count: int) -> str:
    """Return the name of a shard; ``number`` counts from 0."""
    return WHOLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(directory: Path, files: Sequence[ShardFile]) -> None:
    """Write the index that says which tensor is in which file; a single file needs none."""
    if len(files) == 1:
        return
    weight_map = {spec.name: file.name for file in files for spec in file.specs}
    total = sum(spec.size_bytes for file in files for spec in file.specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class ShardWriter:
    """One file, written tensor by tensor in the order of ``specs``, from the tensors' own memory.

    The content is hashed on its way. Raises OSError; ``close`` in any case.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], *, hashes: bool) -> None:
        self._path = path
        self._specs = list(specs)
        self._done = 0
        self._size_bytes = 0
        self._hasher: Behind | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        try:
            if hashes:
                self._hasher = new_hasher()
            self._write(memoryview(header(self._specs)))
        except BaseException:
            self.close()
            raise

    def add(self, tensor: Any) -> bool:
        """Write the next tensor, in the type planned; return whether it was the last."""
        spec = self._specs[self._done]
        if tuple(tensor.shape) != spec.shape:
            raise ExportError(
                f"{spec.name} was planned with shape {list(spec.shape)} and came with "
                f"{list(tensor.shape)}: the model has changed meanwhile, or this is a bug of evald"
            )
        self._write(content(tensor.detach().to(spec.dtype)))
        self._done += 1
        return self._done == len(self._specs)

    def close(self) -> dict[str, Any]:
        """Close the file; return its entry in the manifest."""
        entry: dict[str, Any] = {"size": self._size_bytes}
        if self._hasher is not None:
            entry["xxh3"] = self._hasher.finish()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return entry

    def _write(self, data: memoryview) -> None:
        size = _PIECE_BYTES if self._hasher is None else self._hasher.piece_bytes
        for start in range(0, len(data), size):
            rest = piece = data[start : start + size]
            while rest:
                written = os.write(self._fd, rest)
                self._size_bytes += written
                rest = rest[written:]
            if self._hasher is not None:
                self._hasher.add(piece)


def header(specs: Iterable[TensorSpec]) -> bytes:
    """Return a file's length field and JSON header, padded so that the data starts aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        kind = _TYPES.get(str(spec.dtype).removeprefix("torch."))
        if kind is None:
            raise ExportError(f"{spec.name} has type {spec.dtype}, which safetensors cannot hold")
        if spec.name in entries:
            raise ExportError(f"a safetensors file cannot hold another tensor called {spec.name}")
        end = offset + spec.size_bytes
        entries[spec.name] = {
            "dtype": kind,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def content(tensor: Any) -> memoryview:
    """Return the bytes of a tensor on the CPU: its own memory if it is contiguous, else a copy."""
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())


def _by_width(pieces: Iterable[Piece]) -> Iterator[Part]:
    for piece in pieces:
        widths: dict[int, list[int]] = {}
        for number, spec in enumerate(piece.outputs):
            widths.setdefault(spec.dtype.itemsize, []).append(number)
        for numbers in widths.values():
            yield Part(piece, tuple(numbers))


def _width(part: Part) -> int:
    return int(part.specs[0].dtype.itemsize)
