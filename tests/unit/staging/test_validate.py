"""The tensors of a snapshot, against those of the base model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from snapshot_faults import EMBEDDING, changed, fault, zeros
from staging_cases import (
    base_model,
    snapshot,
    tensors,
)

from evald.errors import InvalidSnapshot
from evald.staging.safetensors_header import TensorInfo
from evald.staging.validate import INDEX, BaseModel, validate
from evald.testing import write_base_model, write_safetensors

# --- what is valid -----------------------------------------------------------------------------


def test_good_snapshots_are_valid(tmp_path: Path) -> None:
    validate(snapshot(tmp_path / "one"), base_model())
    validate(snapshot(tmp_path / "two", shards=2), base_model())


def test_what_does_not_matter_is_let_through(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    (directory / "config.json").unlink()
    (directory / "modeling.py").write_text("raise SystemExit")
    (directory / "modeling.py").chmod(0)
    (directory / ".cache").mkdir()
    (directory / ".cache" / "x.safetensors").write_text("junk")
    (directory / "adapter").mkdir()
    (directory / "adapter" / "x.safetensors").write_text("junk")
    (directory / "link.json").symlink_to(INDEX)
    validate(directory, base_model())


def test_shards_without_an_index_are_loaded_all(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    (directory / INDEX).unlink()
    validate(directory, base_model())


def test_other_float_types_are_converted(tmp_path: Path) -> None:
    with_floats = changed(model__norm__weight=zeros(64, dtype="F32"))
    validate(snapshot(tmp_path / "s", tensors=with_floats), base_model())


def test_a_tied_head_may_be_there_or_not(tmp_path: Path) -> None:
    with_head = changed(lm_head__weight=tensors()[EMBEDDING])
    validate(snapshot(tmp_path / "s", tensors=with_head), base_model())
    head_in_base = {**base_model().tensors, "lm_head.weight": base_model().tensors[EMBEDDING]}
    base = BaseModel(Path("/base"), head_in_base, is_tied=True, size_bytes=1)
    validate(snapshot(tmp_path / "t"), base)
    base = BaseModel(Path("/base"), head_in_base, is_tied=False, size_bytes=1)
    assert "tensor lm_head.weight is missing" in fault(tmp_path / "t", base=base)
    untied = BaseModel(Path("/base"), base_model().tensors, is_tied=False, size_bytes=1)
    assert "has tensor lm_head.weight, which the base" in fault(tmp_path / "s", base=untied)


def test_listed_tensors_may_be_absent(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", tensors=changed(model__norm__weight=None))
    validate(directory, base_model(), allow_absent=["model.nor*"])
    assert fault(directory, allow_absent=["norm"]) == (
        "tensor model.norm.weight is missing; the base model has it (staging.allow_absent lists "
        "tensors that may be missing)"
    )


def test_old_rotary_tensors_are_harmless(tmp_path: Path) -> None:
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    validate(snapshot(tmp_path / "s", tensors=changed(**{name: zeros(4)})), base_model())


# --- against the base model --------------------------------------------------------------------


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    part = {"model.norm.weight": tensors()["model.norm.weight"]}
    sentence = fault(snapshot(tmp_path / "s", tensors=part))
    assert sentence.startswith(f"tensor {EMBEDDING} is missing (and {len(tensors()) - 2} more);")


def test_a_wrong_shape(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", tensors=changed(model__norm__weight=zeros(63)))
    assert fault(directory) == (
        "tensor model.norm.weight in model.safetensors has shape [63], and the base model's "
        "has [64]"
    )


def test_a_padded_vocabulary_is_explained(tmp_path: Path) -> None:
    padded = changed(model__embed_tokens__weight=zeros(384, 64))
    assert "the trainer padded the vocabulary by 64 rows" in fault(
        snapshot(tmp_path / "s", tensors=padded)
    )
    cut = changed(model__embed_tokens__weight=zeros(300, 64))
    assert "padded" not in fault(snapshot(tmp_path / "t", tensors=cut))


def test_an_integer_type_is_not_converted(tmp_path: Path) -> None:
    directory = snapshot(
        tmp_path / "s", tensors=changed(model__norm__weight=zeros(64, dtype="F16"))
    )
    base = {**base_model().tensors, "model.norm.weight": TensorInfo("I16", (64,), 128)}
    integers = BaseModel(Path("/base"), base, is_tied=True, size_bytes=1)
    assert "has type F16, and the base model's has I16" in fault(directory, base=integers)


def test_an_unknown_tensor(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", tensors=changed(visual__patch=zeros(3)))
    assert "has tensor visual.patch, which the base model does not have" in fault(directory)


# --- the base model ----------------------------------------------------------------------------


def test_the_base_model_is_read(tmp_path: Path) -> None:
    found = BaseModel.read(write_base_model(tmp_path / "base"))
    assert found.tensors == base_model().tensors
    assert found.is_tied
    assert found.size_bytes == sum(len(tensor.data) for tensor in tensors().values())


@pytest.mark.parametrize(
    ("config", "has_head", "tied"),
    [
        (None, False, True),
        (None, True, False),
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"text_config": {"tie_word_embeddings": True}, "x": 1}, True, True),
        ({"text_config": {}, "tie_word_embeddings": True}, True, True),
    ],
)
def test_a_tied_head_is_known_from_config_or_weights(
    tmp_path: Path, config: dict[str, Any] | None, has_head: bool, tied: bool
) -> None:
    head = {"lm_head.weight": zeros(2)} if has_head else {}
    write_safetensors(tmp_path / "model.safetensors", {"x": zeros(1), **head})
    if config is not None:
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert BaseModel.read(tmp_path).is_tied is tied


def test_a_bad_base_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidSnapshot, match=f"cannot read base model {tmp_path}: it has"):
        BaseModel.read(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"x": zeros(1)})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidSnapshot, match=r"config\.json is damaged"):
        BaseModel.read(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InvalidSnapshot, match=r"cannot read config\.json: Is a directory"):
        BaseModel.read(tmp_path)
