"""Where the demo keeps its files, and how it makes sure that they are its own.

Two directories: ``.demo`` beside ``configs`` (base model, data, results, logs) and the staging root
on ``/dev/shm``. One demo at a time uses them: a lock, which its child processes inherit, is held
until the last of them has ended. Nothing is deleted that an earlier demo did not make.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

import evald
from evald.engines.leftovers import reap_leftovers
from evald.errors import EvaldError

_LOCK = "demo.lock"
_STAMP = ".evald-demo"
_SHM = Path("/dev/shm")  # noqa: S108 - the name of the tmpfs, below it only a directory of our own


class DemoError(EvaldError):
    """The demo cannot start or go on."""


@dataclass(frozen=True)
class Layout:
    """Every path of one demo."""

    config: Path
    directory: Path
    root: Path

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Layout:
        """Return the layout of this checkout; raises DemoError when there is no demo.toml.

        ``EVALD_DEMO_DIR`` and ``EVALD_DEMO_ROOT`` move the two directories elsewhere.
        """
        checkout = Path(evald.__file__).resolve().parents[1]
        config = checkout / "configs" / "demo.toml"
        if not config.is_file():
            raise DemoError(
                f"cannot start the demo: {config} does not exist; "
                "clone the project and type `make demo` there"
            )
        directory = Path(environ.get("EVALD_DEMO_DIR") or checkout / ".demo").resolve()
        # a name of its own for each checkout and user, so that no two ever meet
        digest = xxhash.xxh3_64_hexdigest(os.fsencode(directory))[:8]
        shared = _SHM if os.access(_SHM, os.W_OK) else directory
        root = environ.get("EVALD_DEMO_ROOT") or shared / f"evald-demo-{digest}"
        return cls(config=config, directory=directory, root=Path(root).resolve())

    @property
    def base(self) -> Path:
        """The untrained model."""
        return self.directory / "base"

    @property
    def data(self) -> Path:
        """The eval sets."""
        return self.directory / "data"

    @property
    def ledger(self) -> Path:
        """Where evald writes its records."""
        return self.directory / "results" / "results.jsonl"

    @property
    def samples(self) -> Path:
        """Every question with its answer and score."""
        return self.directory / "results" / "samples"

    @property
    def status(self) -> Path:
        """What evald shows while it runs."""
        return self.root / ".evald" / "status.json"

    def log(self, name: str) -> Path:
        """Return the log of the child process ``name``."""
        return self.directory / f"{name}.log"

    def environment(self) -> dict[str, str]:
        """Return the variables by which demo.toml finds the two directories."""
        return {"EVALD_DEMO_DIR": str(self.directory), "EVALD_DEMO_ROOT": str(self.root)}

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the demo's lock; yield its descriptor for child processes to inherit.

        Raises DemoError when another demo runs, or when a directory is not the demo's own.
        """
        lock = self.directory / _LOCK
        if not lock.exists() and _has_files(self.directory):
            raise DemoError(_foreign(self.directory))
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DemoError(
                    f"cannot start the demo: another one (process {_read(lock) or 'unknown'}) "
                    f"is using {self.directory}; wait until it has ended"
                ) from error
            if _has_files(self.root) and _read(self.root / _STAMP) != str(self.directory):
                raise DemoError(_foreign(self.root))
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def prepare(self) -> None:
        """Start fresh: remove what an earlier demo left, make the staging root."""
        # engines of a demo that was killed with everything around it; their pid files go next
        reap_leftovers(self.ledger.parent)
        self.remove_models()
        for directory in (self.data, self.ledger.parent):
            shutil.rmtree(directory, ignore_errors=True)
        self.root.mkdir(parents=True)
        (self.root / _STAMP).write_text(f"{self.directory}\n", encoding="utf-8")

    def remove_models(self) -> None:
        """Remove what is of a model's size: the staging root and the base model."""
        for directory in (self.root, self.base):
            if directory.exists():
                shutil.rmtree(directory)


def _has_files(directory: Path) -> bool:
    return directory.exists() and any(directory.iterdir())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def _foreign(directory: Path) -> str:
    return (
        f"cannot start the demo: {directory} holds files that no demo of this checkout made; "
        "remove them, or name another directory (EVALD_DEMO_DIR, EVALD_DEMO_ROOT)"
    )
