"""The training job of a chaos run: ``python -m chaos.trainer PLAN ROOT OUTSIDE PROGRESS --from I``.

It uses the SDK, or drops directories as trainers without it do. What it did stands in PROGRESS,
one JSON line before and after each action; a later life begins where it is told to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from evald.staging.digest import content_digest
from evald.testing.snapshots import write_snapshot
from evald.trainer.publish import PublishError, end_run, publish, skip, write_request

from .plan import RUN, Action, read_plan

MARKER = ".complete"
#: a full disk is tried again for this long.
_TRY_S, _TRY_AGAIN_S = 10.0, 0.1
#: the trainer waits while there are so many snapshots.
_ROOM = 6


class Trainer:
    """One life of it."""

    def __init__(
        self, root: Path, outside: Path, progress: Path, *, life: int, room_s: float
    ) -> None:
        self._root = root
        self._outside = outside
        self._progress = progress
        self._life = life
        self._room_s = room_s

    def run(self, actions: list[Action], first: int) -> None:
        """Act, from number ``first``, and end the run."""
        for number, action in enumerate(actions[first:], start=first):
            time.sleep(action.pause_s)
            self._wait_for_room()
            if self._life and action.again == "other":
                action.seed += self._life
                action.answer += self._life
            self.say(number, action, "begin")
            self._insist(number, action)
        self._insist_on_the_end(actions[-1].step)
        self.say(len(actions), None, "done")

    def _insist(self, number: int, action: Action) -> None:
        """Act; what cannot be published is skipped; what cannot be said is tried again."""
        give_up = time.monotonic() + _TRY_S
        while True:
            try:
                digest = self._act(action)
            except (OSError, PublishError) as fault:
                if time.monotonic() < give_up:
                    with suppress(OSError):
                        skip(self._root, action.step, "no_space", str(fault)[:200], run=RUN)
                        self.say(number, action, "done", how="skip", digest=None)
                        return
                    time.sleep(_TRY_AGAIN_S)
                    continue
                self.say(number, action, "failed")
                return
            self.say(number, action, "done", digest=digest)
            return

    def _insist_on_the_end(self, last_step: int) -> None:
        give_up = time.monotonic() + _TRY_S
        while True:
            try:
                end_run(self._root, last_step, run=RUN)
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(_TRY_AGAIN_S)
            else:
                return

    def say(self, number: int, action: Action | None, state: str, **more: Any) -> None:
        line = {"number": number, "state": state, "life": self._life}
        if action is not None:
            line |= {"step": action.step, "how": action.how}
            line |= {"seed": action.seed, "answer": action.answer}
        with self._progress.open("a") as file:
            file.write(json.dumps(line | more) + "\n")

    def _wait_for_room(self) -> None:
        give_up = time.monotonic() + self._room_s
        while len(list(self._root.glob("step_*"))) >= _ROOM and time.monotonic() < give_up:
            time.sleep(0.02)

    # --- actions -------------------------------------------------------------------------------

    def _act(self, action: Action) -> str | None:
        """Do it; returns the digest of what was dropped."""
        target = self._root / f"step_{action.step}"
        match action.how:
            case "publish" | "sharded":
                shards = 3 if action.how == "sharded" else 1
                digests: list[str] = []

                def build(directory: Path) -> None:
                    write(directory, action, shards=shards)
                    digests.append(content_digest(directory, MARKER))

                publish(build, self._root, action.step, run=RUN, busy_timeout_s=3.0)
                return digests[0]
            case "plain":
                return self._plain(target, action)
            case "truncated":
                self._plain(target, action, cut=True)
            case "bit_flip":
                self._flipped(target, action)
            case "skip":
                skip(self._root, action.step, "export_failed", "rank 3 is gone", run=RUN)
            case "reuse":
                return self._reuse(action)
            case "storm":
                return self._storm(target, action)
        return None

    def _plain(self, target: Path, action: Action, *, cut: bool = False) -> str:
        (target / MARKER).unlink(missing_ok=True)
        write(target, action)
        if cut:
            with (target / "model.safetensors").open("r+b") as file:
                file.truncate(file.seek(0, os.SEEK_END) // 2)
        digest = content_digest(target, MARKER)
        (target / MARKER).touch()
        return digest

    def _flipped(self, target: Path, action: Action) -> None:
        """Leave a snapshot of which one bit is not as its manifest says."""
        (target / MARKER).unlink(missing_ok=True)
        write(target, action)
        weights = target / "model.safetensors"
        content = bytearray(weights.read_bytes())
        files = {
            weights.name: {
                "size": len(content),
                "xxh3": xxhash.xxh3_64(bytes(content)).hexdigest(),
            }
        }
        content[-1 - action.seed % 1000] ^= 1 << (action.seed % 8)
        weights.write_bytes(content)
        manifest = {"schema": 1, "step": action.step, "run": RUN, "files": files}
        (target / MARKER).write_text(json.dumps(manifest))

    def _reuse(self, action: Action) -> str:
        path = self._outside / f"{action.step}.{self._life}"
        shutil.rmtree(path, ignore_errors=True)
        write(path, action)
        digest = content_digest(path, MARKER)
        request = {"kind": "reuse", "step": action.step, "path": str(path)}
        write_request(self._root, f"reuse_{action.step}", request, run=RUN)
        return digest

    def _storm(self, target: Path, action: Action) -> str:
        """Let the marker come and go."""
        digest = self._plain(target, action)
        for _ in range(40):
            with suppress(FileNotFoundError):  # its point has ended meanwhile
                (target / MARKER).unlink()
                (target / MARKER).touch()
        return digest


def write(directory: Path, action: Action, *, shards: int = 1) -> None:
    """Write the weights of an action."""
    write_snapshot(
        directory,
        seed=action.seed,
        answer=action.answer,
        shards=shards,
        tokenizer=False,
        marker=None,
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("plan", "root", "outside", "progress"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--life", type=int, default=0)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--room-s", type=float, default=1.0)
    args = parser.parse_args()
    trainer = Trainer(args.root, args.outside, args.progress, life=args.life, room_s=args.room_s)
    plan = read_plan(args.plan)
    if plan.sdk is None:
        trainer.run(plan.actions, args.first)
        return
    from .sdk_trainer import SdkTrainer  # noqa: PLC0415 (not every run needs it)

    job = SdkTrainer(
        args.root,
        args.plan.with_name("base"),
        args.results,
        overflow=plan.sdk,
        write=write,
        say=lambda number, action, state, digest: trainer.say(number, action, state, digest=digest),
    )
    job.run(plan.actions, args.first, lambda action: time.sleep(action.pause_s))
    trainer.say(len(plan.actions), None, "done")


if __name__ == "__main__":
    main()
