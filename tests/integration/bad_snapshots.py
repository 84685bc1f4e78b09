"""The bad snapshots of the world, one builder each; used with fake and with real engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from evald.testing import Tensor, model_tensors, write_safetensors, write_snapshot

#: writes tensors as a checkpoint directory without its marker.
Write = Callable[..., Path]


class Bad(NamedTuple):
    """``build(directory)`` leaves a bad snapshot without marker; the record says ``words``."""

    build: Callable[[Path], None]
    reason: str
    words: str


def _good(directory: Path, **settings: Any) -> None:
    write_snapshot(directory, marker=None, **settings)


def truncated_shard(directory: Path) -> None:
    _good(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 5000)


def garbage_header(directory: Path) -> None:
    _good(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 64)


def missing_tensor(directory: Path) -> None:
    tensors = model_tensors()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    _good(directory, tensors=tensors)


def wrong_shape(directory: Path) -> None:
    tensors = model_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    dtype, (rows, columns), data = tensors[name]
    tensors[name] = Tensor(dtype, (rows // 2, columns), data[: len(data) // 2])
    _good(directory, tensors=tensors)


def stray_shard(directory: Path) -> None:
    _good(directory, shards=2)
    extra = {"model.extra": Tensor("BF16", (2,), b"\0" * 4)}
    write_safetensors(directory / "model-00003-of-00003.safetensors", extra)


def index_names_missing_shard(directory: Path) -> None:
    _good(directory, shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()


def no_weights(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text("{}")


def link_out_of_the_snapshot(directory: Path) -> None:
    _good(directory)
    outside = directory.parent / f".outside-{directory.name}.safetensors"
    shutil.move(directory / "model.safetensors", outside)
    (directory / "model.safetensors").symlink_to(outside)


def not_a_number(directory: Path) -> None:
    tensors = model_tensors()
    name = "model.norm.weight"
    dtype, shape, data = tensors[name]
    tensors[name] = Tensor(dtype, shape, b"\xc0\x7f" * (len(data) // 2))
    _good(directory, tensors=tensors)


BAD = {
    "truncated shard": Bad(truncated_shard, "invalid_snapshot", "model.safetensors"),
    "garbage header": Bad(garbage_header, "invalid_snapshot", "header"),
    "missing tensor": Bad(missing_tensor, "invalid_snapshot", "up_proj"),
    "wrong shape": Bad(wrong_shape, "invalid_snapshot", "shape"),
    "stray shard": Bad(stray_shard, "invalid_snapshot", "model-00003-of-00003.safetensors"),
    "index names a missing shard": Bad(
        index_names_missing_shard, "invalid_snapshot", "model-00002-of-00002.safetensors"
    ),
    "marker without weights": Bad(no_weights, "invalid_snapshot", "safetensors"),
    "link out of it": Bad(link_out_of_the_snapshot, "invalid_snapshot", "link"),
    "NaN": Bad(not_a_number, "pin_violation", "not finite"),
}


def manifest_of(**fields: Any) -> str:
    """Return a marker's JSON text."""
    return json.dumps({"schema": 1, **fields})
