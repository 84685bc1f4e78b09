"""A new revision of a point, written at once: its samples' directory, then its records.

Nothing of it can be seen before all of it is known. A daemon that is killed while the records are
written leaves set records without a terminal one: its next life ends that revision as skipped
(``aborted``), and the next regrade without a daemon writes it again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from evald.point import Kind, PointKey
from evald.regrade.plan import CannotRegrade, PointPlan
from evald.results.compressed import places
from evald.results.ledger import Ledger
from evald.results.modes import Modes
from evald.results.records import PointRecord, SetRecord
from evald.results.samples import point_samples_dir, sample_file

log = structlog.get_logger(__name__)

#: gives a revision of a step that nobody else has, or will be given.
NextKey = Callable[[str, int, Kind], PointKey]


class Revision:
    """The revision that a plan leads to; create it, fill ``directory``, then ``write`` it.

    ``next_key`` is asked when all is known, and not before.
    """

    def __init__(
        self, plan: PointPlan, *, ledger: Ledger, results_dir: Path, modes: Modes, next_key: NextKey
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._results_dir = results_dir
        self._modes = modes
        self._next_key = next_key
        key = plan.source.key
        final = point_samples_dir(results_dir, key)
        #: where samples lie until the revision is written; no reader looks into it.
        self.directory = final.with_name(f".regrade-{key.kind.value}_{key.step}")

    def clear(self) -> None:
        """Remove what a killed regrade has left. Blocking; raises OSError."""
        if self.directory.exists():
            shutil.rmtree(self.directory)

    def discard(self) -> None:
        """Remove what was not written; nothing, if it was. Blocking."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def keep(self, set_name: str) -> None:
        """Take over the samples of a set, if there are any. Blocking; raises OSError."""
        for source in places(sample_file(self._results_dir, self._plan.source.key, set_name)):
            if source.exists():
                with suppress(FileNotFoundError):  # it was compressed just now
                    self._take_over(source)
                    return

    def _take_over(self, source: Path) -> None:
        self._modes.make_dirs(self.directory)
        copy = self.directory / source.name
        try:
            # nobody writes to samples of a point that has ended
            os.link(source, copy)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(source, copy)
            os.close(self._modes.open(copy, os.O_RDWR))

    async def write(self, sets: list[SetRecord], point: PointRecord) -> PointKey:
        """Give the records their revision and append them; raises CannotRegrade, LedgerError.

        Once it has begun, cancellation waits for its end.
        """
        writing = asyncio.create_task(self._write(sets, point), name="regrade-write")
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            if not writing.cancelled() and (fault := writing.exception()) is not None:
                log.exception("regrade_not_written", exc_info=fault)
            raise

    async def _write(self, sets: list[SetRecord], point: PointRecord) -> PointKey:
        key = self._key()
        final = point_samples_dir(self._results_dir, key)
        for one in sets:
            one.revision, one.record_id = key.revision, f"{key.record_id}/{one.set}"
        point.revision, point.record_id = key.revision, key.record_id
        await asyncio.to_thread(self._show, final)
        try:
            for record in sets:
                await self._ledger.append(record)
            await self._ledger.append(point)
        finally:
            if self._ledger.index.get(key) is None:  # not a line of it was written
                await asyncio.to_thread(shutil.rmtree, final)
        return key

    def _key(self) -> PointKey:
        """Take the next revision; raises CannotRegrade when another one came meanwhile."""
        source, index = self._plan.source.key, self._ledger.index
        newest = index.revisions(source.run, source.step, source.kind)[-1]
        if newest.key.revision != self._plan.newest:
            raise CannotRegrade(
                f"cannot regrade {source}: {newest.key} came while it was graded; ask again when "
                "that has ended"
            )
        if newest.outcome is None:
            return newest.key  # of a regrade that was cut short: readers upsert
        return self._next_key(source.run, source.step, source.kind)

    def _show(self, final: Path) -> None:
        if final.exists():  # of a regrade that was killed before its first record
            shutil.rmtree(final)
        self._modes.make_dirs(self.directory)
        self.directory.rename(final)
