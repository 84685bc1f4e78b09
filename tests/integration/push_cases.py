"""Snapshots to push, and ends of a push to which something happens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from far_host import FarHost

from evald.testing import write_snapshot
from evald.trainer.publish import publish
from evald.trainer.push import PushCarrier, carrier_for
from evald.trainer.push.far import Where
from evald.trainer.push.manifest import SourceFile
from evald.trainer.push.plan import Parcel
from evald.trainer.push.rsync import RsyncFar


def carrier(far: FarHost, spool: Path, root: Path, **settings: Any) -> PushCarrier:
    return carrier_for(far.destination(root), root=spool, ssh=far.ssh, **settings)


def export(
    spool: Path, step: int = 3, *, seed: int = 1, big_bytes: int = 0, marker: str = ".complete"
) -> Path:
    """Publish a small model, with modes and folders as trainers write them."""

    def build(directory: Path) -> None:
        write_snapshot(directory, seed=seed, shards=3, marker=None)
        (directory / "adapter").mkdir()
        (directory / "adapter" / "weights ü.bin").write_bytes(os.urandom(70_000))
        (directory / "linked").symlink_to("config.json")
        for name in ("#x", ";x", "adapter/#x", "-x", " x"):  # signs that rsync has other uses for
            (directory / name).write_text(name)
        if big_bytes:
            (directory / "big.bin").write_bytes(os.urandom(big_bytes))

    return publish(build, spool, step, marker=marker)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name[0] != ".")


def hidden(root: Path) -> list[Path]:
    return sorted(root.glob(".*"))


def nothing(_parcel: Parcel) -> None:
    """Happens by default."""


class Meddling(RsyncFar):
    """A far end to which something happens before files are sent or checked."""

    before_send: Callable[[Parcel], None] = staticmethod(nothing)
    before_check: Callable[[Parcel], None] = staticmethod(nothing)

    def send(
        self, parcel: Parcel, files: Sequence[SourceFile], deadline: float, *, again: bool
    ) -> None:
        self.before_send(parcel)
        super().send(parcel, files, deadline, again=again)

    def differences(self, parcel: Parcel, where: Where, deadline: float) -> set[str]:
        self.before_check(parcel)
        return super().differences(parcel, where, deadline)


def meddling(far: FarHost, spool: Path, root: Path) -> tuple[Meddling, PushCarrier]:
    end = Meddling(far.host, str(root), streams=2, ssh=far.ssh)
    return end, PushCarrier(end, root=spool)


def board(root: Path, beat: int, *steps: int) -> None:
    """Write the status of a daemon that has these steps running."""
    running = [
        {"run": "r", "step": n, "revision": 0, "kind": "step", "state": "x", "since_s": 1}
        for n in steps
    ]
    status = {"version": "1", "pid": 1, "beat": beat, "time": 1, "uptime_s": 1, "state": "serving"}
    status |= {"run": "r", "results": "/r", "cap": 2, "running": running}
    (root / ".evald").mkdir(exist_ok=True)
    fresh = root / ".evald" / "new"
    fresh.write_text(json.dumps(status))
    fresh.replace(root / ".evald" / "status.json")
