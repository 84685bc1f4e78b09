"""Publish snapshots for evald from inside a training process: three functions, no daemon needed.

Standard library and xxhash only. Call them from one process of the job (rank 0). A snapshot is
written into a hidden directory of the same file system, renamed, and marked last, so evald never
sees half of one; a failure (also a full file system) leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
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
        self._root = Path(root)
        self._step = step
        self._run = run
        self._final = final
        self._marker = marker
        self._busy_timeout_s = busy_timeout_s
        self._name = _name(pattern, step)
        self._undo = ExitStack()
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
        for leftover in root.glob(f".tmp-{_flat(self._name)}.*"):  # of an export that was killed
            _remove(leftover)
        if target.exists():
            _wait_until_ended(root, self._run, self._step, self._busy_timeout_s)
            # the marker goes before the first byte of a re-export
            (target / self._marker).unlink(missing_ok=True)
            aside = target.rename(_hidden(root, self._name))
            shutil.rmtree(aside)
        # not tempfile: its mode 0700 would cut what a default ACL of the root grants
        self.directory.mkdir()
        self._undo.callback(self._remove, self.directory)

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
        _open_up(self.directory, root)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.directory.rename(target)
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
        return target

    def discard(self) -> None:
        """Remove what was written and not sealed."""
        self._undo.close()

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

    Raises StillEvaluating after that wait, PublishError when ``build`` wrote no file, and
    OSError (ENOSPC when the file system is full); the last two leave nothing behind.
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
    root = Path(root)
    path = root / f"{_flat(_name(pattern, step))}.skip"
    return _write_atomically(root, path, _with_run(run, reason=reason, detail=detail))


def end_run(root: str | os.PathLike[str], last_step: int, *, run: str | None = None) -> Path:
    """Tell evald that the run is over: it reports the run once every point has ended."""
    root = Path(root)
    return _write_atomically(root, root / "run.end", _with_run(run, last_step=last_step))


def write_request(
    root: str | os.PathLike[str], name: str, content: dict[str, Any], *, run: str | None = None
) -> Path:
    """Ask evald for a point that is no snapshot in the root: ``name.request`` appears at once."""
    root = Path(root)
    return _write_atomically(root, root / f"{_flat(name)}.request", _with_run(run, **content))


def _with_run(run: str | None, **content: Any) -> dict[str, Any]:
    """Name the run only where the caller did: else evald takes the folder's or the config's."""
    return content if run is None else {"run": run, **content}


def _name(pattern: str, step: int) -> str:
    if "{step}" not in pattern:
        raise PublishError(f'cannot name the snapshot: pattern "{pattern}" lacks "{{step}}"')
    if step < 0:
        raise PublishError(f"cannot publish step {step}: steps are whole numbers from 0 up")
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    folder_bits = 0o755 | (root.stat().st_mode & stat.S_IWGRP)
    for path in (directory, *_walk(directory)):
        if not path.is_symlink():
            bits = folder_bits if path.is_dir() else 0o644
            path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)


def _wait_until_ended(root: Path, run: str | None, step: int, timeout_s: float) -> None:
    """Wait while a living evald has a point of this step queued or running."""
    deadline = time.monotonic() + timeout_s
    last_beat, moved = None, time.monotonic()
    while (beat := _beat_if_held(root, run, step)) is not None:
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


def _beat_if_held(root: Path, run: str | None, step: int) -> int | None:
    """Return the daemon's beat counter if its status lists this step, else None."""
    for folder in (root, root.parent):  # the staging root, or a run's folder in it
        try:
            status = json.loads((folder / ".evald" / "status.json").read_bytes())
            for point in status["queued"] + status["running"]:
                if point["step"] == step and run in {None, point["run"]}:
                    return int(status["beat"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # no daemon has ever served here, or one that speaks another schema
            continue
    return None
