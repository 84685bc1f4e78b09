"""One rank of a training job that exports its weights in many ways; torchrun starts two of them.

``export_worker.py WORK [SMALL]``: works in WORK, which has a base model in WORK/base; SMALL is a
file system of one megabyte. What this rank has seen comes into WORK/rank-N.json.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from evald.trainer.contract import ExportError, Ranks
from evald.trainer.export import SnapshotExporter, export_snapshot
from evald.trainer.export.gather import full_tensor
from evald.trainer.ranks import Processes, near_ranks

#: no operation of these jobs takes longer, seconds.
LIMIT_S = 30.0
#: several files for a model of 280 kB.
SHARD_BYTES = 60_000
#: far less than a write on a slow disk.
LETTING_GO_S = 0.2
QUESTIONS = [[10, 20, 30], [40, 50, 60, 70], [80, 90], list(range(100, 140))]
ANSWER_TOKENS = 12


class Opened:
    """Names of the weight files that this process opens for writing."""

    def __init__(self) -> None:
        self.names: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path, _, flags = arguments
            if str(path).endswith(".safetensors") and flags & (os.O_WRONLY | os.O_RDWR):
                self.names.append(Path(path).name)


@contextmanager
def gathered() -> Iterator[list[int]]:
    """Note how many gathered tensors this process holds, whenever one has been gathered."""
    held: list[StorageWeakRef] = []
    counts: list[int] = []
    gather = DTensor.full_tensor

    def watched(tensor: Any, **options: Any) -> Any:
        # gloo's own thread lets go of a result a moment after it has handed it out
        deadline = time.monotonic() + LETTING_GO_S
        while not all(one.expired() for one in held) and time.monotonic() < deadline:
            time.sleep(0.001)
        whole = gather(tensor, **options)
        held[:] = [one for one in held if not one.expired()]
        held.append(StorageWeakRef(whole.untyped_storage()))
        counts.append(len(held))
        return whole

    DTensor.full_tensor = watched
    try:
        yield counts
    finally:
        DTensor.full_tensor = gather


@contextmanager
def slow_disk() -> Iterator[None]:
    """Let each write of weights take long: what it writes from is held as long."""
    write = os.write

    def slow(fd: int, data: Any) -> int:
        if len(data) > 4096:
            time.sleep(2 * LETTING_GO_S)
        return write(fd, data)

    os.write = slow
    try:
        yield
    finally:
        os.write = write


def load(directory: Path, dtype: Any = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def sharded(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model: Any, steps: int, seed: int) -> None:
    """Teach it something: other weights than before, and no near ties in what it answers."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = torch.randint(0, 256, (4, 1)) + torch.arange(16) * 3
        ids %= 256
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model: Any) -> list[Any]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits for ids in QUESTIONS]


def whole_weights(model: Any) -> dict[str, Any]:
    """Every tensor of a model as it is now, the tied ones under one name."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.named_parameters()
    }


def differences(directory: Path, expected: dict[str, Any]) -> list[str]:
    """Names of the tensors that are not, byte for byte, those in the directory."""
    stored: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= load_file(path)
    same = {name for name in stored.keys() & expected.keys() if equal(stored[name], expected[name])}
    return sorted((stored.keys() | expected.keys()) - same)


def equal(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(one, other))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Job:
    """One rank: its scenarios, and what has come of them."""

    def __init__(self, work: Path, small: Path | None) -> None:
        self.root = work / "root"
        self.base = work / "base"
        self.small = small
        self.opened = Opened()
        self.ranks: Ranks = Processes(LIMIT_S)
        self.model = sharded(load(self.base))

    def export(self, weights: Any, step: int, **options: Any) -> Path:
        root: Path = options.pop("root", self.root)
        options.setdefault("max_shard_bytes", SHARD_BYTES)
        options["ranks"] = self.ranks
        self.opened.names.clear()
        return export_snapshot(weights, root, step=step, base_dir=self.base, **options)

    def refused(self, weights: Any, step: int, **options: Any) -> list[str]:
        """Class, reason and sentence of the error that an export must end with."""
        started = time.monotonic()
        try:
            self.export(weights, step, **options)
        except ExportError as error:
            return [
                type(error).__name__,
                error.reason,
                str(error),
                f"{time.monotonic() - started:.3f}",
            ]
        return []

    def names_together(self, directory: Path) -> list[str]:
        """What lies in a directory when every rank is done with it, before any goes on."""
        self.ranks.exchange("done")
        seen = names(directory)
        self.ranks.exchange("seen")
        return seen

    # -- what the ranks are to each other

    def scenario_gather(self) -> Any:
        """Parts of unequal size, in dtypes that gloo knows and does not know."""
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        wrong = []
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            whole = torch.arange(15.0).reshape(5, 3).to(dtype)
            for dim in (0, 1):
                part = whole.chunk(2, dim)[self.ranks.rank]
                tensor = DTensor.from_local(
                    part, mesh, [Shard(dim)], run_check=False, shape=(5, 3), stride=(3, 1)
                )
                keeps = self.ranks.rank == dim
                got = full_tensor(tensor, keep=keeps)
                if not (equal(got, whole) if keeps else got is None):
                    wrong.append(f"{dtype} {dim}")
        return wrong

    def scenario_near(self) -> Any:
        """Rank 1 is shown another directory than rank 0's, as on another host."""
        name = "seen" if self.ranks.rank == 0 else "unseen"
        (self.root.parent / "seen").mkdir(exist_ok=True)
        near = near_ranks(self.ranks, self.root.parent / name)
        return {"host": self.ranks.near, "directory": near}

    # -- snapshots

    def scenario_fsdp(self) -> Any:
        """Both write; whole tensors are held one at a time; the forward pass has left its mark."""
        train(self.model, 10, seed=1)
        before = logits(self.model)
        with gathered() as counts, slow_disk():
            directory = self.export(self.model, 1)
        wrote, held = list(self.opened.names), max(counts)
        expected = whole_weights(self.model)
        train(self.model, 1, seed=2)  # it still can
        after = logits(load(directory)) if self.ranks.rank == 0 else before
        return {
            "wrote": wrote,
            "held": held,
            "differences": differences(directory, expected),
            "logits": max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)),
        }

    def scenario_first(self) -> Any:
        """Only rank 0 writes, and in bf16: the snapshot that engines are asked about."""
        directory = self.export(self.model, 2, writers="first", dtype=torch.bfloat16)
        wrote = list(self.opened.names)
        expected = {name: t.to(torch.bfloat16) for name, t in whole_weights(self.model).items()}
        return {"wrote": wrote, "differences": differences(directory, expected)}

    def scenario_async(self) -> Any:
        """Training goes on while the snapshot is written; a second one waits for the first."""
        exporter = SnapshotExporter(
            self.root,
            base_dir=self.base,
            mode="async",
            ranks=self.ranks,
            max_shard_bytes=SHARD_BYTES,
        )
        expected, futures = [], []
        with gathered() as counts:
            for step in (11, 12):
                expected.append(whole_weights(self.model))
                futures.append(exporter.export(self.model, step))
                train(self.model, 1, seed=step)
        wrong = [
            differences(future.result(LIMIT_S), weights)
            for future, weights in zip(futures, expected, strict=True)
        ]
        exporter.close()
        return {"differences": wrong, "held": max(counts)}

    def scenario_ddp(self) -> Any:
        model = DistributedDataParallel(load(self.base))
        train(model, 2, seed=3)
        directory = self.export(model, 21, writers="first")
        wrote = list(self.opened.names)
        return {"wrote": wrote, "differences": differences(directory, whole_weights(model.module))}

    def scenario_lora(self) -> Any:
        """Merged weights and the adapter, gathered layer by layer."""
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(load(self.base), config)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        train(fully_shard(model), 5, seed=4)
        directory = self.export(model, 22)
        plain = get_peft_model(load(self.base), config)
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        plain.load_state_dict(state)
        loaded = PeftModel.from_pretrained(load(self.base), directory / "adapter")
        pairs = zip(logits(plain), logits(loaded), strict=True)
        return {
            "adapter": max(float((a - b).abs().max()) for a, b in pairs),
            "trained": not torch.equal(logits(plain)[0], logits(load(self.base))[0]),
            "differences": differences(directory, whole_weights(plain.merge_and_unload())),
        }

    # -- failures

    def scenario_failing_writer(self) -> Any:
        """Rank 1 cannot write its files; then it can, and the next export is fine."""
        before = self.names_together(self.root)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        error = self.refused(self.model, 31)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        left = sorted(set(self.names_together(self.root)) - set(before))
        directory = self.export(self.model, 32)
        return {
            "error": error,
            "left": left,
            "differences": differences(directory, whole_weights(self.model)),
        }

    def scenario_full(self) -> Any:
        """A file system that is too small for the weights, and one that becomes it on the way."""
        assert self.small is not None
        need = sum(value.numel() * value.itemsize for value in self.model.parameters())
        ballast = self.small / "ballast"
        seen = []
        for step, room in ((41, -4096), (42, 4096)):  # each shard takes whole pages
            if self.ranks.rank == 0:
                ballast.unlink(missing_ok=True)
                disk = os.statvfs(self.small)
                ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - need - room))
            self.names_together(self.small)
            error = self.refused(self.model, step, root=self.small / "root")
            seen.append({"error": error, "left": self.names_together(self.small / "root")})
        return seen


def reference(directory: Path) -> list[dict[str, Any]]:
    """What transformers makes of a snapshot: greedy answers and log-probabilities."""
    model = load(directory, dtype="auto")
    rows = []
    for ids in QUESTIONS:
        answer = list(ids)
        for _ in range(ANSWER_TOKENS):
            with torch.no_grad():
                answer.append(int(model(input_ids=torch.tensor([answer])).logits[0, -1].argmax()))
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        logprobs = [float(scores[at, token]) for at, token in enumerate(ids[1:])]
        rows.append({"prompt": ids, "answer": answer[len(ids) :], "prompt_logprobs": logprobs})
    return rows


def main() -> None:
    work = Path(sys.argv[1])
    small = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    job = Job(work, small)
    scenarios: list[Callable[[], Any]] = [
        job.scenario_gather,
        job.scenario_near,
        job.scenario_fsdp,
        job.scenario_first,
        job.scenario_async,
        job.scenario_ddp,
        job.scenario_lora,
        job.scenario_failing_writer,
        *([job.scenario_full] if small else []),
    ]
    seen = {}
    for scenario in scenarios:
        started = time.monotonic()
        seen[scenario.__name__.removeprefix("scenario_")] = scenario()
        print(f"{scenario.__name__}: {time.monotonic() - started:.2f} s", flush=True)
    (work / f"rank-{job.ranks.rank}.json").write_text(json.dumps(seen))
    if job.ranks.rank == 0:
        (work / "reference.json").write_text(json.dumps(reference(job.root / "step_2")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
