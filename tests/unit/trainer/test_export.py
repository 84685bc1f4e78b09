"""Snapshots byte for byte: models, state dicts, iterators; shards, types and what comes along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from export_cases import (
    assert_same,
    assert_valid,
    changed,
    experts,
    fused,
    names,
    saved,
    stored,
    tied,
    untied,
)
from transformers import core_model_loading

from evald.trainer.export import SnapshotExporter, export_snapshot
from evald.trainer.export.tensors import weights_bytes

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
FILES |= {"chat_template.jinja", ".complete"}


@pytest.fixture(scope="module")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tied(), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(untied(), tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize("build", [tied, untied, experts, fused])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_what_save_pretrained_would_write(
    tmp_path: Path, build: Callable[[], Any], max_shard_bytes: int
) -> None:
    base = saved(build(), tmp_path / "base")
    model = changed(build())
    expected = stored(saved(model, tmp_path / "expected"))
    directory = export_snapshot(
        model, tmp_path / "root", step=40, base_dir=base, max_shard_bytes=max_shard_bytes
    )
    assert directory == tmp_path / "root" / "step_40"
    assert names(directory.parent) == {"step_40"}
    assert_same(stored(directory), expected)
    manifest = assert_valid(directory, base)
    assert manifest["files"].keys() == names(directory) - {".complete"}
    for name, entry in manifest["files"].items():
        content = (directory / name).read_bytes()
        assert entry == {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
        assert (directory / name).stat().st_mode & 0o777 == 0o644
    shards = sorted(directory.glob("*.safetensors"))
    if len(shards) == 1:
        assert names(directory) == FILES | {"model.safetensors"}
        return
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in expected.values())}
    assert index["weight_map"].keys() == expected.keys()


def test_manifest_tells_of_the_run_and_the_time(tmp_path: Path, tied_base: Path) -> None:
    directory = export_snapshot(
        tied(), tmp_path, step=3, base_dir=tied_base, run="r1", final=True, hashes=False
    )
    manifest = assert_valid(directory, tied_base)
    assert (manifest["run"], manifest["step"], manifest["final"]) == ("r1", 3, True)
    assert manifest["stall_s"] == manifest["export_s"] > 0
    assert manifest["files"]["config.json"].keys() == {"size"}


def test_state_dict_keeps_every_type(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5, dtype=torch.bfloat16),
        "float16": torch.randn(5).half(),
        "fp8": torch.randn(4, 3).to(torch.float8_e4m3fn),
        "fp8_5": torch.randn(3).to(torch.float8_e5m2),
        "single": torch.randn(3, 3),
        "double": torch.randn(1, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "counts": torch.arange(6).reshape(2, 3),
        "turned": torch.randn(4, 6).T,
        "every second": torch.arange(20, dtype=torch.int16)[::2],
    }
    directory = export_snapshot(weights, tmp_path, step=1, base_dir=None)
    assert_same(stored(directory), {name: t.contiguous() for name, t in weights.items()})
    assert names(directory) == {"model.safetensors", ".complete"}


def test_names_of_wrappers_are_left_out(tmp_path: Path, untied_base: Path) -> None:
    model = changed(untied())
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    directory = export_snapshot(wrapped, tmp_path, step=1, base_dir=untied_base)
    assert_same(stored(directory), dict(model.state_dict()))


@pytest.mark.parametrize("is_known", [True, False])
def test_tied_state_dict_is_written_once(tmp_path: Path, tied_base: Path, is_known: bool) -> None:
    weights = tied().state_dict()
    assert "lm_head.weight" in weights
    base_dir = tied_base if is_known else None
    directory = export_snapshot(weights, tmp_path, step=1, base_dir=base_dir)
    del weights["lm_head.weight"]
    assert_same(stored(directory), dict(weights))


def test_other_type(tmp_path: Path, tied_base: Path) -> None:
    model = tied()
    directory = export_snapshot(model, tmp_path, step=1, base_dir=tied_base, dtype="bfloat16")
    expected = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    del expected["lm_head.weight"]
    assert_same(stored(directory), expected)
    assert json.loads((tied_base / "config.json").read_bytes())["dtype"] == "float32"
    assert json.loads((directory / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_mixture_of_experts_that_was_loaded(tmp_path: Path) -> None:
    base = saved(experts(), tmp_path / "base")
    model = changed(type(experts()).from_pretrained(base))
    expected = stored(saved(model, tmp_path / "expected"))
    assert any("experts.3.up_proj" in name for name in expected)
    directory = export_snapshot(
        model, tmp_path / "root", step=1, base_dir=base, max_shard_bytes=30_000
    )
    assert_same(stored(directory), expected)


# --- iterators ----------------------------------------------------------------------------------


def reusing(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A converter that has one piece of memory for all it yields."""
    memory = torch.empty(max(tensor.numel() for tensor in weights.values()))
    for name, tensor in weights.items():
        part = memory[: tensor.numel()].view(tensor.shape)
        part.copy_(tensor)
        yield name, part
    memory.fill_(float("nan"))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
def test_iterator(tmp_path: Path, untied_base: Path, mode: Any, max_shard_bytes: int) -> None:
    weights = dict(changed(untied()).state_dict())
    exporter = SnapshotExporter(
        tmp_path, base_dir=untied_base, mode=mode, max_shard_bytes=max_shard_bytes
    )
    for step in (1, 2):
        directory = exporter.export(reusing(weights), step).result(20)
        assert_same(stored(directory), weights)
        manifest = assert_valid(directory, untied_base)
        assert (manifest["stall_s"] < manifest["export_s"]) is (mode == "async")
    exporter.close()
    assert names(tmp_path) == {"step_1", "step_2"}


def test_iterator_in_another_type(tmp_path: Path, untied_base: Path) -> None:
    weights = dict(untied().state_dict())
    directory = export_snapshot(
        iter(weights.items()), tmp_path, step=1, base_dir=untied_base, dtype=torch.bfloat16
    )
    assert_same(stored(directory), {name: t.to(torch.bfloat16) for name, t in weights.items()})


# --- without the base model's directory ---------------------------------------------------------


def test_hub_id_is_a_warning_and_the_model_brings_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = untied().to(torch.bfloat16)
    directory = export_snapshot(model, tmp_path, step=1, base_dir="Qwen/Qwen3-4B")
    assert "base_dir_unknown" in capsys.readouterr().out
    assert_same(stored(directory), dict(model.state_dict()))
    config = json.loads((directory / "config.json").read_bytes())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert type(model).from_pretrained(directory).dtype == torch.bfloat16


def test_directory_without_safetensors_is_a_warning(
    tmp_path: Path, untied_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((untied_base / "config.json").read_bytes())
    (base / "pytorch_model.bin").touch()
    directory = export_snapshot(untied(), tmp_path / "root", step=1, base_dir=base)
    assert "base_dir_without_safetensors" in capsys.readouterr().out
    assert names(directory) == {"config.json", "model.safetensors", ".complete"}


def test_more_chat_templates_come_along(tmp_path: Path, tied_base: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tied_base, base)
    (base / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "rag.jinja", "notes.bin"):
        (base / "additional_chat_templates" / name).write_text(name)
    for step in (1, 2):
        directory = export_snapshot(tied(), tmp_path / "root", step=step, base_dir=base)
        copied = directory / "additional_chat_templates"
        assert names(copied) == {"tool_use.jinja", "rag.jinja"}
        assert (copied / "rag.jinja").read_text() == "rag.jinja"
        assert_valid(directory, base)


def test_tensors_that_belong_together_in_a_way_no_part_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revert = core_model_loading.revert_weight_conversion

    def all_or_nothing(model: Any, weights: dict[str, Any]) -> Any:
        if len(weights) < 6:
            raise RuntimeError("not the whole of it")
        return revert(model, weights)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", all_or_nothing)
    model = fused()
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=None)
    monkeypatch.undo()
    assert_same(stored(directory), stored(saved(model, tmp_path / "expected")))


def test_size_is_known_before_the_export() -> None:
    model = tied()
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert weights_bytes(model) == weights_bytes(model.state_dict()) == size
    assert weights_bytes(iter(model.state_dict().items())) is None
    assert weights_bytes({"a": torch.ones(3), "b": "no tensor"}) == 12


def test_step_again_replaces_the_snapshot(tmp_path: Path, tied_base: Path) -> None:
    first, second = changed(tied()), changed(tied())
    exporter = SnapshotExporter(tmp_path, base_dir=tied_base, max_shard_bytes=100_000)
    exporter.export(first, 1).result()
    again = SnapshotExporter(tmp_path, base_dir=tied_base)
    directory = again.export(second, 1).result()
    assert names(directory) == FILES | {"model.safetensors"}
    expected = dict(second.state_dict())
    del expected["lm_head.weight"]
    assert_same(stored(directory), expected)
