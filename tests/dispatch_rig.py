"""A training job's dispatcher beside a fake daemon, on a clock that tests move by hand."""

from __future__ import annotations

import concurrent.futures
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evald.testing import FakeDaemon
from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.publish import publish


class Clock:
    """Time that passes only in ``sleep``; ``on_sleep`` is called after each."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds
        self.on_sleep()


class FakeExporter:
    """Publishes ``weights`` (text) as a snapshot of one file; ``faults`` are raised, one a call."""

    def __init__(self, root: Path, *, background: bool = False, run: str | None = "r") -> None:
        self.root = root
        self.background = background
        self.run = run
        self.faults: list[BaseException] = []
        #: steps of which somebody wanted the weights.
        self.steps: list[int] = []
        #: exports that the test has to finish: they write when it says so.
        self.pending: list[tuple[concurrent.futures.Future[Path], Callable[[], Path]]] = []
        self.closed = False

    def export(
        self, weights: Any, step: int, *, final: bool = False, run: str | None = None
    ) -> concurrent.futures.Future[Path]:
        self.steps.append(step)
        future: concurrent.futures.Future[Path] = concurrent.futures.Future()
        work = functools.partial(self._write, str(weights), step, final=final, run=run or self.run)
        if self.background:
            self.pending.append((future, work))
            return future
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, ValueError):
                raise fault
            future.set_exception(fault)
        else:
            future.set_result(work())
        return future

    def finish(self) -> None:
        """End the oldest export in the background."""
        future, work = self.pending.pop(0)
        if self.faults:
            future.set_exception(self.faults.pop(0))
        else:
            future.set_result(work())

    def close(self, timeout_s: float = 1.0) -> None:
        assert timeout_s > 0
        self.closed = True

    def _write(self, weights: str, step: int, *, final: bool, run: str | None) -> Path:
        def build(directory: Path) -> None:
            (directory / "model.safetensors").write_text(weights)

        return publish(build, self.root, step, run=run, final=final, busy_timeout_s=0.1)


class Untouchable:
    """Weights that nobody may read, not even their names."""

    def __str__(self) -> str:
        raise AssertionError("the weights were touched")

    def __iter__(self) -> Any:
        raise AssertionError("the weights were touched")


class Job:
    """Directories, a daemon stepped by hand, and dispatchers (lives of the job)."""

    def __init__(self, path: Path, *, cap: int = 2) -> None:
        self.root = path / "root"
        self.results = path / "results"
        self.base = path / "base"
        self.base.mkdir(parents=True)
        (self.base / "model.safetensors").write_text("base")
        self.clock = Clock()
        self.daemon = FakeDaemon(self.root, self.results, cap=cap, base_dir=self.base)
        self.exporter = FakeExporter(self.root)

    def dispatcher(self, **settings: Any) -> EvalDispatcher:
        """Begin a life of the job; 1-based steps, every one of them, unless told otherwise."""
        if not {"interval", "steps", "epoch_steps", "every_minutes"} & set(settings):
            settings["interval"] = 1
        defaults: dict[str, Any] = {
            "first_step": 1,
            "run": "r",
            "base_dir": self.base,
            "results": self.results,
            "exporter": self.exporter,
            "monotonic": self.clock.monotonic,
            "sleep": self.clock.sleep,
        }
        return EvalDispatcher(self.root, **(defaults | settings))

    def words(self) -> dict[str, dict[str, Any]]:
        """Words that nobody has read, by name."""
        paths = [
            *self.root.glob("*.skip"),
            *self.root.glob("*.request"),
            *self.root.glob("run.end"),
        ]
        return {path.name: json.loads(path.read_bytes()) for path in paths}

    def snapshots(self) -> dict[int, str]:
        """Weights of the finished snapshots in the root, by step."""
        return {
            int(marker.parent.name.removeprefix("step_")): (
                marker.parent / "model.safetensors"
            ).read_text()
            for marker in self.root.glob("step_*/.complete")
        }

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a snapshot."""
        content: dict[str, Any] = json.loads(
            (self.root / f"step_{step}" / ".complete").read_bytes()
        )
        return content

    def ends(self) -> list[tuple[int, int, str]]:
        """Step, revision and outcome (or reason) of all terminal records, in their order."""
        return [(p.step, p.revision, p.reason or str(p.outcome)) for p in self.daemon.points()]
