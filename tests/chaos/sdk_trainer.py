"""A training job that plugs the dispatcher in: it keeps to the budget, and waits or skips."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from evald.staging.digest import content_digest
from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.publish import publish

from .plan import RUN, Action

#: the last records come within this; the run looks after them in any case.
DRAIN_S = 20.0


class OwnExporter:
    """Writes the weights of an action; ``write`` is the trainer's."""

    def __init__(self, root: Path, write: Callable[[Path, Action], None]) -> None:
        self.digest = ""
        self._root = root
        self._write = write

    def export(
        self, weights: Action, step: int, *, final: bool = False, run: str | None = None
    ) -> concurrent.futures.Future[Path]:
        """Publish, and remember the digest."""

        def build(directory: Path) -> None:
            self._write(directory, weights)
            self.digest = content_digest(directory, ".complete")

        future: concurrent.futures.Future[Path] = concurrent.futures.Future()
        try:
            path = publish(build, self._root, step, run=run or RUN, final=final, busy_timeout_s=3.0)
        except Exception as fault:  # noqa: BLE001 - whatever it is belongs to who waits for it
            future.set_exception(fault)
        else:
            future.set_result(path)
        return future

    def close(self, timeout_s: float = 1.0) -> None:
        """Nothing is left to be closed."""


class SdkTrainer:
    """One life of the job; ``say`` is told of each action, as the other trainer tells it."""

    def __init__(
        self,
        root: Path,
        base: Path,
        results: Path,
        *,
        overflow: Literal["skip", "backpressure"],
        write: Callable[[Path, Action], None],
        say: Callable[[int, Action, str, str | None], None],
    ) -> None:
        self._exporter = OwnExporter(root, write)
        self._say = say
        self._evals = EvalDispatcher(
            root,
            first_step=1,
            interval=1,
            base_dir=base,
            run=RUN,
            baseline=False,
            overflow=overflow,
            backpressure_timeout_s=5.0,
            results=results,
            exporter=self._exporter,
        )

    def run(self, actions: list[Action], first: int, pause: Callable[[Action], None]) -> None:
        """Train from action number ``first`` to the end."""
        with self._evals as evals:
            for number, action in enumerate(actions[first:], start=first):
                pause(action)
                self._say(number, action, "begin", None)
                if action is actions[-1]:
                    done = evals.finish(action.step, action)
                else:
                    done = evals.maybe_dispatch(action.step, action)
                published = done.action == "published"
                self._say(number, action, "done", self._exporter.digest if published else None)
                evals.poll()
            evals.drain(DRAIN_S)
