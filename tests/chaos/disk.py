"""A disk that fails or is slow when a file says so: wraps what the daemon calls of ``os``.

The file holds ``{"under": PATH, "ops": [...], "errno": "EIO"}`` or ``"slow_s"`` instead.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: what can fail; the first argument is a path or a descriptor.
OPS = ("write", "fdatasync", "fsync", "ftruncate", "open", "scandir", "stat", "unlink", "rmdir")
PAIRS = ("rename", "replace")


class Disk:
    """Faults of the file system below a path, for as long as ``control`` is there."""

    def __init__(self, control: Path) -> None:
        self._control = str(control)
        self._stat = os.stat
        self._readlink = os.readlink
        self._open = io.open

    def install(self) -> None:
        """Wrap the functions."""
        shutil.rmtree.avoids_symlink_attacks  # noqa: B018 (it looks at what os can before we wrap)
        for name in (*OPS, *PAIRS):
            self._wrap(os, name)
        self._wrap(io, "open")

    def _wrap(self, module: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(module, name)

        def wrapper(what: Any, *args: Any, **kwargs: Any) -> Any:
            self._fail(name, what, kwargs.get("dir_fd"))
            return inner(what, *args, **kwargs)

        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if inner in able:
                able.add(wrapper)
        setattr(module, name, wrapper)

    def _fail(self, op: str, what: Any, dir_fd: int | None) -> None:
        try:
            self._stat(self._control)
            with self._open(self._control) as file:
                fault = json.load(file)
        except (OSError, ValueError):
            return
        if op in fault["ops"] and self._path(what, dir_fd).startswith(fault["under"]):
            if "errno" not in fault:
                time.sleep(fault["slow_s"])
                return
            number = getattr(errno, fault["errno"])
            raise OSError(number, os.strerror(number), os.fspath(self._path(what, dir_fd)))

    def _path(self, what: Any, dir_fd: int | None) -> str:
        try:
            if isinstance(what, int):
                return self._readlink(f"/proc/self/fd/{what}")
            path = os.fsdecode(what)
            if dir_fd is not None:
                return f"{self._readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
        except OSError:
            return ""
        return path
