"""Evaluate a step on the training job's own engines: pause, ask, wait, resume.

evald never loads weights into engines that it shares. The trainer says which weight version they
have; a change before the point is done gives ``skipped_version_changed``, never a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evald.point import SHARED
from evald.results.follow import Follower
from evald.trainer.publish import write_request

_POLL_S = 0.1


@contextlib.contextmanager
def paused(pause: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """Keep the producer of training requests still; ``resume`` is called whatever happens.

    ``pause`` returns when no training request is under way any more; if it raises, ``resume`` is
    called all the same, as the producer may be half paused.
    """
    try:
        pause()
        yield
    finally:
        resume()


def shared_eval(
    root: str | os.PathLike[str],
    step: int,
    weight_version: str,
    *,
    results: str | os.PathLike[str],
    pause: Callable[[], None],
    resume: Callable[[], None],
    timeout_s: float,
    run: str | None = None,
) -> dict[str, Any] | None:
    """Block until evald has measured ``step`` on shared engines; return its terminal record.

    ``root``: the staging root; ``results``: the ledger, ``results.jsonl``. ``weight_version``: what
    every engine must report. ``pause`` and ``resume`` stop and start the producer of training
    requests; ``resume`` is called whatever happens. Training waits at most ``timeout_s``: then the
    request is taken back if evald has not read it yet, and None is returned.
    """
    with Follower(Path(results)) as follower:
        for line in follower.read():
            record = json.loads(line)
            if _answers(record, step, weight_version, run) and record["outcome"] != "skipped":
                return dict(record)  # evald measures the same weights of a step only once
        return _ask(root, step, weight_version, follower, paused(pause, resume), timeout_s, run)


def _ask(
    root: str | os.PathLike[str],
    step: int,
    weight_version: str,
    follower: Follower,
    producer: contextlib.AbstractContextManager[None],
    timeout_s: float,
    run: str | None,
) -> dict[str, Any] | None:
    with producer:
        request = write_request(
            root,
            f"shared_{step}",
            {"kind": "shared", "step": step, "weight_version": weight_version},
            run=run,
        )
        try:
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                for line in follower.read():
                    record = json.loads(line)
                    if _answers(record, step, weight_version, run):
                        return dict(record)
                time.sleep(_POLL_S)
        finally:
            request.unlink(missing_ok=True)
        return None


def _answers(record: dict[str, Any], step: int, weight_version: str, run: str | None) -> bool:
    return (
        record.get("type") == "point"
        and record.get("step") == step
        and record.get("fingerprint") == SHARED + weight_version
        and run in {None, record.get("run")}
    )
