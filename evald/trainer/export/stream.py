"""Weights that come one by one, from a converter: nothing is known of them beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evald.trainer.export.background import HostBuffer
from evald.trainer.export.base_files import BaseModel
from evald.trainer.export.gather import full_tensor
from evald.trainer.export.lanes import Lanes, order
from evald.trainer.export.pieces import Piece, TensorSpec, one_to_one, spec_of
from evald.trainer.export.setting import Options
from evald.trainer.export.shards import ShardFile, plan_files, shard_name
from evald.trainer.export.tensors import stream, target_type


class Stream:
    """The weights of an iterator, copied as they come, as it may use their memory again.

    Rank 0 keeps them all; the other ranks walk their iterators, which may make collective calls.
    For the same reason a failure is raised only when the iterator has been walked to its end.
    """

    def __init__(self, buffer: HostBuffer, base: BaseModel, options: Options) -> None:
        self._buffer = buffer
        self._base = base
        self._options = options
        self._pieces: list[Piece] = []
        self._specs: list[TensorSpec] = []

    def skip(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Walk the iterator and keep nothing."""
        for name, tensor in stream(weights):
            full_tensor(tensor, keep=False, name=name)

    def hold(self, weights: Iterable[tuple[str, Any]]) -> list[ShardFile]:
        """Copy all of it into host memory; return the files, whose pieces hold the copies."""
        self._walk(weights, cut=None)
        return plan_files(self._pieces, self._options.max_shard_bytes)

    def write(
        self, weights: Iterable[tuple[str, Any]], directory: Path
    ) -> tuple[list[ShardFile], dict[str, dict[str, Any]]]:
        """Write it into ``directory``, with one shard in host memory at a time.

        Returns the files, and their entries in the manifest.
        """
        parts: list[ShardFile] = []
        entries: dict[str, dict[str, Any]] = {}

        def cut() -> None:
            # its name depends on how many there will be
            file = _one_file(self._pieces)._replace(name=f"part-{len(parts)}")
            with Lanes(directory, hashes=self._options.hashes) as lanes:
                for job in order([file], 1):
                    lanes.take(job, list(job.part.piece.inputs))
            if lanes.failure is not None:
                raise lanes.failure
            parts.append(file)
            entries.update(lanes.files)

        self._walk(weights, cut)
        files = [file._replace(name=shard_name(n, len(parts))) for n, file in enumerate(parts)]
        for part, file in zip(parts, files, strict=True):
            (directory / part.name).rename(directory / file.name)
            entries[file.name] = entries.pop(part.name)
        return files, entries

    def _walk(self, weights: Iterable[tuple[str, Any]], cut: Callable[[], None] | None) -> None:
        failure: Exception | None = None
        most_bytes, size_bytes = self._options.max_shard_bytes, 0
        self._buffer.clear()
        for name, tensor in stream(weights):
            whole = full_tensor(tensor, keep=failure is None, name=name)
            if whole is None:
                continue
            try:
                spec = self._spec(name, whole)
                if cut and self._pieces and size_bytes + spec.size_bytes > most_bytes:
                    self._cut(cut)
                    size_bytes = 0
                self._pieces.append(one_to_one(name, self._buffer.copy(spec, whole)))
                self._buffer.wait()  # from here on the iterator may use the memory again
                size_bytes += spec.size_bytes
            except Exception as error:  # noqa: BLE001 - raised below
                failure = error
            del whole
        if failure is not None:
            raise failure
        self._base.check(self._specs, self._options.allow_absent)
        self._cut(cut)

    def _spec(self, name: str, tensor: Any) -> TensorSpec:
        own = spec_of(name, tensor)
        spec = TensorSpec(name, target_type(own.dtype, self._options.dtype), own.shape)
        self._base.check_part([spec])
        self._specs.append(spec)
        return spec

    def _cut(self, cut: Callable[[], None] | None) -> None:
        if cut is not None:
            cut()
            self._pieces = []
            self._buffer.clear()


def _one_file(pieces: list[Piece]) -> ShardFile:
    [file] = plan_files(pieces, sum(spec.size_bytes for one in pieces for spec in one.outputs))
    return file
