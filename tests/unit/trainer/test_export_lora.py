"""Adapters: merged weights as merge_and_unload gives them, and the adapter by itself."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import (
    assert_same,
    assert_valid,
    changed,
    experts,
    names,
    saved,
    stored,
    tied,
    untied,
)

from evald.trainer.contract import ExportError
from evald.trainer.export import SnapshotExporter, export_snapshot

with warnings.catch_warnings():
    # CPU mode has an old torchvision beside a newer torch; nothing here looks at images
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tied(), tmp_path_factory.mktemp("tied"))


def load(directory: Path, build: Any = tied) -> Any:
    return type(build()).from_pretrained(directory)


def adapted(model: Any, **options: Any) -> Any:
    """A model whose adapter has learned something."""
    given: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    given |= options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of adapters on tied layers
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given))
    return changed(tuned)


def merged(model: Any, directory: Path) -> dict[str, Any]:
    """What peft and transformers make of a copy of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy.deepcopy(model).merge_and_unload().save_pretrained(directory)
    return stored(directory)


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "adapter_config.json").read_bytes())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # peft keeps a set
    return config


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True, "use_rslora": True},
        {"target_modules": "all-linear", "lora_dropout": 0.1},
        {"trainable_token_indices": [1, 5, 9]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=str,
)
def test_merged_weights_and_the_adapter(
    tmp_path: Path, base: Path, options: dict[str, Any]
) -> None:
    model = adapted(load(base), **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = merged(model, tmp_path / "merged")
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=base)

    assert_same(stored(directory), expected)
    assert_same(dict(model.state_dict()), before)  # training goes on where it was
    assert not any(getattr(module, "merged", False) for module in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "adapter")
        again = PeftModel.from_pretrained(load(base), directory / "adapter")
    assert_same(stored(directory / "adapter"), stored(tmp_path / "adapter"))
    assert config_of(directory / "adapter") == config_of(tmp_path / "adapter")
    assert_same(dict(again.state_dict()), before)
    manifest = assert_valid(directory, base)
    assert "adapter/adapter_model.safetensors" in manifest["files"]
    assert "adapter/adapter_config.json" in manifest["files"]


def test_half_precision_merges_as_peft_does(tmp_path: Path, base: Path) -> None:
    model = adapted(load(base)).to(torch.bfloat16)
    expected = merged(model, tmp_path / "merged")
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=base)
    assert_same(stored(directory), expected)
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16}


def test_adapters_of_experts(tmp_path: Path) -> None:
    base = saved(experts(), tmp_path / "base")
    model = adapted(
        load(base, experts),
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    expected = merged(model, tmp_path / "merged")
    directory = export_snapshot(
        model, tmp_path / "root", step=1, base_dir=base, max_shard_bytes=30_000
    )
    assert_same(stored(directory), expected)


def test_module_that_is_trained_whole(tmp_path: Path) -> None:
    base = saved(untied(), tmp_path / "base")
    model = adapted(load(base, untied), modules_to_save=["lm_head"])
    expected = merged(model, tmp_path / "merged")
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=base)
    assert_same(stored(directory), expected)
    assert any("lm_head" in name for name in stored(directory / "adapter"))


def test_adapter_without_a_peft_model_around_it(tmp_path: Path, base: Path) -> None:
    model = load(base)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    changed(model)
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=base)
    again = PeftModel.from_pretrained(load(base), directory / "adapter")
    assert_same(stored(directory), merged(again, tmp_path / "merged"))


def test_two_active_adapters_are_both_there(tmp_path: Path, base: Path) -> None:
    model = adapted(load(base))
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj"]))
    model.base_model.set_adapter(["default", "other"])
    changed(model)
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=base)
    assert_same(stored(directory), merged(model, tmp_path / "merged"))
    assert names(directory / "adapter") == {"default", "other"}
    assert_valid(directory, base)


def test_weights_that_are_merged_already(tmp_path: Path, base: Path) -> None:
    model = adapted(load(base))
    expected = merged(model, tmp_path / "merged")
    model.merge_adapter()
    directory = export_snapshot(model, tmp_path / "root", step=1, base_dir=base)
    assert_same(stored(directory), expected)


def test_background_and_other_type(tmp_path: Path, base: Path) -> None:
    model = adapted(load(base))
    expected = merged(model, tmp_path / "merged")
    exporter = SnapshotExporter(
        tmp_path / "root", base_dir=base, mode="async", dtype="bfloat16", max_shard_bytes=100_000
    )
    future = exporter.export(model, 1)
    changed(model)
    directory = future.result(30)
    exporter.close()
    assert_same(
        stored(directory), {name: value.to(torch.bfloat16) for name, value in expected.items()}
    )
    assert {tensor.dtype for tensor in stored(directory / "adapter").values()} == {torch.float32}


def test_hooks_of_a_layer_are_not_copied(tmp_path: Path, base: Path) -> None:
    class Heavy:
        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("the whole model could hang on this")

        def __call__(self, *_: object) -> None:
            pass

    model = adapted(load(base))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(Heavy())
    layer.base_layer.register_forward_pre_hook(Heavy())
    export_snapshot(model, tmp_path / "root", step=1, base_dir=base)
    assert len(layer._forward_hooks) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight is trained apart from the embedding"),
        ({"target_modules": ["lm_head"]}, "the adapter trains lm_head.weight, which is tied"),
    ],
)
def test_head_that_leaves_a_tied_embedding(
    tmp_path: Path, base: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ExportError, match=sentence):
        export_snapshot(adapted(load(base), **options), tmp_path, step=1, base_dir=base)
    assert names(tmp_path) == set()


def test_learned_prompts_are_no_weights(tmp_path: Path, base: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ExportError, match="PROMPT_TUNING cannot be merged into weights"):
        export_snapshot(get_peft_model(load(base), config), tmp_path, step=1, base_dir=base)
