"""From the marker to verified weights, stage by stage, beside what a load costs at least.

A whole daemon with one engine: real SGLang on the CPU, ``--gpu`` on a GPU, ``--quick`` a fake one.
Two snapshots by turns; in the turns between, the same server is updated directly: ``bare_s`` is an
update and a look at /model_info, as other systems do it, ``bare_checksum_s`` an update and a
checksum. ``floor_s`` copies as many bytes (on a GPU out of pinned memory). All of it alternates.

``ratio``: evald's pin, from the drained engine to proven weights, over ``bare_checksum_s``.
``faster_than_bare``: ``bare_s`` over the pin; ``over_floor``: the pin over ``floor_s``.
``lost_bytes``: memory of the GPU (on a CPU: of the engine's processes) that went between the first
quarter of the pins and the last. Goals: on the CPU ``ratio`` <= 1.3; on an H200 with 8 GB
``faster_than_bare`` >= 3 and ``over_floor`` <= 4, with nothing lost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from daemon_log import events, seconds
from daemon_rig import Rig, rig, until
from engine_server import server_of

from evald.engines.guard import descendants
from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

SHM = "/dev/shm"  # noqa: S108 - where snapshots lie
START_S = 600.0
POINT_S = 120.0
#: of the fake engine.
FAKE_LOAD_S = 0.05
#: of the server updated directly, on a GPU: seconds each, and a GPU's time is dear.
GPU_TURNS = 4
#: times that the floor is measured; on a GPU once, since each is a process that imports torch.
FLOORS = 5
FLEET = """[fleet]
model = "{{model}}"
device = "{device}"
engines = 1
fast_pin = "{fast_pin}"
pass_env = ["PYTHONPATH"]
{more}
"""
#: a model whose load takes longer than a request: 380 MB.
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
MAKE = """
import sys, torch
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from evald.demo import model as demo
for seed, directory in enumerate(sys.argv[2:]):
    torch.manual_seed(seed)
    shape = dict(pair.split("=") for pair in sys.argv[1].split(","))
    config = Qwen3Config(
        vocab_size=demo.VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        tie_word_embeddings=True, eos_token_id=demo.END_ID, pad_token_id=demo.PAD_ID,
        bos_token_id=None, **{name: int(size) for name, size in shape.items()},
    )
    demo.save_model(Qwen3ForCausalLM(config), Path(directory))
"""


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fake engine, 8 pins")
    parser.add_argument("--gpu", action="store_true", help="needs --model and --other")
    parser.add_argument("--model", type=Path, help="base model; its folder is on /dev/shm")
    parser.add_argument("--other", type=Path, help="the same model with other weights")
    parser.add_argument("--pins", type=int, default=None, help="50")
    parser.add_argument("--fast-pin", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--fleet", default="", help="more lines for [fleet] and below it")
    parser.add_argument(
        "--budget-s", type=float, default=3600.0, help="no pin begins so long after the first"
    )
    parser.add_argument(
        "--then", default="", help="command for the same daemon, after the figures; {config}: its"
    )
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="evald-bench-", dir=SHM))
    try:
        figures = Bench(args, work).run()
    finally:
        shutil.rmtree(work)
    print(json.dumps(figures))
    return 0


class Bench:
    """One daemon, and what is done to it."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args = args
        self._work = work
        self._pins = args.pins or (8 if args.quick else 50)
        self._device = "cuda" if args.gpu else "cpu"
        #: two snapshots of the same model, and the base.
        self._sources: list[Path] = []
        self._size = 0
        #: seconds by stage, of each pin.
        self._stages: list[dict[str, float]] = []
        self._bare: list[float] = []
        self._bare_checksum: list[float] = []
        self._floor: list[float] = []
        self._used: list[int] = []

    def run(self) -> dict[str, Any]:
        """Measure; the figures."""
        python, base = self._prepare()
        fleet = FLEET.format(
            device=self._device, fast_pin=self._args.fast_pin, more=self._args.fleet
        )
        if python is not None:
            fleet += f'python = "{python}"\n'
        began = time.monotonic()
        with rig(self._work, model=base, posture=fleet, questions=1) as r:
            r.start()
            until(lambda: r.status()["engines"][0]["state"] == "ready", "the engine", START_S)
            ready = time.monotonic()
            print(f"ready after {ready - began:.1f} s", flush=True)
            for step in range(self._pins):
                if time.monotonic() > ready + self._args.budget_s:
                    break
                self._stages.append(self._pin(r, step))
                self._used.append(self._memory(r))
                if step < GPU_TURNS or not self._args.gpu:
                    self._directly(r, step)
            told = {"fast_pin", "pin_memory_leak"}
            chosen = [line for line in events(r.log()) if line["event"] in told]
            figures = {**self._figures(), "ready_s": round(ready - began, 1), "loader": chosen}
            if self._args.then:
                print(json.dumps(figures), flush=True)
                command = self._args.then.replace("{config}", str(r.config))
                subprocess.run(shlex.split(command), check=True)
        return figures

    def _prepare(self) -> tuple[Path | None, Path | None]:
        """Make or find the models; a fake engine's interpreter, and the base model."""
        if self._args.quick:
            python = write_fake_python(self._work / "python", load_s=FAKE_LOAD_S)
            self._sources = [
                write_snapshot(self._work / f"source_{i}", seed=i, answer=i, marker=None)
                for i in range(2)
            ]
            base = None
        elif self._args.gpu:
            python, base = None, self._args.model
            self._sources = [self._args.other, self._args.model]
        else:
            python, base = None, self._work / "model_0"
            self._sources = [self._work / "model_1", base]
            shape = ",".join(f"{name}={size}" for name, size in SHAPE.items())
            command = [sys.executable, "-W", "ignore", "-c", MAKE, shape, str(base)]
            subprocess.run([*command, str(self._sources[0])], check=True)
        shards = self._sources[0].glob("*.safetensors")
        self._size = sum(shard.stat().st_size for shard in shards)
        return python, base

    def _pin(self, r: Rig, step: int) -> dict[str, float]:
        """Drop a snapshot; seconds of each stage until it is proven."""
        directory = r.root / f"step_{step}"
        # links: evald deletes its own names only
        shutil.copytree(self._sources[step % 2], directory, copy_function=os.link)
        before = len(r.log())
        dropped = time.time()
        (directory / ".complete").touch()
        point = r.point(step, timeout_s=POINT_S)
        if point.outcome != "ok":
            raise SystemExit(
                f"step {step} ended {point.outcome}: {point.detail}\n{r.log()[-3000:]}"
            )
        lines = list(events(r.log()[before:]))
        at = {line["new"]: seconds(line) for line in lines if line["event"] == "engine_state"}
        [pinned] = [line for line in lines if line["event"] == "engine_pinned"]
        parts = {key: value for key, value in pinned.items() if key.endswith("_s")}
        return {
            "marker_to_verified_s": seconds(pinned) - dropped,
            "validate_s": point.timings.validate_s,
            "wait_s": point.timings.queued_s,
            "prepare_and_hash_s": point.timings.prepare_s,
            "drain_s": point.timings.pin_s - (seconds(pinned) - at["pinning"]),
            "load_and_prove_s": seconds(pinned) - at["pinning"],
            **parts,
        }

    def _directly(self, r: Rig, step: int) -> None:
        """Do to the engine's server what others do, each with the same work before it."""
        server = server_of(r.status()["engines"][0]["pid"])
        for turn in range(2):
            other = str(self._sources[(step + 1 + turn) % 2])
            began = time.perf_counter()
            server.ask("/update_weights_from_disk", update(other, f"bare-{step}-{turn}"))
            if (step + turn) % 2:
                server.ask("/model_info")
                self._bare.append(time.perf_counter() - began)
            else:
                server.ask("/weights_checker", {"action": "checksum", "selector": "target"})
                self._bare_checksum.append(time.perf_counter() - began)
        if step < (1 if self._args.gpu else FLOORS):
            self._floor.append(self._copy())

    def _copy(self) -> float:
        """Measure the floor in a process of its own, which needs torch on a GPU only."""
        if self._device == "cpu":
            source = bytearray(os.urandom(1 << 20)) * (self._size // (1 << 20) + 1)
            target = bytearray(source)
            began = time.perf_counter()
            target[:] = source
            return time.perf_counter() - began
        command = [sys.executable, str(Path(__file__).with_name("fast_load.py")), "--floor"]
        command += ["--gigabytes", str(self._size / 1e9)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout.splitlines()[-1])["floor_s"])

    def _memory(self, r: Rig) -> int:
        """Return bytes that the GPU has given away, or that the engine's processes have."""
        if self._device == "cuda":
            command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return int(done.stdout.splitlines()[0]) << 20
        pid = int(r.status()["engines"][0]["pid"])
        return sum(resident(p) for p in [pid, *descendants(pid)])

    def _figures(self) -> dict[str, Any]:
        stages = {name: median([pin[name] for pin in self._stages]) for name in self._stages[0]}
        pin_s = stages["load_and_prove_s"]
        bare_s, checksum_s = median(self._bare), median(self._bare_checksum)
        quarter = max(1, len(self._used) // 4)
        early, late = self._used[1 : 1 + quarter], self._used[-quarter:]
        return {
            "name": "pin",
            "device": self._device if not self._args.quick else "fake",
            "megabytes": round(self._size / 1e6, 1),
            "pins": len(self._stages),
            "stages": {name: round(value, 4) for name, value in stages.items()},
            "bare_s": round(bare_s, 4),
            "bare_checksum_s": round(checksum_s, 4),
            "floor_s": round(median(self._floor), 5),
            "ratio": round(pin_s / checksum_s, 3),
            "faster_than_bare": round(bare_s / pin_s, 3),
            "over_floor": round(pin_s / median(self._floor), 2),
            "lost_bytes": int(median(late) - median(early)) if early else 0,
        }


def update(directory: str, version: str) -> dict[str, Any]:
    """Return the body of an update with SGLang's own loader."""
    return {"model_path": directory, "weight_version": version, "load_format": "auto"}


def resident(pid: int) -> int:
    """Return a process's share of memory, in bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def median(values: list[float] | list[int]) -> float:
    """Return the median."""
    return float(statistics.median(values))


if __name__ == "__main__":
    raise SystemExit(main())
