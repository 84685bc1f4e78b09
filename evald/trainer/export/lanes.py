"""Several shards at once: who writes what, in which order, and the threads that write.

One file is written by one thread, as the kernel lets one writer into a file at a time; several
files are written side by side. A *lane* is one such thread of one rank. Every rank walks the same
order, because gathering a sharded tensor is collective.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from evald.trainer.export.background import HostBuffer
from evald.trainer.export.pieces import TensorSpec
from evald.trainer.export.shards import Part, ShardFile, ShardWriter

#: more threads than this no longer make tmpfs faster.
MAX_LANES = 4


class Job(NamedTuple):
    """A part of a file that one lane writes, and its tensors once they are there."""

    lane: int
    file: ShardFile
    part: Part


class Sink(Protocol):
    """Where this rank's tensors go: into files, or into host memory."""

    #: the first failure; what comes after it is dropped.
    failure: Exception | None

    def take(self, job: Job, tensors: list[Any]) -> None:
        """Take the tensors of ``job.part``; what it raises is a failure, too."""
        ...


def lanes_per_rank(ranks_on_host: int) -> int:
    """Return how many files this rank should write at once."""
    processors = len(os.sched_getaffinity(0))
    return max(1, min(MAX_LANES, processors // ranks_on_host))


def order(files: Sequence[ShardFile], lanes: int) -> Iterator[Job]:
    """Yield all parts so that the lanes are busy side by side; the same on every rank.

    File n goes to lane n modulo ``lanes``; the lane that has been given the least is next.
    """
    queues = [
        [Job(lane, file, part) for file in files[lane::lanes] for part in file.parts]
        for lane in range(lanes)
    ]
    given = [0] * lanes
    taken = [0] * lanes
    while open_lanes := [lane for lane in range(lanes) if taken[lane] < len(queues[lane])]:
        lane = min(open_lanes, key=lambda number: given[number])
        job = queues[lane][taken[lane]]
        taken[lane] += 1
        given[lane] += job.part.size_bytes
        yield job


class Held:
    """Holds this rank's tensors in host memory, for lanes to write them later."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self.failure: Exception | None = None
        #: what was taken, in order.
        self.jobs: list[tuple[Job, list[Any]]] = []

    def take(self, job: Job, tensors: list[Any]) -> None:
        """Copy the tensors: complete, and free to change, only after the buffer's ``wait``."""
        self.jobs.append((job, self._buffer.copy_all(job.part.specs, tensors)))
        if not job.part.piece.is_in_place:
            self._buffer.flush()  # lets go of what was made or gathered


class Lanes:
    """The writing threads of one export on this rank; leaving the block waits for them.

    ``buffers``: host memory, one for each lane, into which tensors are copied before they are
    written, so that a gathered one is gone before the next; None: they are written from where they
    are. ``largest``: the tensors of the job that needs most room in one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        hashes: bool,
        buffers: Callable[[int], HostBuffer] | None = None,
        largest: Sequence[TensorSpec] = (),
    ) -> None:
        self._directory = directory
        self._hashes = hashes
        self._buffers = buffers
        self._largest = largest
        self._lanes: dict[int, _Lane] = {}
        #: name of each finished file -> its entry in the manifest.
        self.files: dict[str, dict[str, Any]] = {}
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._lanes.values():
            lane.finish()

    def take(self, job: Job, tensors: list[Any]) -> None:
        """Hand tensors to their lane; waits while it has some that it has not begun."""
        if self.failure is not None:
            return
        try:
            lane = self._lanes.get(job.lane) or self._new_lane(job.lane)
            lane.put(job, tensors)
        except Exception as error:  # noqa: BLE001 - told to all ranks by the export
            self.failure = error

    def writer(self, file: ShardFile) -> ShardWriter:
        """Open a file; called by the lanes."""
        return ShardWriter(self._directory / file.name, file.specs, hashes=self._hashes)

    def _new_lane(self, number: int) -> _Lane:
        buffer = None if self._buffers is None else self._buffers(len(self._lanes))
        if buffer is not None:
            buffer.reserve(self._largest)
        lane = self._lanes[number] = _Lane(self, buffer)
        return lane


class _Lane:
    """One thread that writes one file after another."""

    def __init__(self, lanes: Lanes, buffer: HostBuffer | None) -> None:
        self._lanes = lanes
        self._buffer = buffer
        self._waiting: queue.Queue[tuple[ShardFile, list[Any]] | None] = queue.Queue(1)
        self._writer: ShardWriter | None = None
        self._thread = threading.Thread(target=self._run, name="evald-write", daemon=True)
        self._thread.start()

    def put(self, job: Job, tensors: list[Any]) -> None:
        if self._buffer is not None:
            self._waiting.join()  # until what the buffer holds is written
            self._buffer.clear()
            tensors = self._buffer.copy_all(job.part.specs, tensors)
            self._buffer.wait()
        self._waiting.put((job.file, tensors))

    def finish(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            if self._lanes.failure is None:
                try:
                    self._write(*work)
                except Exception as error:  # noqa: BLE001 - told to all ranks by the export
                    self._lanes.failure = error
            work = None
            self._waiting.task_done()
        if self._writer is not None:
            self._writer.close()

    def _write(self, file: ShardFile, tensors: list[Any]) -> None:
        writer = self._writer = self._writer or self._lanes.writer(file)
        for tensor in tensors:
            if writer.add(tensor):
                self._lanes.files[file.name] = writer.close()
                self._writer = None
