"""``evald tail --to wandb`` as a process, with nothing of the user's own W&B settings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sink_cases import Book

LIMIT_S = 60


def environment(directory: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    return {
        **kept,
        "HOME": str(directory),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        **more,
    }


def start(
    book: Book, *options: object, results: str | None = None, **more: str
) -> subprocess.Popen[str]:
    directory = book.path.parent.parent
    argv = [sys.executable, "-m", "evald", "tail", results or book.path.parent]
    return subprocess.Popen(
        [str(word) for word in [*argv, "--to", "wandb", "--dir", directory, *options]],
        env=environment(directory, **more),
        cwd=directory,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(reader: subprocess.Popen[str], code: int = 0) -> str:
    _, said = reader.communicate(timeout=LIMIT_S)
    assert reader.returncode == code, said
    return said


def files(book: Book, run: str = "demo-eval") -> list[Path]:
    """The files of a run's offline lives, oldest first."""
    return sorted((book.path.parent.parent / "wandb").glob(f"offline-run-*-{run}/run-*.wandb"))


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
