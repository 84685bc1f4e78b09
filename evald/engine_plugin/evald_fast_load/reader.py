"""Tensors of safetensors files, read by several threads straight into the device's memory.

One thread reads 4 to 5 GB/s out of a tmpfs, eight 36 to 48, and a device takes 55 from pinned
memory: so threads read pieces into pinned buffers, from where they are copied on a stream of their
own while the next are read. Tensors are views of large chunks of device memory; a chunk is free
again when its last view is gone, and nothing else holds any.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from .shards import CHUNK_BYTES, Chunk, chunks_of

THREADS = 8
#: what a thread reads at once, and the size of a pinned buffer.
PIECE_BYTES = 16 << 20
BUFFERS_PER_THREAD = 2
#: chunks that are read beside the one whose tensors are asked for next.
CHUNKS_AHEAD = 3


def default_threads(ranks: int = 1) -> int:
    """Return how many threads each of ``ranks`` processes on this machine should read with."""
    return max(2, min(THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))


def read_tensors(
    paths: Iterable[str | Path], *, device: torch.device, threads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``paths``: file by file, in each by name, as SGLang's own loader does.

    All headers are read before this returns: raises Unsupported, ValueError or OSError. Later
    OSError, and ValueError when a file ends early. A tensor is complete, whatever stream uses it.
    """
    chunks = deque(chunk for path in paths for chunk in chunks_of(Path(path)))
    return _tensors(chunks, device, threads)


def _tensors(
    upcoming: deque[Chunk], device: torch.device, threads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    lane = CudaLane(device, threads) if device.type == "cuda" else Lane()
    under_way: deque[tuple[Chunk, torch.Tensor, list[Future[torch.cuda.Event | None]]]] = deque()
    with ExitStack() as stack:
        # An end before the end lets go of memory only when nothing is written into it any more.
        stack.callback(under_way.clear)
        stack.callback(lane.settle)
        pool = ThreadPoolExecutor(threads, "evald-fast-load")
        stack.callback(pool.shutdown, cancel_futures=True)
        while upcoming or under_way:
            while upcoming and len(under_way) <= CHUNKS_AHEAD:
                memory = lane.memory(upcoming[0].size, needed=not under_way)
                if memory is None:
                    break  # there is room when the tensors before it are gone
                chunk = upcoming.popleft()
                pieces = [
                    pool.submit(lane.bring, chunk.path, start, memory[at : at + size])
                    for start, at, size in _pieces(chunk)
                ]
                under_way.append((chunk, memory, pieces))
            chunk, memory, pieces = under_way.popleft()
            for event in [piece.result() for piece in pieces]:
                if event is not None:
                    event.synchronize()
            yield from _views(chunk, memory)
            del memory, pieces


def _pieces(chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """Cut a chunk's runs into what is read at once: offset in the file, in the chunk, size."""
    for run in chunk.runs:
        for done in range(0, run.size, PIECE_BYTES):
            yield run.start + done, run.at + done, min(PIECE_BYTES, run.size - done)


def _views(chunk: Chunk, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, at in chunk.entries:
        raw = memory[at : at + entry.stop - entry.start]
        if at % entry.dtype.itemsize:
            raw = raw.clone()  # not aligned in the file either
        yield entry.name, raw.view(entry.dtype).view(entry.shape)


class Lane:
    """The way into the memory of a CPU: straight."""

    def memory(self, size: int, *, needed: bool) -> torch.Tensor | None:
        """Return memory for a chunk; None: there is none now, and it is not ``needed`` to go on."""
        del needed
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def bring(self, path: Path, start: int, target: torch.Tensor) -> torch.cuda.Event | None:
        """Fill ``target`` with the bytes from ``start`` on; called by threads.

        Returns the event after which it is filled; None: it is. Raises ValueError or OSError.
        """
        _read(path, start, target)
        return None

    def settle(self) -> None:
        """Wait until nothing is under way any more."""


class CudaLane(Lane):
    """The way into a GPU's memory: through pinned buffers, which are used again and again."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None]] = (
            queue.SimpleQueue()
        )
        for _ in range(threads * BUFFERS_PER_THREAD):
            # torch keeps pinned memory that is let go of: the next load has it at once
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._buffers.put((buffer, None))

    def memory(self, size: int, *, needed: bool) -> torch.Tensor | None:
        """Return memory of the GPU, if it is ``needed`` and there is none, of the CPU."""
        try:
            # chunks of one size fit into each other's places
            memory = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return super().memory(size, needed=True) if needed else None
        # What had this memory before may be in use by work that has not run yet, of the caller or
        # of its threads.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        return memory

    def bring(self, path: Path, start: int, target: torch.Tensor) -> torch.cuda.Event | None:
        """Read into a buffer that is free, and copy from there."""
        if target.device.type == "cpu":
            return super().bring(path, start, target)
        buffer, copied = self._buffers.get()
        try:
            if copied is not None:
                copied.synchronize()
            part = buffer[: target.numel()]
            _read(path, start, part)
            # a thread begins in no mode, and memory from inference mode is written only in it
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                target.copy_(part, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record(self._stream)
        finally:
            self._buffers.put((buffer, copied))
        return copied

    def settle(self) -> None:
        """Wait for the copies."""
        self._stream.synchronize()


def _read(path: Path, start: int, target: torch.Tensor) -> None:
    """Read bytes of a file into memory of the CPU; raises ValueError when it ends early."""
    rest = memoryview(target.numpy())
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while rest:
            count = os.preadv(fd, [rest], start)
            if not count:
                raise ValueError(f"{path.name} ends before byte {start + len(rest)}")
            rest, start = rest[count:], start + count
    finally:
        os.close(fd)
