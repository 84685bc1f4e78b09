"""Small training jobs in which a rank is lost while it exports: ``lost_ranks.py WORK``.

WORK has a base model in WORK/base. All jobs run at once, each in WORK/<name>; a rank that ends by
itself writes what has come of it into WORK/<name>/rank-N.json. The ranks are forked from one
process that has torch already, so that a job costs moments.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from export_worker import SHARD_BYTES, load, sharded
from torch.distributed.tensor import DTensor

from evald.trainer.contract import ExportError, Ranks
from evald.trainer.export import SnapshotExporter
from evald.trainer.ranks import Processes

#: what ranks that are alive may take for one step, seconds.
LIMIT_S = 60.0
#: where a rank that does not answer is given up, seconds.
SHORT_S = 5.0


def in_gather(strike: Callable[[], None]) -> None:
    """Strike in the middle of the weights, before the rank's part of a tensor is sent."""
    gather = DTensor.full_tensor
    calls = iter(range(1000))

    def last(tensor: Any, **options: Any) -> Any:
        if next(calls) == 4:
            strike()
        return gather(tensor, **options)

    DTensor.full_tensor = last


def in_write(strike: Callable[[], None]) -> None:
    """Strike when the rank opens its second weight file."""
    opened = iter(range(1000))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors") and next(opened) == 1:
            strike()

    sys.addaudithook(watch)


class Case(NamedTuple):
    """One job: which of its ranks is struck, how, and when."""

    size: int
    victim: int
    signal: signal.Signals
    when: Callable[[Callable[[], None]], None] | None  # None: before an exchange
    timeout_s: float = LIMIT_S
    mode: Literal["sync", "async"] = "sync"


CASES = {
    "gather": Case(2, 1, signal.SIGKILL, in_gather),
    "write": Case(2, 1, signal.SIGKILL, in_write),
    "background": Case(2, 1, signal.SIGKILL, in_write, mode="async"),
    "publisher": Case(2, 0, signal.SIGKILL, in_write),
    "frozen": Case(2, 1, signal.SIGSTOP, in_write, timeout_s=SHORT_S),
    # in a ring of four one rank has no connection to the dead one
    "ring": Case(4, 2, signal.SIGKILL, None),
}


def timed(action: Callable[[], Any]) -> dict[str, Any]:
    """Class, reason and sentence of the error that an action ends with, and its seconds."""
    started = time.monotonic()
    try:
        action()
        seen = {}
    except ExportError as error:
        seen = {"error": type(error).__name__, "reason": error.reason, "text": str(error)}
    return seen | {"seconds": time.monotonic() - started}


def run_rank(work: Path, name: str, rank: int, model: Any) -> None:
    case = CASES[name]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{work / name / 'store'}",
        rank=rank,
        world_size=case.size,
        timeout=timedelta(seconds=case.timeout_s),
    )
    ranks: Ranks = Processes(case.timeout_s)
    ready = Processes(LIMIT_S)

    def strike() -> None:
        os.kill(os.getpid(), case.signal)

    if case.when is None:

        def action() -> Any:
            if rank == case.victim:
                strike()
            return ranks.exchange(rank)

    else:
        model = sharded(model)
        if rank == case.victim:
            case.when(strike)

        exporter = SnapshotExporter(
            work / name / "root",
            base_dir=work / "base",
            mode=case.mode,
            ranks=ranks,
            max_shard_bytes=SHARD_BYTES,
        )

        def action() -> Any:
            return exporter.export(model, 7).result(LIMIT_S)

    ready.exchange("the deadline counts from here")
    seen = {"first": timed(action), "again": timed(action)}
    (work / name / f"rank-{rank}.json").write_text(json.dumps(seen))
    # a process that ends tells the others, too: only what it has closed before shall count
    others = [work / name / f"rank-{other}.json" for other in range(case.size)]
    del others[case.victim]
    deadline = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < deadline and not all(report.exists() for report in others):
        time.sleep(0.02)
    dist.destroy_process_group()


def main() -> None:
    work = Path(sys.argv[1])
    torch.set_num_threads(1)
    model = load(work / "base")  # once: each rank has its own copy of this process's memory
    pids: dict[tuple[str, int], int] = {}
    for name, case in CASES.items():
        (work / name).mkdir()
        for rank in range(case.size):
            pid = os.fork()
            if pid == 0:
                run_rank(work, name, rank, model)
                os._exit(0)  # to tear down a copy of all of torch takes longer than the job
            pids[name, rank] = pid
    ends = await_ends(pids)
    (work / "ends.json").write_text(json.dumps(ends))


def await_ends(pids: dict[tuple[str, int], int]) -> dict[str, int | None]:
    """Exit code of each rank; None for the frozen ones and those that hang: they are killed."""
    ends: dict[str, int | None] = {f"{name}-{rank}": None for name, rank in pids}
    deadline = time.monotonic() + LIMIT_S
    while pids and time.monotonic() < deadline:
        for (name, rank), pid in list(pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[f"{name}-{rank}"] = os.waitstatus_to_exitcode(status)
                del pids[name, rank]
        if all(rank == CASES[name].victim for name, rank in pids):
            break  # only the frozen ones are left
        time.sleep(0.05)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return ends


if __name__ == "__main__":
    main()
