"""Token ids of prompts that wait for their turn: four bytes each, where a list takes 36."""

from __future__ import annotations

from array import array


def pack(ids: list[int]) -> bytes:
    """Pack token ids, in the byte order of this machine."""
    return array("i", ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """Give the token ids back."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()
