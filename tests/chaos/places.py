"""Where a chaos run lives: small file systems of its own, and the processes that belong to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from evald.engines.guard import all_pids, read_stat

#: staging root and results have this much room each (the SDK leaves 32 MiB free).
ROOM_BYTES = 64 << 20


class Places:
    """Directories of one run. As root, ``root`` and ``results`` are tmpfs that can be full."""

    def __init__(self) -> None:
        self.work = Path(tempfile.mkdtemp(prefix="evald-chaos-"))
        self.work.chmod(0o755)
        self.root = self._make("root")
        self.results = self._make("results")
        self.outside = self._make("outside")
        self.control = self._make("control")
        self.can_mount = self._mount(self.root) and self._mount(self.results)

    def _make(self, name: str) -> Path:
        path = self.work / name
        path.mkdir()
        return path

    @staticmethod
    def _mount(path: Path) -> bool:
        """Mount a tmpfs; False where only root may."""
        if os.geteuid() != 0:
            return False
        options = f"size={ROOM_BYTES},mode=0755"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "evald-chaos", str(path)],
            check=False,
            capture_output=True,
        )
        return done.returncode == 0

    @staticmethod
    def _unmount(path: Path) -> None:
        subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)

    def lose_root(self) -> None:
        """Empty the staging root, as a reboot does."""
        if self.can_mount:
            self._unmount(self.root)
            self._mount(self.root)
        else:
            for path in self.root.iterdir():
                shutil.rmtree(path, ignore_errors=True)

    def fill(self, path: Path) -> Path | None:
        """Leave no room in a file system; returns what to remove (None: it is not ours)."""
        if not self.can_mount:
            return None
        filler = path / ".filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        return filler

    def close(self) -> None:
        """Remove everything."""
        for path in (self.root, self.results):
            if self.can_mount:
                self._unmount(path)
        shutil.rmtree(self.work, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """Return the living processes of this run, with their command lines."""
        found = {}
        mine = os.fsencode(self.work)
        for pid in all_pids():
            stat = read_stat(pid)
            if pid == os.getpid() or stat is None or stat.state == "Z":
                continue
            with suppress(OSError):  # it has ended
                proc = Path(f"/proc/{pid}")
                command = proc.joinpath("cmdline").read_bytes()
                where = os.fsencode(os.readlink(proc / "cwd"))  # noqa: PTH115 (bytes are enough)
                if where.startswith(mine) or mine in command:
                    found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found
