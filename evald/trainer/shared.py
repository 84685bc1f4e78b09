"""Evaluate a step on the training job's own engines: pause, ask, wait, resume.

evald never loads weights into engines that it shares. The trainer says which weight version they
have; a change before the point is done gives ``skipped_version_changed``, never a number.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evald.point import SHARED
from evald.trainer.contract import Link
from evald.trainer.links.file_link import FileLink
from evald.trainer.publish import write_request
from evald.trainer.values import step_number, wait_seconds

_POLL_S = 0.1
#: gives a request to evald, by name and content; what it returns takes it back, if it still can.
Post = Callable[[str, dict[str, Any]], Callable[[], None]]


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
    results: str | os.PathLike[str] | Link,
    pause: Callable[[], None],
    resume: Callable[[], None],
    timeout_s: float,
    run: str | None = None,
    post: Post | None = None,
) -> dict[str, Any] | None:
    """Block until evald has measured ``step`` on shared engines; return its terminal record.

    ``root``: the staging root; ``results``: the ledger, ``results.jsonl``, or a link to the daemon.
    ``weight_version``: what every engine must report. ``pause`` and ``resume`` stop and start the
    producer of training requests; ``resume`` is called whatever happens. Training waits at most
    ``timeout_s``: then the request is taken back if evald has not read it yet, and None is
    returned. ``post``: another way of giving the request to evald than writing it into ``root``.
    Raises ValueError for wrong arguments.
    """
    step, timeout_s = step_number("step", step), wait_seconds("timeout_s", timeout_s)
    if not isinstance(weight_version, str):
        raise ValueError(  # noqa: TRY004 - wrong arguments are one kind of error
            f"cannot use a {type(weight_version).__name__} as weight_version: give a text, the one "
            "that the engines report"
        )
    with contextlib.ExitStack() as stack:
        if isinstance(results, (str, os.PathLike)):
            link: Link = FileLink(root, results)
            stack.callback(link.close)
        else:
            link = results
        answers = _Ends(link, step, weight_version, run)
        for record in answers.read():
            if record.get("outcome") != "skipped":
                return record  # evald measures the same weights of a step only once
        stack.enter_context(paused(pause, resume))
        give = post or functools.partial(_post, Path(root), run)
        content = {"kind": "shared", "step": step, "weight_version": weight_version}
        stack.callback(give(f"shared_{step}", content))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for record in answers.read():
                return record
            time.sleep(_POLL_S)
    return None


class _Ends:
    """The terminal records of one step on one weight version, as they come."""

    def __init__(self, link: Link, step: int, weight_version: str, run: str | None) -> None:
        self._link = link
        self._step = step
        self._fingerprint = SHARED + weight_version
        self._run = run
        self._seq = 0
        self._restarts = link.restarts

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield what is new; of a ledger that took the other's place, all of it."""
        if self._restarts != self._link.restarts:
            self._restarts, self._seq = self._link.restarts, 0
        while records := self._link.records(self._seq):
            for record in records:
                self._seq = max(self._seq, record["seq"])
                if (
                    record.get("type") == "point"
                    and record.get("step") == self._step
                    and record.get("fingerprint") == self._fingerprint
                    and self._run in {None, record.get("run")}
                ):
                    yield record


def _post(root: Path, run: str | None, name: str, content: dict[str, Any]) -> Callable[[], None]:
    request = write_request(root, name, content, run=run)
    return functools.partial(request.unlink, missing_ok=True)
