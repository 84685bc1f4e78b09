"""Checkpoints written as other frameworks write them: real files, one write after the other.

Each ``*_save`` function gives the writes of one save in that framework's order, torn where it does
not write in one go, so that a test can stop after any of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from evald.testing import Tensor, model_tensors, write_safetensors
from evald.testing.snapshots import CONFIG

Write = Callable[[], object]
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@cache
def weights(seed: int) -> dict[str, Tensor]:
    return model_tensors(seed=seed)


def miles_save(root: Path, step: int, seed: int) -> list[Write]:
    at = root / f"step_{step}"
    marker = at / ".complete"
    return [
        partial(at.mkdir, parents=True, exist_ok=True),
        partial(marker.unlink, missing_ok=True),
        *_shards(at, seed),
        *_texts(at, "config.json"),
        *_index(at, seed),
        marker.touch,
    ]


def slime_save(root: Path, step: int, seed: int) -> list[Write]:
    at = root / f"step_{step}"
    rough = ("model-00001.safetensors", "model-00002.safetensors")

    def clear() -> None:
        for path in [*at.glob("*.safetensors"), *at.glob(INDEX)]:
            path.unlink()

    return [
        partial(at.mkdir, parents=True, exist_ok=True),
        clear,
        *_texts(at, "config.json"),
        *_shards(at, seed, rough),
        *(partial(os.replace, at / old, at / new) for old, new in zip(rough, SHARDS, strict=True)),
        *_index(at, seed),
    ]


def prime_rl_save(root: Path, step: int, seed: int) -> list[Write]:
    at = root / "broadcasts" / f"step_{step}"
    return [
        partial(at.mkdir, parents=True, exist_ok=True),
        *_shards(at, seed),
        *_index(at, seed),
        *_texts(at, "config.json"),
        (at / "STABLE").touch,
    ]


def hf_trainer_save(root: Path, step: int, seed: int) -> list[Write]:
    at = root / f"checkpoint-{step}"
    logged = {"loss": float("nan"), "step": step}
    state = json.dumps(
        {"best_metric": None, "global_step": step, "log_history": [logged]}, indent=2
    )
    return [
        partial(at.mkdir, parents=True, exist_ok=True),
        *_texts(at, "config.json", "generation_config.json"),
        *_shards(at, seed),
        *_index(at, seed),
        *_texts(at, "tokenizer.json", "tokenizer_config.json"),
        *_blobs(at, "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"),
        *_torn(at / "trainer_state.json", state + "\n"),
    ]


def verl_save(root: Path, step: int, seed: int) -> list[Write]:
    at = root / f"global_step_{step}"
    model = at / "actor" / "huggingface"
    return [
        partial(model.mkdir, parents=True, exist_ok=True),
        *_blobs(at / "actor", "model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"),
        *_texts(model, "config.json", "tokenizer.json"),
        *_texts(at / "actor", "fsdp_config.json"),
        *_shards(model, seed),
        *_index(model, seed),
        *_blobs(at, "data.pt"),
        *_torn(root / "latest_checkpointed_iteration.txt", str(step), half=0),
    ]


#: preset -> one save, and the directory of a step.
SAVES: dict[str, Callable[[Path, int, int], list[Write]]] = {
    "miles": miles_save,
    "slime": slime_save,
    "prime-rl": prime_rl_save,
    "hf-trainer": hf_trainer_save,
    "verl": verl_save,
}


def save(preset: str, root: Path, step: int, seed: int = 0) -> None:
    """Write all of one checkpoint."""
    for write in SAVES[preset](root, step, seed):
        write()


def age(root: Path, seconds: float = 60.0) -> None:
    """Make everything below ``root`` older, as if training had gone on since."""
    for path in sorted(root.rglob("*"), reverse=True):
        status = path.stat()
        os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def _shards(at: Path, seed: int, names: tuple[str, ...] = SHARDS) -> list[Write]:
    """Write each shard beside its place and rename it, as safetensors does."""

    def begin(name: str, part: dict[str, Tensor]) -> None:
        write_safetensors(at / f".tmp-{name[:11]}", part)

    def finish(name: str) -> None:
        (at / f".tmp-{name[:11]}").replace(at / name)

    parts = [(name, _part(seed, number)) for number, name in enumerate(names)]
    return [w for name, part in parts for w in (partial(begin, name, part), partial(finish, name))]


def _part(seed: int, number: int) -> dict[str, Tensor]:
    tensors = weights(seed)
    return {name: tensors[name] for name in list(tensors)[number :: len(SHARDS)]}


def _index(at: Path, seed: int) -> list[Write]:
    places = {name: SHARDS[number] for number in (0, 1) for name in _part(seed, number)}
    return _torn(at / INDEX, json.dumps({"metadata": {}, "weight_map": places}, indent=2))


def _torn(path: Path, text: str, half: int | None = None) -> list[Write]:
    half = len(text) // 2 if half is None else half
    return [partial(path.write_text, text[:half]), partial(path.write_text, text)]


def _texts(at: Path, *names: str) -> list[Write]:
    content: dict[str, Any] = {"config.json": CONFIG}
    return [
        partial((at / name).write_text, json.dumps(content.get(name, {}), indent=1))
        for name in names
    ]


def _blobs(at: Path, *names: str) -> list[Write]:
    return [partial((at / name).write_bytes, os.urandom(1000)) for name in names]
