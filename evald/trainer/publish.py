"""Publish snapshots for evald from inside a training process: three functions, no daemon needed.

Standard library and xxhash only. Call them from one process of the job (rank 0). A snapshot is
written into a hidden directory of the same file system, renamed, and marked last, so evald never
sees half of one; a failure (also a full file system) leaves nothing behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Self

import xxhash

from evald.errors import EvaldError

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
#: a daemon whose beat counter stands still this long is taken for dead: nobody waits for it.
_DEAD_AFTER_S = 10.0


class PublishError(EvaldError):
    """The snapshot cannot be published as asked."""


class StillEvaluating(PublishError):
    """The step was published before and evald has not ended its point yet."""


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
        self._root = _checked_root(root)
        self._step = step
        self._run = run
        self._final = final
        self._marker = marker
        self._busy_timeout_s = busy_timeout_s
        self._name = _name(pattern, step)
        self._undo = ExitStack()
        #: the hidden directory, open and locked for as long as it is written.
        self._held = -1
        #: where the files go: on the root's file system, unseen by evald.
        self.directory = _hidden(self._root, self._name)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def open(self) -> None:
        """Make room for the step: wait until its earlier point has ended, take its marker away."""
        root, target = self._root, self._root / self._name
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f".tmp-{_flat(self._name)}.*"):
            _remove_unheld(leftover, _hidden(root, self._name))  # of an export that was killed
        if target.exists():
            runs = _runs_of(root, target / self._marker, self._run)
            _wait_until_ended(root, runs, self._step, self._busy_timeout_s)
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
        files = _list_files(self.directory, hashes=hashes, known=known or {})
        if not files:
            raise PublishError(
                f"cannot publish step {self._step}: nothing was written into {self.directory}"
            )
        self._check_written(files, known or {})
        _open_up(self.directory, root)
        _make_parents(target, root)
        if not _is_open(self.directory, self._held):
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
        manifest = _with_run(
            self._run,
            schema=1,
            step=self._step,
            files=files,
            export_s=round(export_s, 6),
            stall_s=round(export_s if stall_s is None else stall_s, 6),
            final=self._final,
        )
        _write_atomically(root, target / self._marker, manifest)
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
                held = _lock(self.directory)
                if held is not None and _is_open(self.directory, held):
                    self._held = held
                    self._undo.callback(self._remove, self.directory)
                    return
                _unlock(held)
            self.directory = _hidden(self._root, self._name)

    def _take_away(self, target: Path) -> None:
        """Remove the step's earlier snapshot."""
        held = _lock(target)
        try:
            if held is None or not _is_open(target, held):
                raise PublishError(
                    f"cannot publish step {self._step}: another process is publishing it right now"
                )
            # the marker goes before the first byte of a re-export
            (target / self._marker).unlink(missing_ok=True)
            aside = target.rename(_hidden(self._root, self._name))
            shutil.rmtree(aside)
        finally:
            _unlock(held)

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
        _unlock(held if held >= 0 else None)

    def _remove(self, directory: Path) -> None:
        """Remove a directory in which another process may still be writing."""
        with suppress(OSError):  # it has got its other name, or somebody has removed it
            aside = directory.rename(_hidden(self._root, self._name))
            shutil.rmtree(aside, ignore_errors=True)


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


def skip(
    root: str | os.PathLike[str],
    step: int,
    reason: str,
    detail: str = "",
    *,
    run: str | None = None,
    pattern: str = "step_{step}",
) -> Path:
    """Tell evald that this step gets no snapshot: the point ends ``skipped`` with ``reason``.

    Usual reasons: ``export_failed``, ``no_space``, ``busy``. ``detail`` is one sentence for people.
    """
    root = _checked_root(root)
    path = root / f"{_flat(_name(pattern, step))}.skip"
    return _write_atomically(root, path, _with_run(run, reason=reason, detail=detail))


def end_run(root: str | os.PathLike[str], last_step: int, *, run: str | None = None) -> Path:
    """Tell evald that the run is over: it reports the run once every point has ended."""
    root = _checked_root(root)
    return _write_atomically(root, root / "run.end", _with_run(run, last_step=last_step))


def write_request(
    root: str | os.PathLike[str], name: str, content: dict[str, Any], *, run: str | None = None
) -> Path:
    """Ask evald for a point that is no snapshot in the root: ``name.request`` appears at once."""
    root = _checked_root(root)
    return _write_atomically(root, root / f"{_flat(name)}.request", _with_run(run, **content))


def check_place(root: str | os.PathLike[str], pattern: str) -> None:
    """See that snapshots named by ``pattern`` lie below ``root``; raises ValueError."""
    _checked_root(root)
    if pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
        raise ValueError(
            f'cannot name snapshots: pattern "{pattern}" leads out of the root; give a relative '
            'one without ".."'
        )


def _checked_root(root: str | os.PathLike[str]) -> Path:
    if not os.fspath(root):
        raise ValueError('cannot publish: the root is ""; give the directory that evald watches')
    return Path(root)


def _with_run(run: str | None, **content: Any) -> dict[str, Any]:
    """Name the run only where the caller did: else evald takes the folder's or the config's."""
    return content if run is None else {"run": run, **content}


def _name(pattern: str, step: int) -> str:
    if "{step}" not in pattern:
        raise PublishError(f'cannot name the snapshot: pattern "{pattern}" lacks "{{step}}"')
    if step < 0:
        raise PublishError(f"cannot publish step {step}: steps are whole numbers from 0 up")
    check_place(".", pattern)
    return pattern.replace("{step}", str(step))


def _flat(name: str) -> str:
    """Return one path component for a name like ``global_step_5/actor/huggingface``."""
    return name.replace("/", "--")


def _hidden(root: Path, name: str) -> Path:
    """Return an unused name that evald's scan ignores, on the root's file system."""
    return root / f".tmp-{_flat(name)}.{secrets.token_hex(4)}"


def _write_atomically(root: Path, path: Path, content: dict[str, Any]) -> Path:
    temporary = _hidden(root, path.name)
    try:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.chmod(0o644)
        return temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _lock(directory: Path) -> int | None:
    """Open a directory and lock it; None when another exporter holds it.

    Where the file system cannot lock directories (NFS), it is open and not locked.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # what others do there, seal notices
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):  # a process that was forked meanwhile must not hold it any longer
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_open(directory: Path, descriptor: int) -> bool:
    """Tell whether ``descriptor`` is what now has the name ``directory``."""
    try:
        return os.path.samestat(directory.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _remove_unheld(path: Path, aside: Path) -> None:
    """Remove what a killed export has left, by way of ``aside``; not what is being written."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):  # it has got its other name, or somebody has removed it
        held = _lock(path)
        try:
            if held is not None and _is_open(path, held):
                shutil.rmtree(path.rename(aside))
        finally:
            _unlock(held)


def _make_parents(target: Path, root: Path) -> None:
    """Make the directories between the root and ``target``, as open as ``target`` itself."""
    bits = _folder_bits(root)
    for parent in reversed(target.relative_to(root).parents[:-1]):
        folder = root / parent
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | bits)


def _walk(directory: Path) -> Iterator[Path]:
    """Yield everything below ``directory``; links are not followed."""
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            yield Path(folder, name)


def _list_files(
    directory: Path, *, hashes: bool, known: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(_walk(directory)):
        if not path.is_file():
            continue
        name = path.relative_to(directory).as_posix()
        entry: dict[str, Any] = {"size": path.stat().st_size}
        if name in known:
            entry = known[name]
        elif hashes:
            entry["xxh3"] = _xxh3(path)
        files[name] = entry
    return files


def _xxh3(path: Path) -> str:
    """Return the 16 hex digits of the content's xxh3-64."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _open_up(directory: Path, root: Path) -> None:
    """Let another user read every file and, where the root's group may write, delete them.

    Bits are only added: under a default ACL the group bits are its mask, and taking them away
    would lock out exactly the user whom the ACL names.
    """
    folder_bits = _folder_bits(root)
    for path in (directory, *_walk(directory)):
        if not path.is_symlink():
            bits = folder_bits if path.is_dir() else 0o644
            path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)


def _folder_bits(root: Path) -> int:
    return 0o755 | (root.stat().st_mode & stat.S_IWGRP)


def _wait_until_ended(root: Path, runs: Container[str] | None, step: int, timeout_s: float) -> None:
    """Wait while a living evald has a point of this step queued or running."""
    deadline = time.monotonic() + timeout_s
    last_beat, moved = None, time.monotonic()
    while (beat := _beat_if_held(root, runs, step)) is not None:
        now = time.monotonic()
        if beat != last_beat:
            last_beat, moved = beat, now
        elif now - moved > _DEAD_AFTER_S:
            return
        if now > deadline:
            raise StillEvaluating(
                f"cannot publish step {step} again: evald has not ended its point within "
                f"{timeout_s:g} s; publish later, or report it with skip(..., 'busy')"
            )
        time.sleep(_POLL_S)


def _beat_if_held(root: Path, runs: Container[str] | None, step: int) -> int | None:
    """Return the daemon's beat counter if its status lists this step, else None.

    Of another run, too: only where the root is a run's folder, the points of other folders are
    told apart by ``runs``; None: they cannot be.
    """
    for folder in (root, root.parent):  # the staging root, or a run's folder in it
        try:
            status = _read_json(folder / ".evald" / "status.json")
            for point in status["queued"] + status["running"]:
                if point["step"] == step and (
                    folder == root or runs is None or point["run"] in runs
                ):
                    return int(status["beat"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # no daemon has ever served here, or one that speaks another schema
            continue
    return None


def _runs_of(root: Path, marker: Path, run: str | None) -> set[str] | None:
    """Return the runs whose point a published step of a run's folder may be; None: any."""
    if run is None:
        return None
    runs = {run, root.name}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        runs.add(str(_read_json(marker)["run"]))
    return runs


def _read_json(path: Path) -> Any:
    """Read a file that may be anything; a FIFO in its place must not hold up the training."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return json.loads(file.read())
    finally:
        os.close(descriptor)
