"""What an export costs training: seconds of stall and of writing into /dev/shm, sync and async.

Beside each other, in one run and pair by pair: one plain copy of the weights into memory that is
just as warm, plain writes of them into one file, ``save_pretrained`` (no hashes), and evald's
exporter (hashes and a manifest). The last line is JSON; of several sizes it shows the worse ratio.
Ratios of writes are of the fastest ones: what a page of /dev/shm costs the kernel differs by a
factor of three within a minute, for plain writes as well.

``--gpu``: the weights are on a GPU, see ``export_gpu.py``; ``--gpu --device cpu`` rehearses it.

Goal: a stall of at most 1.2 times the copy alone, on the CPU and from a GPU; an export of at most
1.2 times ``save_pretrained``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from export_gpu import measure_gpu

from evald.trainer.export import SnapshotExporter
from evald.trainer.export.available import available_bytes
from evald.trainer.export.pieces import spec_of
from evald.trainer.export.shards import WHOLE, content, header

SHM = Path("/dev/shm")  # noqa: S108 - where snapshots lie
VOCABULARY, HIDDEN, FFN, HEAD = 16_000, 2048, 6144, 128
#: the model, the copy's target, the exporter's memory and one snapshot at a time, and some more.
TIMES_THE_SIZE = 4.5


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 MB instead of 1 GB and 4 GB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--gpu", action="store_true", help="from GPU memory; half a minute")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="with --gpu")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="with --gpu")
    args = parser.parse_args()
    if args.gpu:
        gpu = measure_gpu(SHM, int(args.gigabytes * 1e9), args.device)
        print(json.dumps({"name": "export", "cpus": os.cpu_count(), **gpu}))
        return 0
    warnings.simplefilter("ignore")
    rows = []
    for size_bytes in [256 << 20] if args.quick else [1 << 30, 4 << 30]:
        lack = shortage(size_bytes)
        if lack:
            print(f"{size_bytes / 1e9:.2f} GB: left out, {lack}")
            continue
        work = Path(tempfile.mkdtemp(prefix="evald-bench-", dir=SHM))
        try:
            rows.append(measure(work, size_bytes, args.repeats))
        finally:
            shutil.rmtree(work)
        print(json.dumps(rows[-1]))
    figures: dict[str, Any] = {"name": "export", "cpus": os.cpu_count(), "sizes": rows}
    for name in ("stall_over_copy", "export_over_save_pretrained", "export_over_write"):
        figures[name] = max((row[name] for row in rows), default=None)
    print(json.dumps(figures))
    return 0 if rows else 1


def measure(work: Path, size_bytes: int, repeats: int) -> dict[str, Any]:
    """Time everything ``repeats`` times, side by side; return medians and medians of ratios."""
    model = build_model(size_bytes)
    bench = Bench(work, model)
    runs = {
        "copy_s": bench.copy,
        "stall_s": bench.asynchronous,
        "write_s": bench.write,
        "save_pretrained_s": bench.save_pretrained,
        "sync_s": bench.synchronous,
    }
    for run in runs.values():  # warms all memory
        run()
    bench.in_background_s.clear()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs) if repeat % 2 else list(reversed(runs))
        for name in names:
            times[name].append(runs[name]())
    bench.close()
    row: dict[str, Any] = {
        "gigabytes": round(bench.size_bytes / 1e9, 3),
        "tensors": len(bench.tensors),
        "repeats": repeats,
        **{name: round(statistics.median(values), 4) for name, values in times.items()},
        "async_total_s": round(statistics.median(bench.in_background_s), 4),
        "stall_over_copy": ratio(times["stall_s"], times["copy_s"]),
        "export_over_save_pretrained": round(
            min(times["sync_s"]) / min(times["save_pretrained_s"]), 3
        ),
        "export_over_write": round(min(times["sync_s"]) / min(times["write_s"]), 3),
    }
    return row


class Bench:
    """One model, and each way to get its weights out of the way; seconds that training stood."""

    def __init__(self, work: Path, model: Any) -> None:
        self._work = work
        self._model = model
        self.tensors = [tensor.detach() for tensor in model.parameters()]
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._target = torch.zeros(self.size_bytes, dtype=torch.uint8).fill_(1)
        base = write_base(work / "base", model)
        self._sync = SnapshotExporter(work, base_dir=base)
        self._async = SnapshotExporter(work, base_dir=base, mode="async")
        self._async.prepare(model)
        self._step = 0
        #: seconds from the call to the marker, of each asynchronous export.
        self.in_background_s: list[float] = []

    def close(self) -> None:
        """Let go of the exporters' memory."""
        self._sync.close()
        self._async.close()

    def copy(self) -> float:
        """Copy the same tensors, and do nothing else."""
        started = time.perf_counter()
        offset = 0
        for tensor in self.tensors:
            end = offset + tensor.nbytes
            self._target[offset:end].copy_(tensor.view(-1).view(torch.uint8))
            offset = end
        return time.perf_counter() - started

    def asynchronous(self) -> float:
        """Export in async mode: return the stall, once the rest of it has ended, too."""
        self._step += 1
        started = time.perf_counter()
        future = self._async.export(self._model, self._step)
        stall_s = time.perf_counter() - started
        directory = future.result()
        self.in_background_s.append(time.perf_counter() - started)
        shutil.rmtree(directory)
        return stall_s

    def write(self) -> float:
        """Write the same bytes into one file, and do nothing else."""
        (self._work / "plain").mkdir()
        return self._timed(self._write_all, "plain")

    def _write_all(self) -> None:
        with (self._work / "plain" / "all").open("wb", buffering=0) as file:
            for tensor in self.tensors:
                rest = content(tensor)
                while rest:
                    rest = rest[file.write(rest) :]

    def save_pretrained(self) -> float:
        """Do what a trainer does without evald."""
        return self._timed(lambda: self._model.save_pretrained(self._work / "saved"), "saved")

    def synchronous(self) -> float:
        """Export in sync mode."""
        self._step += 1
        name = f"step_{self._step}"
        return self._timed(lambda: self._sync.export(self._model, self._step).result(), name)

    def _timed(self, action: Callable[[], object], name: str) -> float:
        started = time.perf_counter()
        action()
        took = time.perf_counter() - started
        shutil.rmtree(self._work / name)
        return took


def build_model(size_bytes: int) -> Any:
    """Return a Qwen3 model in bfloat16 of about this size, with some values or other."""
    with warnings.catch_warnings():
        # CPU mode has an old torchvision beside a newer torch; nothing here looks at images
        warnings.simplefilter("ignore")
        from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 (--gpu goes without)
        from transformers.utils import logging  # noqa: PLC0415 (as above)
    logging.disable_progress_bar()
    layer = (2 * HIDDEN + 2 * HIDDEN) * HIDDEN + 3 * FFN * HIDDEN
    layers = max(1, (size_bytes // 2 - 2 * VOCABULARY * HIDDEN) // layer)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=HIDDEN // HEAD,
        head_dim=HEAD,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    noise = torch.randn(1 << 20).to(torch.bfloat16)
    for tensor in model.parameters():
        flat = tensor.data.view(-1)
        for start in range(0, len(flat), len(noise)):
            part = flat[start : start + len(noise)]
            part.copy_(noise[: len(part)])
    return model


def write_base(directory: Path, model: Any) -> Path:
    """Write a base model whose weights are a hole: only their names and shapes are ever read."""
    directory.mkdir()
    model.config.save_pretrained(directory)
    specs = [spec_of(name, tensor) for name, tensor in model.state_dict().items()]
    head = header(specs)
    weights = directory / WHOLE
    weights.write_bytes(head)
    os.truncate(weights, len(head) + sum(spec.size_bytes for spec in specs))
    return directory


def shortage(size_bytes: int) -> str:
    """Say why a size cannot be measured here; empty when it can."""
    need = int(size_bytes * TIMES_THE_SIZE)
    memory, disk = available_bytes(), shutil.disk_usage(SHM).free
    if memory is not None and memory < need:
        return f"as {need / 1e9:.1f} GB of memory are needed and {memory / 1e9:.1f} GB available"
    if disk < 2 * size_bytes:
        return f"as {SHM} has {disk / 1e9:.1f} GB free"
    return ""


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the pairs' ratios."""
    pairs = zip(ours, theirs, strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


if __name__ == "__main__":
    raise SystemExit(main())
