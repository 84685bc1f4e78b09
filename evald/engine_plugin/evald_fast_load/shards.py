"""Where the tensors of a safetensors file lie, and in which pieces they are read."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

#: what is read into one piece of device memory: the tensors in it stay or go together.
CHUNK_BYTES = 128 << 20
#: memory of the device is dealt out in steps of this: every dtype's alignment, and more.
ALIGNMENT = 256
#: dtypes by their names in a header; some are newer than the installed torch.
_DTYPES = {
    name: getattr(torch, known)
    for name, known in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, known)
}


class Unsupported(Exception):
    """A file that only SGLang's own loader may know how to read."""


class Entry(NamedTuple):
    """One tensor: bytes ``start`` to ``stop`` of its file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    stop: int


class Run(NamedTuple):
    """Bytes that follow each other in the file as they do in memory."""

    start: int
    size: int
    #: in the chunk.
    at: int


class Chunk(NamedTuple):
    """Tensors in the order in which they are handed out, and how they come into memory."""

    path: Path
    entries: list[tuple[Entry, int]]
    runs: list[Run]
    size: int


def read_entries(path: Path) -> list[Entry]:
    """Return the tensors of a file by name; raises Unsupported, ValueError or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = []
    for name in sorted(header):
        about, base = header[name], 8 + length
        dtype, (start, stop) = _DTYPES.get(about["dtype"]), about["data_offsets"]
        if dtype is None:
            raise Unsupported(f"{path.name}: {name} has dtype {about['dtype']}")
        if math.prod(about["shape"]) * dtype.itemsize != stop - start:
            raise Unsupported(f"{path.name}: {name} has another size than its shape says")
        if base + stop > size:
            raise ValueError(f"{path.name} ends before {name} does")
        entries.append(Entry(name, dtype, about["shape"], base + start, base + stop))
    return entries


def chunks_of(path: Path) -> Iterator[Chunk]:
    """Deal the tensors of a file out into chunks, in the order of their names.

    A tensor larger than a chunk is one by itself. Raises what ``read_entries`` raises.
    """
    gathered: list[Entry] = []
    size = 0
    for entry in read_entries(path):
        needs = entry.stop - entry.start + 2 * ALIGNMENT
        if gathered and size + needs > CHUNK_BYTES:
            yield _laid_out(path, gathered)
            gathered, size = [], 0
        gathered.append(entry)
        size += needs
    if gathered:
        yield _laid_out(path, gathered)


def _laid_out(path: Path, entries: list[Entry]) -> Chunk:
    """Place tensors in memory as they lie in the file, wherever they follow each other there."""
    placed: list[tuple[Entry, int]] = []
    runs: list[Run] = []
    end = 0
    for entry in entries:
        size = entry.stop - entry.start
        last = runs[-1] if runs else None
        if last is not None and last.start + last.size == entry.start:
            at = last.at + last.size
            runs[-1] = last._replace(size=last.size + size)
        else:
            # as far from a multiple as in the file: what is aligned there is aligned here
            at = -(-end // ALIGNMENT) * ALIGNMENT + entry.start % ALIGNMENT
            runs.append(Run(entry.start, size, at))
        placed.append((entry, at))
        end = at + size
    return Chunk(path, placed, runs, end)
