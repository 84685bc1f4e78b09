"""What a person should know about the staging root, told once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import structlog

from evald.staging.rights import closed_folder, deletable

log = structlog.get_logger(__name__)

#: a directory is in doubt for as long as a trainer takes to overwrite it: that is none of evald's.
_DOUBT_S = 600.0

#: hears an alert's name and its one sentence.
Alerting = Callable[[str, str], Awaitable[None]]


class Notices:
    """Logs each fault once, and passes on the ones that belong into the ledger."""

    def __init__(self, on_alert: Alerting | None) -> None:
        self._on_alert = on_alert
        self._told: set[object] = set()
        #: directory in doubt -> since when.
        self._doubtful: dict[Path, float] = {}

    def warn_once(self, event: str, detail: str, *, about: object = None) -> None:
        """Log a warning the first time that ``event`` is ``about`` this."""
        told = event if about is None else (event, about)
        if told not in self._told:
            self._told.add(told)
            log.warning(event, detail=detail)

    async def tell_ignored(self, detail: str) -> None:
        """Tell of a trainer's word that cannot be understood: nothing comes of it."""
        if ("ignored", detail) not in self._told:
            self._told.add(("ignored", detail))
            await self._alert("staging_file_ignored", detail)

    def forget(self, event: str) -> None:
        """Let ``event`` be told again: it is over."""
        self._told.discard(event)

    def test_rights(self, directory: Path, tasks: asyncio.TaskGroup) -> None:
        """Ask on the first snapshot whether evald may delete it."""
        if "rights" not in self._told:
            self._told.add("rights")
            tasks.create_task(self._test_rights(directory), name="staging rights")

    def tell_closed(self, directories: Iterable[Path], tasks: asyncio.TaskGroup) -> None:
        """Tell of directories, and folders of runs, that evald may not look into."""
        for directory in directories:
            if directory not in self._told:
                self._told.add(directory)
                tasks.create_task(self._tell_closed(directory), name="staging alert")

    def tell_misnamed(
        self, directories: Iterable[Path], pattern: str, tasks: asyncio.TaskGroup
    ) -> None:
        """Tell of finished snapshots that no point can be made of."""
        for directory in directories:
            if ("misnamed", directory) not in self._told:
                self._told.add(("misnamed", directory))
                sentence = (
                    f"cannot tell the step of {directory}: it has a marker, but its name does not "
                    f"fit staging.pattern = {pattern!r}; rename it, or change the pattern"
                )
                tasks.create_task(self._alert("snapshot_misnamed", sentence), name="staging alert")

    def tell_doubtful(self, doubtful: Mapping[Path, str], tasks: asyncio.TaskGroup) -> None:
        """Tell of directories that have looked half-written for long: nothing may come of them."""
        now = time.monotonic()
        self._doubtful = {directory: self._doubtful.get(directory, now) for directory in doubtful}
        for directory, since in self._doubtful.items():
            about = ("doubtful", directory)
            if now - since >= _DOUBT_S and about not in self._told:
                self._told.add(about)
                sentence = doubtful[directory]
                tasks.create_task(self._alert("snapshot_doubtful", sentence), name="staging alert")

    async def _test_rights(self, directory: Path) -> None:
        fault = await asyncio.to_thread(deletable, directory, with_entry=True)
        if fault is not None:
            await self._alert("snapshot_not_deletable", fault)

    async def _tell_closed(self, directory: Path) -> None:
        try:
            sentence = await asyncio.to_thread(closed_folder, directory)
        except FileNotFoundError:
            self._told.discard(directory)
        else:
            await self._alert("snapshot_closed", sentence)

    async def _alert(self, name: str, detail: str) -> None:
        log.warning(name, detail=detail)
        if self._on_alert is not None:
            await self._on_alert(name, detail)
