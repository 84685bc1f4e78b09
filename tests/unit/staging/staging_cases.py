"""What the staging tests share: a base model, candidates, and code that runs as another user."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings

from evald.config import Staging
from evald.errors import InvalidSnapshot
from evald.point import Kind, Outcome, PointKey
from evald.results.index import PointIndex
from evald.results.records import Accepted, PointRecord
from evald.staging.candidate import Candidate
from evald.staging.safetensors_header import TensorInfo
from evald.staging.validate import BaseModel
from evald.testing import Tensor, model_tensors, write_snapshot

#: a busy machine makes single draws slow; that says nothing about the code.
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NOBODY = 65534
MARKER = ".complete"


@cache
def tensors() -> dict[str, Tensor]:
    return model_tensors(seed=1)


@cache
def base_model() -> BaseModel:
    infos = {
        name: TensorInfo(tensor.dtype, tensor.shape, len(tensor.data))
        for name, tensor in tensors().items()
    }
    return BaseModel(Path("/base"), infos, is_tied=True, size_bytes=1)


def snapshot(directory: Path, **arguments: Any) -> Path:
    arguments.setdefault("tensors", tensors())
    return write_snapshot(directory, tokenizer=False, **arguments)


def staging(root: Path, **arguments: Any) -> Staging:
    return msgspec.convert({"root": str(root), **arguments}, Staging)


def candidate(directory: Path = Path("/staged/step_4"), **arguments: Any) -> Candidate:
    defaults: dict[str, Any] = {
        "run": "r",
        "step": 4,
        "kind": Kind.STEP,
        "owned": True,
        "fingerprint": "f",
        "digest": "d",
    }
    return Candidate(directory=directory, **{**defaults, **arguments})


def accept(index: PointIndex, key: PointKey, **fields: Any) -> None:
    known: dict[str, Any] = {"directory": "/staged/step_4", "size_bytes": 1, "fingerprint": "f"}
    index.apply(
        Accepted(
            run=key.run,
            step=key.step,
            revision=key.revision,
            kind=key.kind,
            record_id=key.record_id + "/accepted",
            **{**known, **fields},
        )
    )


def end(index: PointIndex, key: PointKey, outcome: Outcome = Outcome.OK, **fields: Any) -> None:
    index.apply(
        PointRecord(
            run=key.run,
            step=key.step,
            revision=key.revision,
            kind=key.kind,
            record_id=key.record_id,
            outcome=outcome,
            **fields,
        )
    )


def refusal(work: Callable[[], object]) -> str | None:
    """Return the sentence with which ``work`` finds a snapshot invalid; None when it does not."""
    try:
        work()
    except InvalidSnapshot as invalid:
        return invalid.detail
    return None


@contextmanager
def deep_folders(directory: Path, name: str, depth: int, *, scratch: Path) -> Iterator[None]:
    """Make ``depth`` folders in one another, also where no path can name the last one.

    ``scratch`` is deleted afterwards: pytest's own rmtree may not come so deep.
    """
    at = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    try:
        yield
    finally:
        subprocess.run(["/bin/rm", "-rf", scratch], check=True)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a scratch folder that other users may enter (pytest's own is 0700)."""
    folder = Path(tempfile.mkdtemp(prefix="evald-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


def as_other_user(code: str, *arguments: object) -> str:
    """Run ``code`` in a process that may not do what root may; return what it prints.

    Without root's rights the tests' own user does: the cases take away its rights by modes.
    """
    become = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    script = "\n".join(
        [
            "import asyncio, os, pwd, sys, structlog",
            "from pathlib import Path",
            "from evald import staging_notes",
            "from evald.config import BlackBox, Config, Results, Staging",
            "from evald.errors import InvalidSnapshot",
            "from evald.staging import digest, files, inside, intake, retention, rights",
            "from evald.staging import scan, validate, words",
            become if os.geteuid() == 0 else "",
            code,
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
