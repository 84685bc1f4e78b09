"""Jobs of several processes, run once each: what they saw, for the tests that look at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from evald.testing import write_base_model

_HERE = Path(__file__).parent / "integration"
_LIMIT_S = 100.0
#: runs a command that has a file system of one megabyte at a directory; it goes when the command
#: does, and nobody else sees it.
_WITH_SMALL = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
_MOUNT = 'mount -t tmpfs -o size=1m,mode=0755 small "$0" && exec "$@"'


class TwoRanks:
    """A job that torchrun has run with export_worker.py, and its snapshots."""

    def __init__(self, work: Path, *, has_small: bool) -> None:
        self.root = work / "root"
        #: there was a file system that could be filled.
        self.has_small = has_small
        self._reports = [json.loads((work / f"rank-{rank}.json").read_bytes()) for rank in (0, 1)]
        #: what transformers answers with the snapshot of step 2.
        self.reference: list[dict[str, Any]] = json.loads((work / "reference.json").read_bytes())

    def both(self, scenario: str) -> list[Any]:
        """What rank 0 and rank 1 have reported of a scenario."""
        return [report[scenario] for report in self._reports]


def run_two_ranks(work: Path) -> TwoRanks:
    write_base_model(work / "base")
    (work / "root").mkdir()
    (small := work / "small").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    loopback = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*torchrun, *loopback, str(_HERE / "export_worker.py"), str(work)]
    with_small = [*_WITH_SMALL, _MOUNT, str(small)]
    has_small = _succeeds([*with_small, "true"])
    if has_small:
        command = [*with_small, *command, str(small)]
    _run(command, work / "log")
    return TwoRanks(work, has_small=has_small)


def run_lost_ranks(work: Path) -> None:
    """Run the jobs of lost_ranks.py; work/ends.json has each rank's exit code."""
    write_base_model(work / "base")
    _run([sys.executable, str(_HERE / "lost_ranks.py"), str(work)], work / "log")


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _run(command: list[str], log: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as file:
        done = subprocess.run(
            command, env=environment, stdout=file, stderr=file, timeout=_LIMIT_S, check=False
        )
    assert done.returncode == 0, log.read_text()[-5000:]
