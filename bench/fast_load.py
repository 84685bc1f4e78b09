"""Evald's loader alone, without SGLang and without evald's dependencies: torch and safetensors do.

Reads a snapshot into parameters on the device, as an update does: by SGLang's way (threads that map
files, one copy for each tensor), by evald's reader, and, as the floor, copies as many bytes out of
memory that is pinned already (on a CPU: plain copies). Then reads it ``--loads`` times and looks at
the memory that is left. ``ratio``: SGLang's way over evald's; ``over_floor``: evald's over the
floor; ``equal``: all bytes arrived; ``lost_bytes``: memory of the device that the loads after the
first have cost. Goal on an H200 for 8 GB: at least 4, at most 2, true, 0. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# runs from a checkout that is not installed, too
sys.path.insert(0, str(Path(__file__).parents[1]))
from evald.engine_plugin.evald_fast_load.reader import default_threads, read_tensors

SHM = "/dev/shm"  # noqa: S108 - where snapshots lie
#: as in a 4B model: an embedding, and layers of matrices and vectors.
HIDDEN, FFN, VOCABULARY = 2560, 9728, 151_936
SHARD_BYTES = 2 << 30
FLOOR_BYTES = 1 << 30
Tensors = dict[str, torch.Tensor]


def main() -> int:
    """Run the bench; the exit code is 1 when bytes differ or memory is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="0.3 GB and 10 loads")
    parser.add_argument("--gigabytes", type=float, default=None, help="8, on a CPU 1")
    parser.add_argument("--loads", type=int, default=None, help="50")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--budget-s", type=float, default=600.0, help="no further load after it")
    parser.add_argument("--floor", action="store_true", help="nothing but the floor")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 1e9 * (args.gigabytes or (0.3 if args.quick else 8 if device.type == "cuda" else 1))
    if args.floor:
        print(json.dumps({"name": "floor", "floor_s": round(floor(int(size), device), 5)}))
        return 0
    deadline = time.monotonic() + args.budget_s
    work = Path(tempfile.mkdtemp(prefix="evald-bench-", dir=SHM))
    try:
        paths = write_shards(work, size, device)
        print(
            f"{len(paths)} shards, {args.budget_s + time.monotonic() - deadline:.1f} s", flush=True
        )
        loads = args.loads or (10 if args.quick else 50)
        # as in SGLang's scheduler
        with torch.inference_mode():
            figures = measure(paths, device, loads, args.threads, deadline)
    finally:
        shutil.rmtree(work)
    print(json.dumps(figures))
    return 0 if figures["equal"] and figures["lost_bytes"] <= 0 else 1


def write_shards(work: Path, size: float, device: torch.device) -> list[Path]:
    """Write random tensors of the shapes of a model; several files at a time."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)} if size > SHARD_BYTES else {}
    layer = 0
    while sum(2 * rows * columns for rows, columns in shapes.values()) < size:
        for name, shape in {
            "mlp.down_proj": (HIDDEN, FFN),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "norm": (1, HIDDEN),
            "q_proj": (HIDDEN, HIDDEN),
        }.items():
            shapes[f"model.layers.{layer:03d}.{name}.weight"] = shape
        layer += 1
    shards: list[Tensors] = [{}]
    generator = torch.Generator(device).manual_seed(1)
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        bits = torch.randint(-30_000, 30_000, shape, generator=generator, device=device)
        shards[-1][name] = bits.to(torch.int16).view(torch.bfloat16).cpu()
        del bits
    paths = [work / f"model-{number:05d}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_file, shards, paths))
    return paths


def measure(
    paths: list[Path], device: torch.device, loads: int, threads: int, deadline: float
) -> dict[str, Any]:
    """Time each way, compare the bytes, and load again and again."""
    parameters = {
        name: torch.empty_like(tensor, device=device) for name, tensor in sglangs_way(paths)
    }
    size = sum(tensor.nbytes for tensor in parameters.values())

    def fast() -> Iterator[tuple[str, torch.Tensor]]:
        return read_tensors(paths, device=device, threads=threads)

    plain_s, fast_s, floor_s = [], [], []
    load(parameters, lambda: sglangs_way(paths), device)  # (nothing is new to it any more)
    first_fast_s = load(parameters, fast, device)
    for _ in range(3):
        plain_s.append(load(parameters, lambda: sglangs_way(paths), device))
        fast_s.append(load(parameters, fast, device))
        floor_s.append(floor(size, device))
    for tensor in parameters.values():
        tensor.zero_()
    load(parameters, fast, device)
    equal = all(
        torch.equal(parameters[name].view(torch.int16), tensor.to(device).view(torch.int16))
        for name, tensor in sglangs_way(paths)
    )
    figures = {
        "name": "fast_load",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gigabytes": round(size / 1e9, 3),
        "threads": threads,
        "plain_s": round(statistics.median(plain_s), 4),
        "fast_s": round(statistics.median(fast_s), 4),
        "first_fast_s": round(first_fast_s, 4),
        "floor_s": round(statistics.median(floor_s), 4),
        "ratio": round(statistics.median(plain_s) / statistics.median(fast_s), 3),
        "over_floor": round(statistics.median(fast_s) / statistics.median(floor_s), 3),
        "gigabytes_per_s": round(size / statistics.median(fast_s) / 1e9, 2),
        "equal": equal,
    }
    print(json.dumps(figures), flush=True)
    used: list[tuple[int, int]] = []
    many_s: list[float] = []
    while not many_s or (len(many_s) < loads and time.monotonic() < deadline):
        many_s.append(load(parameters, fast, device))
        used.append(memory(device))
    lost = max(used[-1][i] - used[0][i] for i in range(2)) if device.type == "cuda" else 0
    return {
        **figures,
        "loads": len(many_s),
        "many_s": [round(min(many_s), 4), round(max(many_s), 4)],
        "used_bytes": [used[0], used[-1]],
        "lost_bytes": lost,
    }


def load(
    parameters: Tensors,
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    device: torch.device,
) -> float:
    """Do what an update does; seconds. Torch's cache is emptied at both ends, as by SGLang."""
    began = settled(device)
    for name, tensor in tensors():
        parameters[name].copy_(tensor)
        del tensor
    return settled(device) - began


def settled(device: torch.device) -> float:
    """Wait for the device; the time then."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return time.perf_counter()


def sglangs_way(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read as SGLang's default loader does: threads map the files, and the caller copies."""

    def one(path: Path) -> Tensors:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict

    with ThreadPoolExecutor(8) as pool:
        for shard in pool.map(one, paths):
            for name in sorted(shard):
                yield name, shard[name]


def floor(size: int, device: torch.device) -> float:
    """Copy as many bytes out of memory that is ready for it; seconds."""
    pinned = device.type == "cuda"
    chunk = min(size, FLOOR_BYTES)
    source = torch.ones(chunk, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(chunk, dtype=torch.uint8, device=device)
    target.copy_(source)
    began = settled(device)
    for done in range(0, size, chunk):
        part = min(chunk, size - done)
        target[:part].copy_(source[:part], non_blocking=True)
    return settled(device) - began


def memory(device: torch.device) -> tuple[int, int]:
    """Return what tensors have of the device, and what the device has given away at all."""
    if device.type == "cpu":
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


if __name__ == "__main__":
    raise SystemExit(main())
