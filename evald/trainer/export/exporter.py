"""Write snapshots from inside a training job: whole models, sharded ones, adapters, converters.

Every rank of the job makes the same calls. A failure is an ``ExportError`` with the skip's reason,
the same on every rank, and leaves nothing behind; training goes on.
"""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import structlog
from torch import nn

from evald.point import SkipReason
from evald.trainer.contract import ExportError, Ranks
from evald.trainer.export.background import Memory
from evald.trainer.export.base_files import BaseModel
from evald.trainer.export.meeting import fault_of, meet
from evald.trainer.export.one_export import Export
from evald.trainer.export.setting import Options, Setting
from evald.trainer.export.settle import settle
from evald.trainer.export.tensors import torch_type
from evald.trainer.failure import failure_of
from evald.trainer.publish import check_place, sweep_leftovers
from evald.trainer.publish.names import make_root
from evald.trainer.ranks import Processes, current_ranks, near_ranks, separate
from evald.trainer.values import one_of, whole

_log = structlog.get_logger("evald.trainer")

Weights: TypeAlias = nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]


class SnapshotExporter:
    """Publishes the weights of a training job in ``root``, a staging root or a spool.

    Construction is collective, as are all calls. ``base_dir``: the base model's directory; the
    snapshots get its tokenizer, config and templates, and must have its tensors (with a hub id, or
    None, they get the model's own config, and nothing is compared). ``mode``: ``"sync"`` writes
    while the caller waits; ``"async"`` copies into host memory, as large as what this rank writes,
    and writes in the background, one snapshot at a time.

    ``max_shard_bytes``: size of a shard; ``writers``: ``"near"`` shares the shards out among the
    ranks that can write into ``root`` (``ranks.near`` at most), ``"first"`` leaves all to rank 0.
    ``hashes``: into the manifest, for evald to check. ``dtype``: what floating-point weights are
    converted to; None: as they are. ``allow_absent``: shell patterns of the base model's tensors
    that may be missing. ``onload`` and ``offload`` are called around whatever reads the weights,
    ``offload`` whatever happens. ``pattern``, ``marker``, ``run``: see ``publish``.
    ``busy_timeout_s``: how long an export of a step that evald still evaluates may wait, and one
    that comes while the one before is still being written.

    Raises ValueError for arguments that cannot be used.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        base_dir: str | os.PathLike[str] | None,
        run: str | None = None,
        mode: Literal["sync", "async"] = "sync",
        pattern: str = "step_{step}",
        marker: str = ".complete",
        max_shard_bytes: int = 5_000_000_000,
        ranks: Ranks | None = None,
        writers: Literal["near", "first"] = "near",
        hashes: bool = True,
        dtype: Any = None,
        allow_absent: Iterable[str] = (),
        onload: Callable[[], object] | None = None,
        offload: Callable[[], object] | None = None,
        busy_timeout_s: float = 60.0,
    ) -> None:
        one_of("mode", mode, ("sync", "async"))
        one_of("writers", writers, ("near", "first"))
        if "{step}" not in pattern:
            raise ValueError(f'cannot name snapshots: pattern "{pattern}" lacks "{{step}}"')
        check_place(root, pattern)
        if not marker or "/" in marker:
            raise ValueError(f'cannot mark snapshots: marker "{marker}" is no file name')
        self._options = Options(
            root=Path(root),
            run=run,
            pattern=pattern,
            marker=marker,
            max_shard_bytes=_whole_bytes(max_shard_bytes),
            hashes=hashes,
            dtype=torch_type(dtype),
            allow_absent=tuple(allow_absent),
            onload=onload,
            offload=offload,
            busy_timeout_s=busy_timeout_s,
        )
        self._base_dir = None if base_dir is None else os.fspath(base_dir)
        self._writers = writers
        self._is_async = mode == "async"
        self._own_ranks: list[Ranks] = []
        if ranks is None:
            ranks = current_ranks()
            self._own_ranks.append(ranks)
        self._ranks = self._behind = ranks
        if self._is_async:
            # the background's exchanges, and the foreground's of later steps, never meet
            self._behind = separate(ranks)
            if self._behind is not ranks:
                self._own_ranks.append(self._behind)
        self._setting: Setting | None = None
        self._memory = Memory()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[Path] | None = None
        self._is_closed = False
        self._process = os.getpid()

    def export(
        self, weights: Weights, step: int, *, final: bool = False, run: str | None = None
    ) -> concurrent.futures.Future[Path]:
        """Publish ``weights`` as the snapshot of ``step``; the result is its directory.

        ``weights``: a transformers, peft or other model, also inside DDP, FSDP2 or torch.compile; a
        state dict; or an iterator of (name, tensor) in Hugging Face names, which every rank walks
        to its end and of which rank 0 writes everything. ``final`` marks the run's last snapshot.
        ``run``: for its manifest, the same on every rank; None: the exporter's own.

        In sync mode the future is done; in async mode the weights may change as soon as this
        returns, and a call that comes before the last one's snapshot is published waits for it.
        Failures are the future's: ExportError, with the skip's reason; NoSpace; PeerLost. Raises
        ValueError for wrong arguments, on every rank if one of them has some, and in a process that
        was forked from the exporter's.
        """
        self._check_open()
        fault = fault_of(weights, step)
        future: concurrent.futures.Future[Path] = concurrent.futures.Future()
        try:
            export = self._new_export(0 if fault else step, final=final, run=run)
            fault = meet(self._ranks, step, run or self._options.run, fault)
            if fault is None and self._is_async:
                export.collect(weights)
                if self._thread is None:
                    self._thread = concurrent.futures.ThreadPoolExecutor(1, "evald-export")
                future = self._pending = self._thread.submit(_finish, export, self._behind, step)
            elif fault is None:
                future.set_result(export.run(weights))
        except Exception as error:  # noqa: BLE001 - training never dies of an export
            future.set_exception(_as_export_error(error, step))
        if fault is not None and not future.done():
            raise ValueError(fault)
        return future

    def prepare(self, weights: Weights) -> None:
        """Take the host memory for async exports of ``weights`` now, not in the first of them.

        Optional. What goes wrong is logged, and an error of the exports to come. Raises ValueError
        for wrong arguments.
        """
        self._check_open()
        if not self._is_async or self._pending is not None:
            return
        fault = fault_of(weights, 0)
        try:
            export = self._new_export(0, final=False)
            fault = meet(self._ranks, 0, self._options.run, fault)
            if fault is None:
                export.prepare(weights)
        except Exception as error:  # noqa: BLE001 - training never dies of an export
            _log.warning("export_not_prepared", why=str(_as_export_error(error, 0)))
            return
        if fault is not None:
            raise ValueError(fault)

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for the snapshot in flight, at most ``timeout_s``, and give the memory back."""
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        if self._thread is not None and self._pending is not None:
            concurrent.futures.wait([self._pending], timeout_s)
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._pending is None or self._pending.done():
            self._memory.release()
            for ranks in self._own_ranks:
                if isinstance(ranks, Processes):
                    ranks.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("cannot export: the exporter is closed; make a new one")
        if self._process != os.getpid():  # its threads, and the snapshot in flight, are not here
            raise ValueError(
                "cannot export: this process was forked from the exporter's; make a new one in it"
            )

    def _new_export(self, step: int, *, final: bool, run: str | None = None) -> Export:
        if self._setting is None:
            self._setting = self._find_setting(step)
        options = self._options if run is None else self._options._replace(run=run)
        export = Export(options, self._setting, self._ranks, self._memory, step=step, final=final)
        if self._pending is not None:
            timeout_s = self._options.busy_timeout_s
            if not concurrent.futures.wait([self._pending], timeout_s).done:
                busy = ExportError(
                    f"the snapshot before it is still being written after {timeout_s:g} s; export "
                    "less often, or onto a faster file system"
                )
                busy.reason = SkipReason.BUSY
                export.fail(busy)
        return export

    def _sweep(self) -> None:
        """Remove what exports of processes that were killed have left."""
        try:
            sweep_leftovers(self._options.root, self._options.pattern)
        except OSError as error:
            _log.warning("leftovers_not_removed", root=str(self._options.root), why=str(error))

    def _find_setting(self, step: int) -> Setting:
        """Read the base model on rank 0, for all, and find the ranks that can write."""
        ranks, root = self._ranks, self._options.root
        # as random as near_ranks needs it; evald's scan ignores it
        probe = root / f".tmp-near.{secrets.token_hex(8)}"
        failure, base = None, None
        try:
            if ranks.rank == 0:
                try:
                    base = BaseModel.read(self._base_dir)
                    make_root(root)
                    probe.mkdir()
                    self._sweep()
                except Exception as error:  # noqa: BLE001 - told to all ranks
                    failure = failure_of(error)
            base, place = settle(ranks, step, (base, str(probe)), failure)[0]
            writers: tuple[int, ...] = (0,)
            if self._writers == "near" and ranks.size > 1:
                writers = tuple(
                    rank for rank in near_ranks(ranks, Path(place)) if rank in ranks.near
                )
            return Setting(base, writers)
        finally:
            shutil.rmtree(probe, ignore_errors=True)


def export_snapshot(
    weights: Weights,
    root: str | os.PathLike[str],
    *,
    step: int,
    base_dir: str | os.PathLike[str] | None,
    final: bool = False,
    **options: Any,
) -> Path:
    """Publish one snapshot of ``weights`` in ``root`` and return its directory.

    Collective. ``options``: what ``SnapshotExporter`` takes, but ``mode``; for more than one
    snapshot it is the better choice. Raises ExportError on every rank, ValueError.
    """
    exporter = SnapshotExporter(root, base_dir=base_dir, **options)
    try:
        return exporter.export(weights, step, final=final).result()
    finally:
        exporter.close()


def _finish(export: Export, ranks: Ranks, step: int) -> Path:
    try:
        return export.finish(ranks)
    except Exception as error:
        raise _as_export_error(error, step) from error


def _as_export_error(error: Exception, step: int) -> ExportError:
    if isinstance(error, ExportError) and str(error).startswith(f"cannot export step {step}:"):
        return error
    return failure_of(error).error(step)


def _whole_bytes(given: Any) -> int:
    """Return the size of a shard; a float like 5e9 is one, too."""
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    return whole("max_shard_bytes", given, least=1)
