"""Who may read the results: modes and group of what evald creates under the results directory."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import msgspec

from evald.config import Results
from evald.errors import LedgerError


class Modes(msgspec.Struct, frozen=True, kw_only=True):
    """Modes and group as numbers; ``gid`` None keeps the daemon's own group."""

    dir_mode: int = 0o755
    file_mode: int = 0o644
    gid: int | None = None

    @classmethod
    def of(cls, config: Results) -> Modes:
        """Read them from the config; raises LedgerError for a group that does not exist."""
        gid = None
        if config.group is not None:
            try:
                gid = grp.getgrnam(config.group).gr_gid
            except KeyError:
                raise LedgerError(
                    f"cannot give the results to group {config.group!r}: there is no such group; "
                    "create it or change results.group"
                ) from None
        return cls(dir_mode=int(config.dir_mode, 8), file_mode=int(config.file_mode, 8), gid=gid)

    def make_dirs(self, path: Path) -> None:
        """Create ``path`` and what is missing above it, durably; leave existing ones as they are.

        Raises OSError.
        """
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            if self.gid is not None:
                os.chown(directory, -1, self.gid)
            directory.chmod(self.dir_mode)  # mkdir's own mode is cut by the umask
            sync_dir(directory.parent)

    def open(self, path: Path, flags: int) -> int:
        """Open (and create) a file of ours with these modes; raises OSError."""
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, self.file_mode)
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid():  # another owner's file: only he can change it
            if self.gid is not None and status.st_gid != self.gid:
                os.fchown(descriptor, -1, self.gid)
            os.fchmod(descriptor, self.file_mode)
        return descriptor


def sync_dir(path: Path) -> None:
    """Make new names in ``path`` survive a power loss; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
