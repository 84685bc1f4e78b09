"""A snapshot on its way: written under a hidden name, renamed, marked last."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from evald.trainer.publish.content import list_files, make_parents, open_up
from evald.trainer.publish.ended import runs_of, wait_until_ended
from evald.trainer.publish.faults import PublishError
from evald.trainer.publish.locks import is_open, lock, remove_unheld, unlock
from evald.trainer.publish.names import (
    checked_root,
    flat,
    hidden,
    name_of,
    step_expression,
    with_run,
    write_atomically,
)


class Draft:
    """A snapshot that is being written into a hidden directory; ``seal`` publishes it.

    A context manager: ``open`` on the way in; on the way out nothing is left of what was not
    sealed. Arguments and errors: see ``publish``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int,
        *,
        run: str | None = None,
        final: bool = False,
        pattern: str = "step_{step}",
        marker: str = ".complete",
        busy_timeout_s: float = 60.0,
    ) -> None:
        self._started = time.monotonic()
        self._root = checked_root(root)
        self._step = step
        self._run = run
        self._final = final
        self._marker = marker
        self._busy_timeout_s = busy_timeout_s
        self._name = name_of(pattern, step)
        self._undo = ExitStack()
        #: the hidden directory, open and locked for as long as it is written.
        self._held = -1
        #: where the files go: on the root's file system, unseen by evald.
        self.directory = hidden(self._root, self._name)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def open(self) -> None:
        """Make room for the step: wait until its earlier point has ended, take its marker away."""
        root, target = self._root, self._root / self._name
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f".tmp-{flat(self._name)}.*"):
            remove_unheld(leftover, hidden(root, self._name))  # of an export that was killed
        if target.exists():
            runs = runs_of(root, target / self._marker, self._run)
            wait_until_ended(root, runs, self._step, self._busy_timeout_s)
            self._take_away(target)
        self._make_directory()

    def seal(
        self,
        *,
        hashes: bool = True,
        known: Mapping[str, dict[str, Any]] | None = None,
        stall_s: float | None = None,
    ) -> Path:
        """Give the directory its name, and the marker last; return it.

        ``known``: entries of the manifest for files whose hashes the caller has already.
        """
        root, target = self._root, self._root / self._name
        (self.directory / self._marker).unlink(missing_ok=True)
        files = list_files(self.directory, hashes=hashes, known=known or {})
        if not files:
            raise PublishError(
                f"cannot publish step {self._step}: nothing was written into {self.directory}"
            )
        self._check_written(files, known or {})
        open_up(self.directory, root)
        make_parents(target, root)
        if not is_open(self.directory, self._held):
            raise PublishError(
                f"cannot publish step {self._step}: {self.directory} was replaced while it was "
                "being written; let one process at a time export a step"
            )
        try:
            self.directory.rename(target)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            raise PublishError(
                f"cannot publish step {self._step}: another process has published it meanwhile"
            ) from error
        self._undo.callback(self._remove, target)
        export_s = time.monotonic() - self._started
        manifest = with_run(
            self._run,
            schema=1,
            step=self._step,
            files=files,
            export_s=round(export_s, 6),
            stall_s=round(export_s if stall_s is None else stall_s, 6),
            final=self._final,
        )
        write_atomically(root, target / self._marker, manifest)
        self._undo.pop_all()
        self._let_go()
        return target

    def discard(self) -> None:
        """Remove what was written and not sealed."""
        try:
            self._undo.close()
        finally:
            self._let_go()

    def _make_directory(self) -> None:
        while True:
            # not tempfile: its mode 0700 would cut what a default ACL of the root grants
            self.directory.mkdir()
            # another exporter may have taken it for a leftover before it was locked
            with suppress(FileNotFoundError):
                held = lock(self.directory)
                if held is not None and is_open(self.directory, held):
                    self._held = held
                    self._undo.callback(self._remove, self.directory)
                    return
                unlock(held)
            self.directory = hidden(self._root, self._name)

    def _take_away(self, target: Path) -> None:
        """Remove the step's earlier snapshot."""
        held = lock(target)
        try:
            if held is None or not is_open(target, held):
                raise PublishError(
                    f"cannot publish step {self._step}: another process is publishing it right now"
                )
            # the marker goes before the first byte of a re-export
            (target / self._marker).unlink(missing_ok=True)
            aside = target.rename(hidden(self._root, self._name))
            shutil.rmtree(aside)
        finally:
            unlock(held)

    def _check_written(
        self, files: Mapping[str, dict[str, Any]], known: Mapping[str, dict[str, Any]]
    ) -> None:
        """See that all that was written is still there."""
        for name, entry in known.items():
            if name not in files:
                raise PublishError(
                    f"cannot publish step {self._step}: {name} was written and is gone from "
                    f"{self.directory}"
                )
            size = (self.directory / name).stat().st_size
            if size != entry["size"]:
                raise PublishError(
                    f"cannot publish step {self._step}: {name} has {size} bytes, and "
                    f"{entry['size']} were written into it"
                )

    def _let_go(self) -> None:
        held, self._held = self._held, -1
        unlock(held if held >= 0 else None)

    def _remove(self, directory: Path) -> None:
        """Remove a directory in which another process may still be writing."""
        with suppress(OSError):  # it has got its other name, or somebody has removed it
            aside = directory.rename(hidden(self._root, self._name))
            shutil.rmtree(aside, ignore_errors=True)


def sweep_leftovers(root: Path, pattern: str) -> None:
    """Remove what killed exports of any step have left in ``root``; raises OSError.

    Only what a lock proves to be nobody's: another job may be writing there.
    """
    hidden_name = re.compile(rf"\.tmp-{step_expression(flat(pattern))}\.[0-9a-f]{{8}}")
    for path in root.glob(".tmp-*"):
        if hidden_name.fullmatch(path.name) and path.is_dir():
            name = path.name.removeprefix(".tmp-").rpartition(".")[0]
            remove_unheld(path, hidden(root, name), certain=True)


def publish(
    build: Callable[[Path], None],
    root: str | os.PathLike[str],
    step: int,
    *,
    run: str | None = None,
    final: bool = False,
    pattern: str = "step_{step}",
    marker: str = ".complete",
    hashes: bool = True,
    stall_s: float | None = None,
    busy_timeout_s: float = 60.0,
) -> Path:
    """Let ``build(directory)`` write a snapshot and publish it in ``root``; return its directory.

    ``final`` marks the run's last snapshot. ``hashes`` puts a hash of each file into the manifest,
    which evald checks before an engine sees the files. ``stall_s``: how long training stood still
    for this export; None: as long as this call. A step that was published before is replaced, once
    evald has ended its point; that wait takes at most ``busy_timeout_s``.

    Raises StillEvaluating after that wait, PublishError when ``build`` wrote no file or another
    process publishes the step at the same time, OSError (ENOSPC when the file system is full),
    and ValueError for a ``root`` or ``pattern`` that cannot be; nothing is left behind.
    """
    with Draft(
        root,
        step,
        run=run,
        final=final,
        pattern=pattern,
        marker=marker,
        busy_timeout_s=busy_timeout_s,
    ) as draft:
        build(draft.directory)
        return draft.seal(hashes=hashes, stall_s=stall_s)
