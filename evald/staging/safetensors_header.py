"""The header of a ``.safetensors`` file, checked as strictly as a loader would need it.

A file is: 8 bytes header length (little endian), the header as JSON, then the tensors' bytes
without gaps. SGLang's server dies of a file that breaks this.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from evald.errors import InvalidSnapshot
from evald.staging.files import open_file

#: what the safetensors library itself accepts.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"

#: dtype name -> bits of one value.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

# bounded, so that a damaged header cannot make numbers that no sentence can show
_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Size, ...], Meta(max_length=64)]


class TensorInfo(msgspec.Struct, frozen=True):
    """Type and shape of one tensor, and the number of bytes that they make."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Size, _Size]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the tensors' names, types and shapes; raises InvalidSnapshot with the cause, OSError."""
    with open_file(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = header_length(file.read(_LENGTH_BYTES), file_bytes, path.name)
        return parse_header(file.read(length), file_bytes - _LENGTH_BYTES - length, path.name)


def header_length(prefix: bytes, file_bytes: int, name: str) -> int:
    """Return the length in bytes of the JSON header from the first 8 bytes of file ``name``."""
    if len(prefix) < _LENGTH_BYTES:
        raise InvalidSnapshot(f"{name} is truncated: {file_bytes} bytes hold no header")
    length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidSnapshot(
            f"{name} has a damaged header: its length says {length} bytes, and the format allows "
            f"{MAX_HEADER_BYTES}"
        )
    if _LENGTH_BYTES + length > file_bytes:
        raise InvalidSnapshot(
            f"{name} is truncated: its header alone takes {_LENGTH_BYTES + length} bytes, and the "
            f"file has {file_bytes}"
        )
    return length


def parse_header(header: bytes, data_bytes: int, name: str) -> dict[str, TensorInfo]:
    """Check a JSON header against the ``data_bytes`` that follow it in file ``name``."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if _METADATA in raw:
            msgspec.json.decode(raw.pop(_METADATA), type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSnapshot(f"{name} has a header that is not JSON: {error}") from error
    entries = {tensor: _entry(tensor, value, name) for tensor, value in raw.items()}
    tensors = {tensor: _info(tensor, entry, name) for tensor, entry in entries.items()}
    _check_contiguous(entries, data_bytes, name)
    return tensors


def shown(tensor: str) -> str:
    """Return a tensor's name as a sentence can hold it: printable and not endless."""
    text = tensor if tensor.isprintable() else ascii(tensor)
    return text if len(text) <= 160 else text[:157] + "..."  # noqa: PLR2004 (one readable line)


def _entry(tensor: str, value: msgspec.Raw, name: str) -> _Entry:
    try:
        return msgspec.json.decode(value, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSnapshot(
            f"{name} has a damaged header: tensor {shown(tensor)}: {error}"
        ) from error


def _info(tensor: str, entry: _Entry, name: str) -> TensorInfo:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise InvalidSnapshot(
            f"{name} has tensor {shown(tensor)} of unknown type {shown(entry.dtype)}"
        )
    start, end = entry.data_offsets
    needed_bits = math.prod(entry.shape) * bits
    if needed_bits != (end - start) * 8:
        raise InvalidSnapshot(
            f"{name} has tensor {shown(tensor)} with {end - start} bytes, but type {entry.dtype} "
            f"and shape {list(entry.shape)} need {-(-needed_bits // 8)}"
        )
    return TensorInfo(entry.dtype, entry.shape, end - start)


def _check_contiguous(entries: dict[str, _Entry], data_bytes: int, name: str) -> None:
    spans = sorted((*entry.data_offsets, tensor) for tensor, entry in entries.items())
    for (_, end, before), (start, _, tensor) in pairwise([(0, 0, ""), *spans]):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            neighbour = f"tensor {shown(before)}" if before else "the header"
            raise InvalidSnapshot(
                f"{name} has a damaged header: tensor {shown(tensor)} at byte {start} {what} "
                f"{neighbour}, which ends at {end}"
            )
    end = spans[-1][1] if spans else 0
    if end > data_bytes:
        last = shown(spans[-1][2])
        raise InvalidSnapshot(
            f"{name} is truncated: its tensors (the last is {last}) take {end} bytes, and "
            f"{data_bytes} are there"
        )
    if end < data_bytes:
        raise InvalidSnapshot(f"{name} has {data_bytes - end} bytes after its last tensor")
