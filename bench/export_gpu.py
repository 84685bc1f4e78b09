"""The part of ``export.py --gpu``: weights on a GPU, without transformers, in half a minute.

``stall_over_floor``: what training waits for in async mode, against copying the same tensors into
pinned host memory and nothing else. ``writing_s``: what follows in the background, into /dev/shm,
by number of writing threads.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from evald.trainer.export import SnapshotExporter, lanes
from evald.trainer.export.background import HostBuffer
from evald.trainer.export.pieces import spec_of

#: shapes of a decoder layer, hidden size 2560, as a 4B model has 36 of them.
LAYER = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in LAYER.values())
#: more files than the largest number of writers.
FILES = 16
WRITERS = (1, 2, 4, 8, 16)
#: after so many seconds no further round is begun.
BUDGET_S = 20.0
MAX_ROUNDS = 5


def measure_gpu(shm: Path, size_bytes: int, device: str) -> dict[str, Any]:
    """Measure on ``device`` ("cpu" rehearses it); medians of as many rounds as there is time for.

    Raises SystemExit when a snapshot has other bytes than the weights.
    """
    began = time.monotonic()
    weights = make_weights(size_bytes, device)
    total = sum(tensor.nbytes for tensor in weights.values())
    work = Path(tempfile.mkdtemp(prefix="evald-bench-", dir=shm))
    exporter = SnapshotExporter(
        work, base_dir=None, mode="async", max_shard_bytes=-(-total // FILES)
    )
    floor = HostBuffer()
    floors: list[float] = []
    stalls: list[float] = []
    processors = len(os.sched_getaffinity(0))
    writing: dict[int, list[float]] = {count: [] for count in WRITERS if count <= processors}
    try:
        floor.reserve([spec_of(name, tensor) for name, tensor in weights.items()])
        exporter.prepare(weights)
        one = Exports(work, exporter, weights)
        one.export(max(writing))  # takes the pages of /dev/shm for the first time
        prepared_s = time.monotonic() - began
        while len(stalls) < len(writing) or (
            time.monotonic() - began < prepared_s + BUDGET_S and len(floors) < MAX_ROUNDS
        ):
            floors.append(copied(floor, weights, device))
            for count, took in writing.items():
                stall_s, total_s = one.export(count)
                stalls.append(stall_s)
                took.append(total_s - stall_s)
    finally:
        exporter.close()
        floor.release()
        shutil.rmtree(work)
    writing_s = {str(count): round(statistics.median(took), 3) for count, took in writing.items()}
    floor_s, stall_s = statistics.median(floors), statistics.median(stalls)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "gigabytes": round(total / 1e9, 3),
        "tensors": len(weights),
        "rounds": len(floors),
        "prepared_s": round(prepared_s, 2),
        "floor_s": round(floor_s, 4),
        "floor_gb_per_s": round(total / 1e9 / floor_s, 2),
        "stall_s": round(stall_s, 4),
        "stall_over_floor": round(stall_s / floor_s, 3),
        "writing_s": writing_s,
        "writers_gain": round(writing_s["1"] / min(writing_s.values()), 2),
    }


class Exports:
    """Exports of the same weights, one after the other, each checked and removed."""

    def __init__(self, work: Path, exporter: SnapshotExporter, weights: Mapping[str, Any]) -> None:
        self._work = work
        self._exporter = exporter
        self._weights = weights
        self._step = 0

    def export(self, writers: int) -> tuple[float, float]:
        """Export with so many writing threads; seconds of stall, and until the marker."""
        lanes.MAX_LANES = writers
        self._step += 1
        began = time.perf_counter()
        future = self._exporter.export(self._weights, self._step)
        stall_s = time.perf_counter() - began
        directory = future.result()
        total_s = time.perf_counter() - began
        if self._step == 1:
            self._check(directory)
        shutil.rmtree(directory)
        return stall_s, total_s

    def _check(self, directory: Path) -> None:
        [shard, *_] = sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(shard).items():
            if not torch.equal(tensor, self._weights[name].cpu()):
                raise SystemExit(f"the snapshot's {name} is not what the weights have")


def copied(buffer: HostBuffer, weights: Mapping[str, Any], device: str) -> float:
    """Copy all tensors into host memory, and nothing else; seconds.

    ``buffer`` is the exporter's own kind, pinned on a GPU; the copies here are torch's.
    """
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]
    buffer.clear()
    targets = buffer.copy_all(specs, list(weights.values()))
    buffer.wait()  # (the targets are places in the pinned block from now on)
    began = time.perf_counter()
    for target, tensor in zip(targets, weights.values(), strict=True):
        target.copy_(tensor, non_blocking=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def make_weights(size_bytes: int, device: str) -> dict[str, Any]:
    """Return layers of a 4B model, of about this size altogether, with random values."""
    weights = {}
    for layer in range(max(1, size_bytes // LAYER_BYTES)):
        for name, shape in LAYER.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            weights[f"model.layers.{layer}.{name}.weight"] = tensor.normal_(0, 0.02)
    return weights
