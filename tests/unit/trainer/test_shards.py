"""Safetensors files: cut, written and hashed; and what comes along from the base model."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from export_cases import assert_same
from safetensors.torch import load_file

from evald.staging.safetensors_header import read_header
from evald.trainer.contract import ExportError
from evald.trainer.export import hashing
from evald.trainer.export.base_files import BaseModel, copy_base_files
from evald.trainer.export.pieces import Piece, TensorSpec, one_to_one, spec_of
from evald.trainer.export.shards import ShardFile, ShardWriter, header, plan_files


def pieces(*sizes: int, dtype: Any = torch.uint8) -> list[Piece]:
    return [one_to_one(str(n), torch.empty(size, dtype=dtype)) for n, size in enumerate(sizes)]


def layout(files: list[ShardFile]) -> list[list[str]]:
    return [[spec.name for spec in file.specs] for file in files]


# --- which tensor goes where --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 3, 3], [["0", "1", "2"]]),
        ([4, 4, 4], [["0", "1"], ["2"]]),
        ([20, 1, 1], [["0"], ["1", "2"]]),
        ([1, 20, 1], [["0"], ["1"], ["2"]]),
        ([10, 10], [["0"], ["1"]]),
        ([0, 0], [["0", "1"]]),
    ],
)
def test_shards_of_ten_bytes(sizes: list[int], expected: list[list[str]]) -> None:
    assert layout(plan_files(pieces(*sizes), 10)) == expected


def test_outputs_of_one_piece_may_lie_in_several_files() -> None:
    outputs = tuple(TensorSpec(str(number), torch.uint8, (4,)) for number in range(5))
    files = plan_files([Piece((torch.empty(20),), outputs)], 8)
    assert layout(files) == [["0", "1"], ["2", "3"], ["4"]]
    assert [part.numbers for file in files for part in file.parts] == [(0, 1), (2, 3), (4,)]


def test_wide_types_come_first_so_that_all_are_aligned() -> None:
    mixed = [
        torch.empty(3, dtype=torch.uint8),
        torch.empty(3, dtype=torch.float64),
        torch.empty(3, dtype=torch.bfloat16),
        torch.empty(1),
    ]
    [file] = plan_files([one_to_one(str(n), tensor) for n, tensor in enumerate(mixed)], 1000)
    assert [spec.name for spec in file.specs] == ["1", "3", "2", "0"]
    text = header(file.specs)
    assert len(text) % 8 == 0
    entries = json.loads(text[8:])
    assert entries.pop("__metadata__") == {"format": "pt"}
    for spec in file.specs:
        assert entries[spec.name]["data_offsets"][0] % spec.dtype.itemsize == 0


# --- one file -----------------------------------------------------------------------------------


@pytest.fixture(params=[0.0, 1000.0])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """A machine that has nothing else to do, or far too much."""
    average: float = request.param
    monkeypatch.setattr(os, "getloadavg", lambda: (average, average, average))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return average


def test_a_thread_hashes_only_where_a_processor_is_free(load: float) -> None:
    hasher = hashing.new_hasher()
    assert isinstance(hasher, hashing.Behind if load else hashing.Beside)
    assert hasher.finish() == xxhash.xxh3_64_hexdigest(b"")


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("piece_bytes", [7, 4 << 20])
@pytest.mark.parametrize("hashes", [True, False])
def test_file_is_what_the_library_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, *, hashes: bool
) -> None:
    for hasher in (hashing.Behind, hashing.Beside):
        monkeypatch.setattr(hasher, "piece_bytes", piece_bytes)
    tensors = {
        "a name with ü": torch.randn(5, 3),
        "turned": torch.randn(6, 2).T,
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
        "complex": torch.randn(3, dtype=torch.complex64),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path / "model.safetensors"
    writer = ShardWriter(path, [spec_of(*item) for item in tensors.items()], hashes=hashes)
    done = [writer.add(tensor) for tensor in tensors.values()]
    entry = writer.close()
    assert done == [False] * 6 + [True]
    content = path.read_bytes()
    assert entry.pop("size") == len(content)
    assert entry == ({"xxh3": xxhash.xxh3_64_hexdigest(content)} if hashes else {})
    del tensors["complex"]  # the strict reader of the daemon knows it, the library does not
    found = {name: value for name, value in load_file(path).items() if name != "complex"}
    assert_same(found, {name: value.contiguous() for name, value in tensors.items()})
    assert read_header(path)["complex"].size_bytes == 24


def test_tensor_that_is_not_as_planned(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a", [TensorSpec("a", torch.float32, (2,))], hashes=True)
    with pytest.raises(ExportError, match=r"a was planned with shape \[2\] and came with \[3\]"):
        writer.add(torch.empty(3))
    writer.close()


def test_type_that_the_format_lacks() -> None:
    with pytest.raises(ExportError, match=r"a has type torch.complex128, which safetensors"):
        header([TensorSpec("a", torch.complex128, (1,))])


def test_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path / "a", [], hashes=True)


@pytest.mark.usefixtures("load")
def test_writer_that_cannot_begin_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    (tmp_path / "a").touch()
    for path, spec in (
        (tmp_path / "a", TensorSpec("a", torch.uint8, (1,))),
        (tmp_path / "none" / "a", TensorSpec("a", torch.uint8, (1,))),
        (tmp_path / "b", TensorSpec("a", torch.complex128, (1,))),
    ):
        with pytest.raises((OSError, ExportError)):
            ShardWriter(path, [spec], hashes=True)
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["a", "__metadata__"])
def test_name_that_is_taken(name: str) -> None:
    specs = [TensorSpec(other, torch.uint8, (1,)) for other in ("a", name)]
    with pytest.raises(ExportError, match=f"cannot hold another tensor called {name}"):
        header(specs)


# --- the base model -----------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    for name in (
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "optimizer.pt",
        "rng_state.pth",
        "model.gguf",
        "trainer_state.json",
        "adapter_config.json",
        ".complete",
        "STABLE",
        "tokenizer.model",
        "README.md",
        "modeling_own.py",
    ):
        (directory / name).write_text("{}")
    (directory / "config.json").write_text('{"torch_dtype": "float16"}')
    (directory / "checkpoint-1").mkdir()
    (tmp_path / "blob").write_text("template")
    (directory / "chat_template.jinja").symlink_to(tmp_path / "blob")
    return directory


def test_everything_but_weights_and_state_comes_along(tmp_path: Path, base: Path) -> None:
    directory = tmp_path / "snapshot"
    directory.mkdir()
    copy_base_files(base, directory, marker="STABLE")
    assert {path.name for path in directory.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "modeling_own.py",
        "tokenizer.model",
    }
    template = directory / "chat_template.jinja"
    assert not template.is_symlink()
    assert template.read_text() == "template"
    assert (directory / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"torch_dtype": "float16", "a": 1}', {"torch_dtype": "bfloat16", "a": 1}),
        ('{"dtype":  "bfloat16"}', None),
        ('{"a":  1}', None),
        (
            '{"dtype": "float32", "text_config": {"dtype": "float32"}}',
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}},
        ),
    ],
)
def test_config_names_the_type_that_was_written(
    tmp_path: Path, base: Path, before: str, after: dict[str, Any] | None
) -> None:
    (base / "config.json").write_text(before)
    directory = tmp_path / "snapshot"
    directory.mkdir()
    copy_base_files(base, directory, marker=".complete", dtype=torch.bfloat16)
    text = (directory / "config.json").read_text()
    assert text == before if after is None else json.loads(text) == after


def write(path: Path, **shapes: int) -> None:
    specs = [TensorSpec(name, torch.uint8, (size,)) for name, size in shapes.items()]
    writer = ShardWriter(path, specs, hashes=False)
    for spec in specs:
        writer.add(torch.zeros(spec.shape, dtype=torch.uint8))
    writer.close()


def test_names_come_from_the_files_that_loaders_read(tmp_path: Path) -> None:
    write(tmp_path / "consolidated.safetensors", other=1)
    write(tmp_path / "model.safetensors", a=2)
    assert BaseModel.read(tmp_path).shapes == {"a": (2,)}
    write(tmp_path / "model-1.safetensors", b=3)
    write(tmp_path / "model-2.safetensors", c=4)
    weight_map = {"b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert BaseModel.read(tmp_path).shapes == {"b": (3,), "c": (4,)}
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ExportError, match="cannot be read"):
        BaseModel.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
    ],
)
def test_config_says_whether_the_head_is_tied(
    tmp_path: Path, config: dict[str, Any], *, is_tied: bool
) -> None:
    write(tmp_path / "model.safetensors", a=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert BaseModel.read(tmp_path).is_tied is is_tied


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_weight_map(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ExportError, match=r"cannot be read: model\S+json has no weight_map"):
        BaseModel.read(tmp_path)


def test_damaged_files_of_the_base_model(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", a=2)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExportError, match=r"config.json cannot be read"):
        BaseModel.read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ExportError, match=r"model.safetensors has a damaged header"):
        BaseModel.read(tmp_path)
