"""Host memory that holds a snapshot while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from evald.trainer.contract import ExportError
from evald.trainer.pieces import TensorSpec

#: the first block's size, where nobody knows how much will come; each later one is as large as
#: all before it.
_FIRST_BLOCK_BYTES = 16 << 20
#: every tensor starts at a multiple of this.
_ALIGNMENT = 64
#: left to everybody else when host memory is taken.
_MARGIN_BYTES = 256 << 20
_MEMORY = Path("/proc/meminfo")


class HostBuffer:
    """Copies of tensors, in memory that is taken once, touched page by page, and used again.

    With CUDA it is pinned, so that copies from the GPU run at full speed beside each other; then
    they are there only after ``wait``.
    """

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._block = 0
        self._offset = 0
        self._is_pinned = torch.cuda.is_available()
        self._devices: set[Any] = set()

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
        """Return a copy of ``tensor``, of the spec's type; valid until ``clear``."""
        size = _aligned(spec.size_bytes)
        while self._block < len(self._blocks) and (
            self._offset + size > len(self._blocks[self._block])
        ):
            self._block += 1
            self._offset = 0
        if self._block == len(self._blocks):
            taken = sum(len(block) for block in self._blocks)
            self._blocks.append(self._new_block(max(size, taken, _FIRST_BLOCK_BYTES)))
        place = self._blocks[self._block][self._offset : self._offset + spec.size_bytes]
        self._offset += size
        copied = place.view(spec.dtype).view(spec.shape)
        copied.copy_(tensor, non_blocking=self._is_pinned)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return copied

    def copy_all(self, specs: Sequence[TensorSpec], tensors: Sequence[Any]) -> list[Any]:
        """Return copies of ``tensors``, in their order."""
        return [self.copy(spec, tensor) for spec, tensor in zip(specs, tensors, strict=True)]

    def wait(self) -> None:
        """Return once all copies are complete: from now on the originals may change."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()

    def clear(self) -> None:
        """Let the copies go; the memory stays for the next ones."""
        self._block = self._offset = 0

    def release(self) -> None:
        """Give the memory back."""
        self.clear()
        self._blocks = []

    def _new_block(self, size_bytes: int) -> Any:
        available = available_bytes()
        if available is not None and available < size_bytes + _MARGIN_BYTES:
            raise ExportError(
                f"{size_bytes / 1e9:.3g} GB of host memory are needed to hold the snapshot, and "
                f'{available / 1e9:.3g} GB are available; export with mode="sync"'
            )
        block = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        return block.fill_(0)  # the kernel gives pages at the first touch: not in a later step


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def available_bytes() -> int | None:
    """Return what the kernel can give without swapping; None where it does not say."""
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0][1]) * 1024 if fields else None
