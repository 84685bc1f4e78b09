"""A snapshot on its way: written under a hidden name, renamed, marked last."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from evald.trainer.publish.budget import Claim
from evald.trainer.publish.content import list_files, make_parents, open_up
from evald.trainer.publish.ended import runs_of, wait_until_ended
from evald.trainer.publish.faults import PublishError
from evald.trainer.publish.locks import is_open, lock, remove_unheld, unlock
from evald.trainer.publish.names import (
    checked_root,
    flat,
    hidden,
    make_root,
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
        size_bytes: int | None = None,
    ) -> None:
        self._started = time.monotonic()
        self._root = checked_root(root)
        self._step = step
        self._run = run
        self._final = final
        self._marker = marker
        self._busy_timeout_s = busy_timeout_s
        self._size_bytes = size_bytes
        self._name = name_of(pattern, step)
        self._claim = Claim(self._root, step, final=final)
        self._undo = ExitStack()
        #: the hidden directory, open and locked for as long as it is written.
        self._held: int | None = None
        #: the step's earlier snapshot, open and locked until this one has taken its place.
        self._earlier: int | None = None
        #: where the files go: on the root's file system, unseen by evald.
        self.directory = hidden(self._root, self._name)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.discard)
            self.open(self._size_bytes)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def open(self, size_bytes: int | None = None) -> None:
        """Begin, once the step's earlier point has ended; its snapshot stays until ``seal``.

        ``size_bytes``: what the snapshot will take; None: nobody knows.
        """
        root, target = self._root, self._root / self._name
        make_root(root)
        for leftover in root.glob(f".tmp-{flat(self._name)}.*"):
            remove_unheld(leftover, hidden(root, self._name))  # of an export that was killed
        if target.exists():
            self._wait_until_ended(target)
            self._earlier = lock(target)
            if self._earlier is None or not is_open(target, self._earlier):
                raise PublishError(
                    f"cannot publish step {self._step}: another process is publishing it right now"
                )
        self._claim.take(size_bytes)
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
        self._claim.take(sum(int(entry["size"]) for entry in files.values()))
        open_up(self.directory, root)
        make_parents(target, root)
        if self._held is None or not is_open(self.directory, self._held):
            raise PublishError(
                f"cannot publish step {self._step}: {self.directory} was replaced while it was "
                "being written; let one process at a time export a step"
            )
        with self._earlier_aside(target), ExitStack() as undo:
            try:
                self.directory.rename(target)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                raise PublishError(
                    f"cannot publish step {self._step}: another process has published it meanwhile"
                ) from error
            undo.callback(self._remove, target)
            self._mark(target, files, stall_s)
            undo.pop_all()
        self._undo.pop_all()
        self._let_go()
        return target

    def discard(self) -> None:
        """Remove what was written and not sealed."""
        try:
            self._undo.close()
        finally:
            self._let_go()

    def _mark(self, target: Path, files: dict[str, dict[str, Any]], stall_s: float | None) -> None:
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
        write_atomically(self._root, target / self._marker, manifest)

    def _wait_until_ended(self, target: Path) -> None:
        runs = runs_of(self._root, target / self._marker, self._run)
        wait_until_ended(self._root, runs, self._step, self._busy_timeout_s)

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

    @contextmanager
    def _earlier_aside(self, target: Path) -> Iterator[None]:
        """Hide the step's earlier snapshot; it comes back if the new one does not get there."""
        if self._earlier is None or not is_open(target, self._earlier):
            yield  # there was none, or evald has retired it
            return
        self._wait_until_ended(target)  # evald may have begun with it meanwhile
        aside = target.rename(hidden(self._root, self._name))
        with ExitStack() as undo:
            undo.callback(aside.rename, target)
            yield
            undo.pop_all()
        # what cannot be removed now is a leftover, for the next sweep
        shutil.rmtree(aside, ignore_errors=True)

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
        held, self._held = self._held, None
        earlier, self._earlier = self._earlier, None
        unlock(held)
        unlock(earlier)
        self._claim.give_back()

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
    size_bytes: int | None = None,
) -> Path:
    """Let ``build(directory)`` write a snapshot and publish it in ``root``; return its directory.

    ``final`` marks the run's last snapshot. ``hashes`` puts a hash of each file into the manifest,
    which evald checks before an engine sees the files. ``stall_s``: how long training stood still
    for this export; None: as long as this call. ``root`` is made if its parent is there. A step
    that was published before is replaced by the complete new snapshot, and stays where there is
    none; evald must have ended its point, before and after the writing: each wait takes at most
    ``busy_timeout_s``. ``size_bytes``: about what ``build`` will write, reserved in the staging
    root's budget; None: as much as the largest snapshot there takes.

    Raises StillEvaluating after that wait, NoRoom when the budget has no room (also when more was
    written than it has), PublishError when ``build`` wrote no file or another
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
        size_bytes=size_bytes,
    ) as draft:
        build(draft.directory)
        return draft.seal(hashes=hashes, stall_s=stall_s)
