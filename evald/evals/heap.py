"""What the C library keeps of freed memory, given back to the system."""

from __future__ import annotations

import ctypes


def give_back_memory() -> None:
    """Return the free parts of the heap; nothing where the C library cannot.

    A tokenizer is more than a hundred megabytes of small pieces, and without this word they stay
    the process's own for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
