"""What cannot be exported is one sentence, has its reason, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import assert_same, assert_valid, names, saved, stored, tied, untied
from safetensors.torch import save_file

from evald.trainer.contract import ExportError, NoSpace
from evald.trainer.export import SnapshotExporter, export_snapshot
from evald.trainer.export.tensors import torch_type


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(untied(), tmp_path_factory.mktemp("base"))


def refused(weights: Any, root: Path, base: Path, **options: Any) -> ExportError:
    with pytest.raises(ExportError) as caught:
        export_snapshot(weights, root, step=7, base_dir=base, **options)
    assert names(root) == set()
    assert str(caught.value).startswith("cannot export step 7: ")
    return caught.value


# --- the weights are not the base model's -------------------------------------------------------


def without(*absent: str) -> dict[str, Any]:
    return {name: value for name, value in untied().state_dict().items() if name not in absent}


NORMS = [f"model.layers.{layer}.self_attn.{part}_norm.weight" for layer in (0, 1) for part in "qk"]
EXTRA = {"model.more.weight": torch.ones(2)}
HALF = {"model.norm.weight": torch.ones(32)}
EMPTY = {"model.norm.weight": torch.empty(0)}


@pytest.mark.parametrize("as_iterator", [False, True])
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({}, "the weights are empty"),
        (without(NORMS[0]), f"lack 1 tensor of the base model in BASE ({NORMS[0]}); export"),
        (without(*NORMS), "lack 4 tensors of the base model in BASE ("),
        (without(*NORMS), " and 1 more)"),
        (without("lm_head.weight"), "(lm_head.weight)"),
        (without() | EXTRA, "have 1 tensor that the base model in BASE does not have (model.more"),
        (without() | HALF, "(model.norm.weight [32] instead of [64]); cut padding off"),
        (without() | EMPTY, "1 tensor came out empty (model.norm.weight)"),
        (without() | {"model.norm.weight": "text"}, "model.norm.weight is a str, not a tensor"),
    ],
)
def test_other_weights(
    tmp_path: Path, base: Path, weights: dict[str, Any], sentence: str, *, as_iterator: bool
) -> None:
    given = iter(weights.items()) if as_iterator else weights
    error = refused(given, tmp_path, base, max_shard_bytes=10_000)
    assert sentence.replace("BASE", str(base)) in str(error)
    assert error.reason == "export_failed"
    assert "\n" not in str(error)


ONE = torch.ones(2)


@pytest.mark.parametrize("as_iterator", [False, True])
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"module.a": ONE, "a": ONE + 1}, "module.a and a would both be called a"),
        ({"a._orig_mod.b": ONE, "a.b": ONE + 1}, "a._orig_mod.b and a.b would both be called a.b"),
        ({"__metadata__": ONE}, "a tensor cannot be called __metadata__"),
        ({"module.__metadata__": ONE}, "a tensor cannot be called __metadata__"),
        ({3: ONE}, "a tensor called 3, of type int; name every tensor by a text"),
    ],
)
def test_names_that_cannot_be(
    tmp_path: Path, weights: dict[Any, Any], sentence: str, *, as_iterator: bool
) -> None:
    with pytest.raises(ExportError, match=re.escape(sentence)):
        export_snapshot(
            iter(weights.items()) if as_iterator else weights, tmp_path, step=7, base_dir=None
        )
    assert names(tmp_path) == set()


def test_modules_whose_names_collide(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.part = torch.nn.Linear(2, 2)
    model.module = torch.nn.Module()
    model.module.part = torch.nn.Linear(2, 2)
    with pytest.raises(ExportError, match=r"would both be called part\.weight in the snapshot"):
        export_snapshot(model, tmp_path, step=7, base_dir=None)
    model.module.part = model.part
    assert stored(export_snapshot(model, tmp_path, step=8, base_dir=None)).keys() == {
        "part.weight",
        "part.bias",
    }


def test_names_may_be_allowed_to_be_absent(tmp_path: Path, base: Path) -> None:
    export_snapshot(
        without(*NORMS), tmp_path, step=1, base_dir=base, allow_absent=["*.q_norm.*", "*k_norm*"]
    )


def test_tied_head_and_computed_buffers_may_differ(tmp_path: Path) -> None:
    base = saved(tied(), tmp_path / "base")
    weights = dict(tied().state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    directory = export_snapshot(weights, tmp_path / "root", step=1, base_dir=base)
    assert_same(stored(directory), weights)


def test_base_model_that_stores_the_tied_head_twice(tmp_path: Path) -> None:
    base = saved(tied(), tmp_path / "base")
    weights = {name: value.clone() for name, value in tied().state_dict().items()}
    save_file(weights, base / "model.safetensors")
    directory = export_snapshot(tied(), tmp_path / "root", step=1, base_dir=base)
    assert "lm_head.weight" not in stored(directory)  # as save_pretrained leaves it out
    assert_valid(directory, base)


def test_head_that_left_its_embedding(tmp_path: Path) -> None:
    base = saved(tied(), tmp_path / "base")
    model = tied()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    (tmp_path / "root").mkdir()
    error = refused(model, tmp_path / "root", base)
    assert "lm_head.weight is trained apart from the embedding" in str(error)


def test_iterator_that_repeats_itself(tmp_path: Path, base: Path) -> None:
    twice = [*untied().state_dict().items()] * 2
    assert "yield model.embed_tokens.weight twice" in str(refused(iter(twice), tmp_path, base))


def test_iterator_that_breaks(tmp_path: Path, base: Path) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield from list(untied().state_dict().items())[:3]
        raise KeyError("rank 5")

    error = refused(broken(), tmp_path, base)
    assert str(error).endswith("KeyError: 'rank 5'")


def test_damaged_base_model(tmp_path: Path, base: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    content = (base / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:100])
    (tmp_path / "root").mkdir()
    error = refused(untied(), tmp_path / "root", damaged)
    assert f"the base model in {damaged} cannot be read" in str(error)


# --- the file system ----------------------------------------------------------------------------


def test_full_file_system(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 100_000
    write = os.write

    def limited(fd: int, data: Any) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= len(data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", limited)
    for weights in (untied(), iter(untied().state_dict().items())):
        room = 100_000
        error = refused(weights, tmp_path, base, max_shard_bytes=50_000)
        assert isinstance(error, NoSpace)
        assert error.reason == "no_space"
        assert "the file system is full" in str(error)
    room = 10**9
    export_snapshot(untied(), tmp_path, step=7, base_dir=base)


def test_too_little_room_is_seen_before_anything_is_written(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_bavail, f_frsize = 100, 1000

    monkeypatch.setattr(os, "statvfs", lambda _: Disk)
    error = refused(untied(), tmp_path, base)
    assert error.reason == "no_space"
    assert "GB, and" in str(error)
    assert "0.0001 GB free" in str(error)


def test_leftovers_of_killed_exports_go_when_an_exporter_starts(tmp_path: Path, base: Path) -> None:
    for step in (3, 4):
        (tmp_path / f".tmp-step_{step}.0123abcd").mkdir()
    exporter = SnapshotExporter(tmp_path, base_dir=base)
    exporter.export(untied(), 7).result()
    assert names(tmp_path) == {"step_7"}
    exporter.close()


def test_root_that_cannot_be(tmp_path: Path, base: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=r"step 1: .*/file.*: Not a directory"):
        export_snapshot(untied(), tmp_path / "file" / "root", step=1, base_dir=base)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_step_that_is_still_evaluated(tmp_path: Path, base: Path, mode: Any) -> None:
    exporter = SnapshotExporter(tmp_path, base_dir=base, mode=mode, busy_timeout_s=0.2)
    directory = exporter.export(untied(), 7).result()
    (tmp_path / ".evald").mkdir()
    status = {"beat": 1, "queued": [], "running": [{"step": 7, "run": "r"}]}
    (tmp_path / ".evald" / "status.json").write_text(json.dumps(status))
    with pytest.raises(ExportError, match="step 7: it was exported before") as caught:
        exporter.export(untied(), 7).result()
    assert caught.value.reason == "busy"
    assert (directory / ".complete").exists()


# --- hooks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_hooks_come_in_pairs_whatever_happens(tmp_path: Path, base: Path, mode: Any) -> None:
    calls: list[str] = []
    exporter = SnapshotExporter(
        tmp_path,
        base_dir=base,
        mode=mode,
        onload=lambda: calls.append("on"),
        offload=lambda: calls.append("off"),
    )
    for weights, reason in ((untied(), None), (without(*NORMS), "export_failed")):
        calls.clear()
        future = exporter.export(weights, 1)
        assert calls == ["on", "off"]
        assert getattr(future.exception(20), "reason", None) == reason


@pytest.mark.parametrize("broken", ["onload", "offload"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_hook_that_fails(tmp_path: Path, base: Path, mode: Any, broken: str) -> None:
    calls: list[str] = []

    def hook(name: str) -> None:
        calls.append(name)
        if name == broken:
            raise RuntimeError("no memory for it")

    exporter = SnapshotExporter(
        tmp_path,
        base_dir=base,
        mode=mode,
        onload=lambda: hook("onload"),
        offload=lambda: hook("offload"),
    )
    with pytest.raises(ExportError, match="step 1: RuntimeError: no memory for it"):
        exporter.export(untied(), 1).result()
    assert calls == ["onload", "offload"]
    assert names(tmp_path) == set()


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "fast"}, "cannot use mode='fast': give 'sync' or 'async'"),
        ({"writers": "all"}, "cannot use writers='all'"),
        ({"pattern": "step"}, 'pattern "step" lacks "{step}"'),
        ({"marker": "a/b"}, 'marker "a/b" is no file name'),
        ({"pattern": "../{step}"}, 'pattern "../{step}" leads out of the root'),
        ({"pattern": "/{step}"}, 'pattern "/{step}" leads out of the root'),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0: give"),
        ({"max_shard_bytes": "5GB"}, "cannot use max_shard_bytes='5GB': give a whole number"),
        ({"max_shard_bytes": 0.5}, "max_shard_bytes=0.5: give"),
        ({"dtype": "int8"}, "cannot convert weights to int8"),
        ({"dtype": torch.float8_e4m3fn}, "cannot convert weights to torch.float8_e4m3fn"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SnapshotExporter(tmp_path, base_dir=None, **options)


@pytest.mark.parametrize(
    ("short", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_short_names_of_types(short: str, dtype: torch.dtype) -> None:
    assert torch_type(short) == dtype


def test_root_without_a_name() -> None:
    with pytest.raises(ValueError, match='the root is ""'):
        SnapshotExporter("", base_dir=None)


def test_wrong_arguments_of_an_export(tmp_path: Path) -> None:
    exporter = SnapshotExporter(tmp_path, base_dir=None)
    for step in (-1, True, 1.0):
        with pytest.raises(ValueError, match="steps are whole numbers"):
            exporter.export({}, step)  # type: ignore[arg-type]
    for weights in (3, "path"):
        with pytest.raises(ValueError, match="give a model, a state dict, or an iterator"):
            exporter.export(weights, 1)
    exporter.close()
    exporter.close()
    with pytest.raises(ValueError, match="the exporter is closed"):
        exporter.export({}, 1)
