"""Host memory that holds a snapshot while training goes on."""

from __future__ import annotations

import concurrent.futures
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from evald.trainer.contract import ExportError
from evald.trainer.export.available import available_bytes
from evald.trainer.export.pieces import TensorSpec

#: the first block's size, where nobody knows how much will come; each later one is as large as
#: all before it.
_FIRST_BLOCK_BYTES = 16 << 20
#: what one thread copies at a time.
_PART_BYTES = 8 << 20
#: more threads than this copy no faster: memory is the limit.
_MAX_THREADS = 8
#: every tensor starts at a multiple of this.
_ALIGNMENT = 64
#: left to everybody else when host memory is taken.
_MARGIN_BYTES = 256 << 20


class HostBuffer:
    """Copies of tensors, in memory that is taken once, touched page by page, and used again.

    With CUDA it is pinned, so that copies from the GPU run at full speed beside each other. Copies
    are there, and their originals may change, only after ``wait``.
    """

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._block = 0
        self._offset = 0
        self._is_pinned = torch.cuda.is_available()
        self._devices: set[Any] = set()
        self._todo = _Copies()

    def reserve(self, specs: Iterable[TensorSpec]) -> None:
        """Have room for these tensors in one block, and let all copies go.

        Raises ExportError when memory is short.
        """
        self.clear()
        size = sum(_aligned(spec.size_bytes) for spec in specs)
        largest = max(self._blocks, key=len, default=None)
        if largest is not None and len(largest) >= size:
            self._blocks = [largest]
            return
        self._blocks = []  # before more is taken
        del largest
        if size:
            self._blocks = [self._new_block(size)]

    def copy(self, spec: TensorSpec, tensor: Any) -> Any:
        """Return a copy of ``tensor``, of the spec's type; valid from ``wait`` until ``clear``."""
        copied = self._place(spec.size_bytes).view(spec.dtype).view(spec.shape)
        if tensor.device.type == "cpu" and tensor.dtype == spec.dtype and tensor.is_contiguous():
            self._todo.add(copied, tensor)
            return copied
        copied.copy_(tensor, non_blocking=self._is_pinned)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return copied

    def copy_all(self, specs: Sequence[TensorSpec], tensors: Sequence[Any]) -> list[Any]:
        """Return copies of ``tensors``, in their order."""
        return [self.copy(spec, tensor) for spec, tensor in zip(specs, tensors, strict=True)]

    def flush(self) -> None:
        """Complete the copies of tensors on the CPU, so that these may be let go."""
        self._todo.run()

    def wait(self) -> None:
        """Complete all copies: from now on the originals may change."""
        self.flush()
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()

    def clear(self) -> None:
        """Let the copies go; the memory stays for the next ones."""
        self._todo.clear()
        self._devices.clear()
        self._block = self._offset = 0

    def release(self) -> None:
        """Give the memory back."""
        self.clear()
        self._todo.close()
        self._blocks = []

    def _place(self, size_bytes: int) -> Any:
        size = _aligned(size_bytes)
        while self._block < len(self._blocks) and (
            self._offset + size > len(self._blocks[self._block])
        ):
            self._block += 1
            self._offset = 0
        if self._block == len(self._blocks):
            taken = sum(len(block) for block in self._blocks)
            self._blocks.append(self._new_block(max(size, taken, _FIRST_BLOCK_BYTES)))
        start = self._offset
        self._offset += size
        return self._blocks[self._block][start : start + size_bytes]

    def _new_block(self, size_bytes: int) -> Any:
        available = available_bytes()
        if available is not None and available < size_bytes + _MARGIN_BYTES:
            raise ExportError(
                f"{size_bytes / 1e9:.3g} GB of host memory are needed to hold the snapshot, and "
                f'{available / 1e9:.3g} GB are available; export with mode="sync"'
            )
        block = torch.empty(size_bytes, dtype=torch.uint8)
        block.fill_(0)  # the kernel gives pages at the first touch: not in a later step
        if self._is_pinned:
            _pin(block)
        return block


class Memory:
    """Host memory that an exporter keeps from one snapshot to the next."""

    def __init__(self) -> None:
        #: for whole snapshots, and for the shards of iterators.
        self.snapshot = HostBuffer()
        self._lanes: list[HostBuffer] = []

    def lane(self, number: int) -> HostBuffer:
        """Return the buffer of a lane, for one gathered tensor."""
        while len(self._lanes) <= number:
            self._lanes.append(HostBuffer())
        return self._lanes[number]

    def release(self) -> None:
        """Give it back."""
        self.snapshot.release()
        self._lanes.clear()


class _Copies:
    """Copies from memory to memory, in a few threads.

    torch's own threads meet after every tensor: on a busy machine that costs many times the copy.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Any]] = []
        self._size_bytes = 0
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def add(self, target: Any, source: Any) -> None:
        """Note a copy between contiguous tensors of one type."""
        to, of = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (target, source))
        self._size_bytes += len(of)
        self._parts += [
            (to[start : start + _PART_BYTES], of[start : start + _PART_BYTES])
            for start in range(0, len(of), _PART_BYTES)
        ]

    def run(self) -> None:
        """Make the copies."""
        parts, helpers = iter(self._parts), 0
        if self._size_bytes > _PART_BYTES:
            helpers = min(_MAX_THREADS, len(os.sched_getaffinity(0))) - 1
        if helpers and self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(_MAX_THREADS, "evald-copy")
        begun = [self._threads.submit(_copy, parts) for _ in range(helpers) if self._threads]
        _copy(parts)
        for one in begun:
            one.result()
        self.clear()

    def clear(self) -> None:
        """Forget what was not copied yet."""
        self._parts, self._size_bytes = [], 0

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _copy(parts: Iterator[tuple[Any, Any]]) -> None:
    for target, source in parts:  # shared by the threads
        np.copyto(target, source)


def _pin(block: Any) -> None:
    """Pin memory; not by torch's own allocator, which takes the next power of two and keeps it."""
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(block.data_ptr(), len(block), 0))
    if error:
        raise ExportError(
            f"{len(block) / 1e9:.3g} GB of host memory cannot be pinned (CUDA error {error}); "
            'raise the limit of locked memory, or export with mode="sync"'
        )
    unpin = weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
    unpin.atexit = False  # the process's memory goes then anyway


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
