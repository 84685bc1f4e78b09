"""A process that publishes snapshots one after the other, in its own way; run by test_budget.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from evald.trainer.contract import NoSpace
from evald.trainer.publish import NoRoom, publish
from evald.trainer.push import carrier_for

SIZE = 120_000


def build(directory: Path) -> None:
    """Write six files, slowly enough for others to come in between."""
    for part in range(6):
        (directory / f"{part}.safetensors").write_bytes(bytes(SIZE // 6))
        time.sleep(0.001)


def write(how: str, root: Path, scratch: Path, step: int) -> None:
    match how:
        case "sized":
            publish(build, root, step, size_bytes=SIZE)
        case "unsized":
            publish(build, root, step)
        case "run":
            publish(build, root / "run1", step, run="run1")
        case "push":
            carrier = carrier_for(str(root), root=scratch)
            carrier.carry(publish(build, scratch, step, pattern="push_{step}"))


def main(how: str, root: Path, scratch: Path, until: Path) -> None:
    """Go on until ``until`` is there; prints how many were published, and how many refused."""
    published = refused = 0
    step = 1000 * ["sized", "unsized", "run", "push"].index(how)
    while not until.exists():
        step += 1
        try:
            write(how, root, scratch, step)
            published += 1
        except (NoRoom, NoSpace):
            refused += 1
            time.sleep(0.005)
    print(published, refused)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
