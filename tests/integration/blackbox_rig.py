"""A black box at work, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from evald.config import BlackBox
from evald.engines import guard
from evald.errors import EvalSkip
from evald.point import EvalPoint, PointKey, Snapshot
from evald.postures.blackbox.posture import BlackBoxPosture
from evald.postures.blackbox.samples import BoxSample
from evald.postures.contract import PointResult, SetResult
from evald.results.modes import Modes
from evald.results.pause import Pause

#: a user's module; the snapshot's file "do" says what becomes of the point.
MODULE = """
import asyncio, os, pathlib, signal, subprocess, sys, time
from evald.blackbox import EvalSkip, Point, Results, SetResults


class Box:
    def __init__(self, config):
        self.config = config
        self.points = 0
        self.note("built")
        for what in config.get("start", []):
            getattr(self, what)()

    def note(self, word):
        with open(self.config["notes"], "a") as file:
            file.write(f"{word} {os.getpid()}\\n")

    async def evaluate_checkpoint(self, directory, point):
        assert isinstance(point, Point) and isinstance(directory, pathlib.Path)
        self.points += 1
        self.point = point
        print("evaluating", point.record_id, flush=True)
        for what in (directory / "do").read_text().split():
            found = getattr(self, what)()
            if asyncio.iscoroutine(found):
                found = await found
            if found is not None:
                return found
        sample = {"question": "q1", "score": True, "response": "42", "why": "right"}
        metrics = {"score": 0.5, "pass@4": 0.75, "len": self.points}
        sets = {"math": SetResults(metrics, samples=[sample])}
        return Results(sets, ["mine"], ["r:1:abc:1"], {"judge": "v3"})

    def skip(self): raise EvalSkip("judge_down", "the judge answers 503")
    def odd_skip(self): raise EvalSkip("The judge's down!")
    def crash(self): raise ValueError("no such tokenizer")
    def leave(self): sys.exit(3)
    def kill(self): os.kill(os.getpid(), signal.SIGKILL)
    def kill_later(self): subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {os.getpid()}"])
    async def hang(self): await asyncio.sleep(600)
    def block(self): time.sleep(600)
    def garbage(self): return "0.5"
    def loud(self): print("x" * 300_000); print("last words", file=sys.stderr, flush=True)
    def nan(self): return Results({"math": SetResults({"score": float("nan")})})
    def odd_samples(self):
        return Results({"math": SetResults({"score": 1.0}, samples=[{}, {"response": ["x"]}])})
    def large(self):
        return Results({"math": SetResults({"score": 1.0}, samples=[
            {"question": str(n), "score": n % 2, "response": "y" * 5_000} for n in range(4_000)])})
    def child(self):
        self.note_pid(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    def note_pid(self, pid):
        with open(self.config["notes"], "a") as file:
            file.write(f"child {pid}\\n")
    def keep(self):
        (self.point.output_dir / "mine.txt").write_text("kept")
    async def dispose(self):
        await asyncio.sleep(0)
        self.note("disposed")
"""


class Told:
    """What a posture tells about one point; the snapshot never changes."""

    def __init__(self, sets: list[SetResult]) -> None:
        self._sets = sets

    def state(self, state: str) -> None:
        assert state == "evaluating"

    def set_begins(self, name: str) -> float:
        raise AssertionError(name)

    async def set_done(self, result: SetResult) -> None:
        self._sets.append(result)

    def spare(self) -> None:
        raise AssertionError("nobody waits for an engine")

    async def check_unchanged(self) -> None:
        pass


class Rig:
    """A posture at work, and what its black box has noted."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        (tmp_path / "boxes.py").write_text(MODULE)
        self.tmp_path = tmp_path
        self.notes_file = tmp_path / "notes"
        self.notes_file.touch()
        self.results_dir = tmp_path / "results"
        self.pause = Pause()
        config: dict[str, Any] = {"cwd": str(tmp_path), "stop_grace_s": 5.0, **settings}
        if config["stop_grace_s"] >= 5:  # enough for a child to save its coverage, too
            config.setdefault("pass_env", ["COVERAGE_PROCESS_CONFIG"])
        if "command" not in config:
            config = {"class": "boxes:Box", **config}
            if config["class"].startswith("boxes"):
                config["config"] = {"notes": str(self.notes_file), **config.get("config", {})}
        self.posture = BlackBoxPosture(
            msgspec.convert(config, BlackBox),
            results_dir=self.results_dir,
            modes=Modes(),
            environ=os.environ,
            pause=self.pause,
        )
        self.sets: list[SetResult] = []
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.posture.run(), name="blackbox")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert not self.alive()

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    def point(self, step: int, do: str = "") -> EvalPoint:
        directory = self.tmp_path / f"step_{step}"
        directory.mkdir(exist_ok=True)  # the caller may have written a real snapshot
        (directory / "do").write_text(do)
        snapshot = Snapshot(run="r", step=step, directory=directory, fingerprint="f", size_bytes=1)
        return EvalPoint(PointKey("r", step), snapshot)

    async def evaluate(self, step: int, do: str = "", *, deadline_s: float = 1000.0) -> PointResult:
        return await self.posture.measure(
            self.point(step, do),
            None,
            digest=f"{step:08x}" * 4,
            deadline=asyncio.get_running_loop().time() + deadline_s,
            stages=Told(self.sets),
        )

    async def skipped(self, step: int, do: str = "", **options: Any) -> EvalSkip:
        with pytest.raises(EvalSkip) as caught:
            await self.evaluate(step, do, **options)
        return caught.value

    def notes(self, word: str) -> list[int]:
        lines = (line.split() for line in self.notes_file.read_text().splitlines())
        return [int(pid) for name, pid in lines if name == word]

    def alive(self) -> list[int]:
        pids = {*self.notes("built"), *self.notes("child")}
        stats = {pid: guard.read_stat(pid) for pid in pids}
        return [pid for pid, stat in stats.items() if stat is not None and stat.state != "Z"]

    def samples(self, step: int, name: str = "math") -> list[BoxSample]:
        path = self.results_dir / "samples" / "r" / f"step_{step}.r0" / f"{name}.jsonl"
        decoder = msgspec.json.Decoder(BoxSample)
        return [decoder.decode(line) for line in path.read_bytes().splitlines()]

    def logs(self) -> list[Path]:
        return sorted((self.results_dir / "blackbox").glob("*.log"))
