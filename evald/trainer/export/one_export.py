"""One snapshot on its way out of a job, as one rank sees it. Every step of it is collective.

A rank that fails keeps taking part: it gathers with the others, keeps nothing, and says what went
wrong in the next exchange, so that nobody waits in vain and every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from evald.trainer.contract import ExportError, NoSpace, PeerLost, Ranks
from evald.trainer.export.background import Memory
from evald.trainer.export.gather import is_sharded
from evald.trainer.export.lanes import Held, Job, Lanes, Sink, lanes_per_rank, order
from evald.trainer.export.pieces import TensorSpec
from evald.trainer.export.plan import Plan
from evald.trainer.export.setting import Options, Setting
from evald.trainer.export.settle import settle
from evald.trainer.export.stream import Stream
from evald.trainer.failure import Failure, failure_of
from evald.trainer.publish import Draft

_log = structlog.get_logger("evald.trainer")


class Export:
    """One snapshot: ``run``, or ``collect`` while training waits and ``finish`` behind its back.

    All raise ExportError, the same on every rank; then nothing of the snapshot is left. Only a
    rank other than 0 may raise PeerLost for one that rank 0 has published.
    """

    def __init__(
        self,
        options: Options,
        setting: Setting,
        ranks: Ranks,
        memory: Memory,
        *,
        step: int,
        final: bool,
    ) -> None:
        self._options = options
        self._setting = setting
        self._ranks = ranks
        self._memory = memory
        self._step = step
        self._started = time.monotonic()
        self._draft = Draft(
            options.root,
            step,
            run=options.run,
            final=final,
            pattern=options.pattern,
            marker=options.marker,
            busy_timeout_s=options.busy_timeout_s,
        )
        self._plan = Plan()
        self._lanes_per_rank = 1
        self._held = Held(memory.snapshot)
        self._stall_s: float | None = None
        self._failure: Exception | None = None
        #: name of each file that this rank has written -> its entry in the manifest.
        self._entries: dict[str, dict[str, Any]] = {}

    def fail(self, error: Exception) -> None:
        """Let the export fail: the other ranks hear of it in the next exchange."""
        self._failure = self._failure or error

    def run(self, weights: Any) -> Path:
        """Gather, write and publish; return the snapshot's directory."""
        with self._cleaned_up(self._ranks):
            with self._onloaded():
                self._agree(weights)
                directory = self._open(self._ranks)
                if self._plan.is_stream:
                    self._try(lambda: self._write_stream(weights, directory))
                else:
                    self._write(directory)
            return self._publish(self._ranks)

    def prepare(self, weights: Any) -> None:
        """Take the host memory that ``collect`` will need."""
        with self._onloaded():
            self._agree(weights)
            self._memory.snapshot.reserve(self._own_specs())

    def collect(self, weights: Any) -> None:
        """Copy the weights into host memory; they may change as soon as this returns."""
        with self._onloaded():
            self._agree(weights)
            if self._plan.is_stream:
                self._try(lambda: self._hold_stream(weights))
            else:
                self._try(lambda: self._memory.snapshot.reserve(self._own_specs()))
                self._walk(self._held)
            self._try(self._memory.snapshot.wait)
        self._stall_s = time.monotonic() - self._started

    def finish(self, ranks: Ranks) -> Path:
        """Write and publish what was collected; ``ranks``: those of the calling thread."""
        with self._cleaned_up(ranks):
            directory = self._open(ranks)
            with Lanes(directory, hashes=self._options.hashes) as lanes:
                for job, tensors in self._held.jobs:
                    lanes.take(job, tensors)
            self._take_entries(lanes)
            return self._publish(ranks)

    # --- before anything is written ----------------------------------------------------------

    def _agree(self, weights: Any) -> None:
        """Plan, and see that every rank plans the same."""
        self._try(lambda: self._make_plan(weights))
        mine = (self._plan.fingerprint(), lanes_per_rank(len(self._setting.writers)))
        plans = settle(self._ranks, self._step, mine, self._told())
        for rank, (fingerprint, _) in enumerate(plans):
            if fingerprint != plans[0][0]:
                raise ExportError(
                    f"cannot export step {self._step}: rank {rank} has other tensors than rank 0; "
                    "every rank must export the same model, or parts of one by its DTensors"
                )
        self._lanes_per_rank = plans[0][1]

    def _make_plan(self, weights: Any) -> None:
        self._plan = Plan.of(weights, self._setting.base, self._options)

    def _open(self, ranks: Ranks) -> Path:
        """Let rank 0 make the directory that all write into; return it."""
        if ranks.rank == 0:
            # (of an iterator's weights nobody knows the size)
            self._try(lambda: self._draft.open(self._plan.size_bytes or None))
            self._try(self._check_room)
            self._try(self._make_folders)
        return Path(settle(ranks, self._step, str(self._draft.directory), self._told())[0])

    def _check_room(self) -> None:
        disk = os.statvfs(self._draft.directory)
        need, free = self._plan.size_bytes, disk.f_bavail * disk.f_frsize
        if need > free:
            raise NoSpace(
                f"the weights take {need / 1e9:.3g} GB, and {self._options.root} has "
                f"{free / 1e9:.3g} GB free; make room there, or lower staging.keep or "
                "dispatch.max_in_flight"
            )

    def _make_folders(self) -> None:
        # not by who writes into them: a directory that is given up must not come back
        for file in self._plan.files:
            (self._draft.directory / file.name).parent.mkdir(parents=True, exist_ok=True)

    # --- the weights -------------------------------------------------------------------------

    def _jobs(self) -> Iterator[tuple[Job, bool]]:
        """Yield every job in the order of all ranks, and whether it is this rank's."""
        writers = self._setting.writers
        for job in order(self._plan.files, self._lanes_per_rank * len(writers)):
            yield job, writers[job.lane % len(writers)] == self._ranks.rank

    def _own_specs(self) -> list[TensorSpec]:
        return [spec for job, is_mine in self._jobs() if is_mine for spec in job.part.specs]

    def _write(self, directory: Path) -> None:
        """Write this rank's shards from the weights, or what is gathered of them."""
        own = [job.part for job, is_mine in self._jobs() if is_mine]
        elsewhere = any(
            is_sharded(tensor) or tensor.device.type != "cpu"
            for part in own
            for tensor in part.piece.inputs
        )
        lanes = Lanes(
            directory,
            hashes=self._options.hashes,
            buffers=self._memory.lane if elsewhere else None,
            largest=max(own, key=lambda part: part.size_bytes).specs if own else (),
        )
        with lanes:
            self._walk(lanes)
        self._take_entries(lanes)

    def _walk(self, sink: Sink) -> None:
        """Gather every tensor, with all ranks, and hand on this rank's."""
        sink.failure = self._failure  # a rank that has failed takes part, and keeps nothing
        try:
            for job, is_mine in self._jobs():
                self._pass_on(job, sink, keep=is_mine)
        except Exception as error:  # noqa: BLE001 - told to all ranks by the next exchange
            self.fail(error)
        if sink.failure is not None:
            self.fail(sink.failure)

    def _pass_on(self, job: Job, sink: Sink, *, keep: bool) -> None:
        # a function of its own, so that a gathered tensor is gone before the next
        keep = keep and sink.failure is None
        parts = job.part.piece.gather(keep=keep)
        if keep:
            try:
                made = job.part.piece.make(parts)
                sink.take(job, [made[number] for number in job.part.numbers])
            except Exception as error:  # noqa: BLE001 - told to all ranks; gathering goes on
                sink.failure = error

    def _stream(self, weights: Any) -> Stream | None:
        """Return what takes an iterator's weights; None on a rank that only walks it."""
        stream = Stream(self._memory.snapshot, self._setting.base, self._options)
        if self._ranks.rank != 0:
            stream.skip(weights)
            return None
        return stream

    def _hold_stream(self, weights: Any) -> None:
        if (stream := self._stream(weights)) is not None:
            files = stream.hold(weights)
            self._plan = replace(self._plan, shards=files)
            for job in order(files, self._lanes_per_rank):
                self._held.jobs.append((job, list(job.part.piece.inputs)))

    def _write_stream(self, weights: Any, directory: Path) -> None:
        if (stream := self._stream(weights)) is not None:
            files, entries = stream.write(weights, directory)
            self._plan = replace(self._plan, shards=files)
            self._entries |= entries

    # --- the end -----------------------------------------------------------------------------

    def _publish(self, ranks: Ranks) -> Path:
        """Give the snapshot its name and its marker, if every rank has written its part."""
        values = settle(ranks, self._step, self._entries, self._told())
        path: Path | None = None
        if ranks.rank == 0:
            try:
                path = self._complete({name: value[name] for value in values for name in value})
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self.fail(error)
        try:
            told = settle(ranks, self._step, str(path), self._told())
        except PeerLost as lost:
            if path is None:
                raise
            # it is published: what has happened to the others is said by the next exchange
            _log.warning("peer_lost_after_export", step=self._step, why=str(lost))
            return path
        return Path(told[0])

    def _complete(self, entries: dict[str, dict[str, Any]]) -> Path:
        options, directory = self._options, self._draft.directory
        for file in self._plan.files:
            if file.name not in entries:
                raise ExportError(f"no rank has written {file.name} (a bug of evald)")
        self._plan.write_rest(directory, self._setting.base, marker=options.marker)
        return self._draft.seal(hashes=options.hashes, known=entries, stall_s=self._stall_s)

    def _take_entries(self, lanes: Lanes) -> None:
        self._entries |= lanes.files
        if lanes.failure is not None:
            self.fail(lanes.failure)

    @contextlib.contextmanager
    def _cleaned_up(self, ranks: Ranks) -> Iterator[None]:
        """Leave nothing of a snapshot that failed; all ranks wait until it is gone."""
        try:
            yield
        except ExportError:
            self._draft.discard()
            with contextlib.suppress(PeerLost):
                ranks.exchange(None)
            raise
        finally:
            self._draft.discard()

    @contextlib.contextmanager
    def _onloaded(self) -> Iterator[None]:
        """Call the hooks around what reads the weights; ``offload`` whatever happens."""
        onload, offload = self._options.onload, self._options.offload
        try:
            if onload is not None:
                self._guarded(onload)
            yield
        finally:
            if offload is not None:
                self._guarded(offload)

    def _try(self, work: Callable[[], object]) -> None:
        """Do what only this rank does, unless it has failed before."""
        if self._failure is None:
            self._guarded(work)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told to all ranks; training never dies of it
            self.fail(error)

    def _told(self) -> Failure | None:
        return None if self._failure is None else failure_of(self._failure)
