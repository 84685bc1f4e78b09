import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from staging_cases import (
    FUZZ,
    as_other_user,
    base_model,
    deep_folders,
    open_folder,
    snapshot,
    tensors,
)

from evald.errors import InvalidSnapshot
from evald.staging import safetensors_header
from evald.staging import validate as validate_module
from evald.staging.files import open_file
from evald.staging.manifest import Manifest, ManifestFile
from evald.staging.safetensors_header import TensorInfo
from evald.staging.validate import INDEX, BaseModel, validate
from evald.testing import Tensor, write_base_model, write_safetensors

EMBEDDING = "model.embed_tokens.weight"
SECOND = "model-00002-of-00002.safetensors"


def fault(directory: Path, **arguments: Any) -> str:
    with pytest.raises(InvalidSnapshot) as caught:
        validate(directory, arguments.pop("base", base_model()), **arguments)
    sentence = caught.value.detail
    prefix = f"cannot use snapshot {directory}: "
    assert sentence.startswith(prefix)
    assert "\n" not in sentence
    return sentence.removeprefix(prefix)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    found = {**tensors(), **{name.replace("__", "."): t for name, t in changes.items() if t}}
    return {name: t for name, t in found.items() if changes.get(name.replace(".", "__"), t)}


def zeros(*shape: int, dtype: str = "BF16") -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return Tensor(dtype, shape, bytes(count * {"F32": 4, "I16": 2}.get(dtype, 2)))


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = directory / INDEX
    content = json.loads(path.read_bytes())
    edit(content["weight_map"])
    path.write_text(json.dumps(content))


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


# --- shards ------------------------------------------------------------------------------------


def test_a_truncated_shard(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    with (directory / SECOND).open("r+b") as file:
        file.truncate((directory / SECOND).stat().st_size - 100)
    assert fault(directory).startswith(f"{SECOND} is truncated: its tensors (the last is model.")


def test_a_garbage_header(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(8)
        file.write(b"garbage")
    assert fault(directory).startswith("model.safetensors has a header that is not JSON")


def test_a_marker_without_weights(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    directory.mkdir()
    (directory / ".complete").touch()
    assert "it has its marker and no weights" in fault(directory)
    (directory / "pytorch_model.bin").touch()
    assert "weights in another format (pytorch_model.bin)" in fault(directory)


def test_a_stray_shard(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    write_safetensors(directory / "old.safetensors", {"x": zeros(1)})
    assert fault(directory).startswith("old.safetensors is a stray weights file")


def test_a_stray_shard_in_a_folder(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    (directory / "original").mkdir()
    (directory / "original" / "x.safetensors").touch()
    assert fault(directory).startswith("original/x.safetensors is a stray weights file in a folder")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    write_safetensors(directory / "more.safetensors", {"model.norm.weight": zeros(64)})
    assert "tensor model.norm.weight is both in model.safetensors and in more" in fault(directory)


def test_weights_that_are_no_file(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "x.safetensors"))
        assert fault(directory) == "x.safetensors is a socket, not a file; remove it"
    (directory / "x.safetensors").unlink()
    (directory / "folder").mkdir()
    (directory / "x.safetensors").symlink_to("folder")
    assert fault(directory) == "x.safetensors is not a regular file"


@pytest.mark.parametrize("name", [INDEX, "tokenizer.json", "notes.txt"])
def test_a_pipe_would_block_whoever_opens_it(tmp_path: Path, name: str) -> None:
    directory = snapshot(tmp_path / "s")
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert fault(directory) == f"{name} is a named pipe, not a file; remove it"


def test_a_link_to_a_device_never_ends(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    (directory / INDEX).symlink_to("/dev/zero")
    assert fault(directory, owned=False) == f"{INDEX} is a device, not a file; remove it"


@pytest.mark.parametrize(("name", "depth"), [("a", 1100), ("a" * 250, 25)])
def test_folders_that_lie_too_deep(tmp_path: Path, name: str, depth: int) -> None:
    directory = snapshot(tmp_path / "s")
    with deep_folders(directory, name, depth, scratch=tmp_path):
        assert "is a folder that lies too deep" in fault(directory)


# --- index -------------------------------------------------------------------------------------


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    (directory / SECOND).unlink()
    assert fault(directory) == f"{INDEX} names {SECOND}, which is missing"


def test_an_index_that_is_damaged(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    (directory / INDEX).write_text('{"weight_map": {"a": 1}}')
    assert fault(directory).startswith(f"{INDEX} is damaged")


def test_an_index_that_names_too_much(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    edit_index(directory, lambda names: names.update(extra=SECOND))
    assert fault(directory) == (
        f"{INDEX} says that tensor extra is in {SECOND}, which does not have it"
    )


def test_an_index_that_names_too_little(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    edit_index(directory, lambda names: names.pop("model.norm.weight"))
    assert f"has tensor model.norm.weight, but {INDEX} does not name it" in fault(directory)


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s", shards=2)

    def swap(names: dict[str, str]) -> None:
        other = next(shard for shard in names.values() if shard != names["model.norm.weight"])
        names["model.norm.weight"] = other

    edit_index(directory, swap)
    assert f"has tensor model.norm.weight, but {INDEX} says that it is in" in fault(directory)


@FUZZ
@given(
    st.binary()
    | st.dictionaries(st.text(), st.text()).map(lambda m: json.dumps({"weight_map": m}).encode())
)
def test_any_index_is_valid_or_invalid(tmp_path_factory: Any, content: bytes) -> None:
    directory = snapshot(tmp_path_factory.mktemp("s"), shards=2)
    (directory / INDEX).write_bytes(content)
    assert INDEX in fault(directory)


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


# --- manifest, links, rights -------------------------------------------------------------------


def test_manifest_sizes(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    size = (directory / "config.json").stat().st_size
    fine = Manifest(
        files={"config.json": ManifestFile(size=size), "model.safetensors": ManifestFile()}
    )
    validate(directory, base_model(), manifest=fine)
    wrong = Manifest(files={"config.json": ManifestFile(size=size + 1)})
    assert f"config.json has {size} bytes, and the manifest says {size + 1}" in fault(
        directory, manifest=wrong
    )
    missing = Manifest(files={"../config.json": ManifestFile()})
    assert "the manifest names ../config.json, which is missing" in fault(
        directory, manifest=missing
    )


def test_links_may_not_leave_an_owned_snapshot(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    (directory / "model.safetensors").rename(tmp_path / "weights")
    (directory / "model.safetensors").symlink_to(tmp_path / "weights")
    assert "model.safetensors is a symbolic link that leaves the snapshot" in fault(directory)
    validate(directory, base_model(), owned=False)
    (tmp_path / "weights").unlink()
    assert "which is not there" in fault(directory, owned=False)


def test_links_to_folders_and_loops(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "s")
    (directory / "up").symlink_to("..")
    assert "up is a symbolic link that leaves the snapshot" in fault(directory)
    validate(directory, base_model(), owned=False)
    (directory / "up").unlink()
    (directory / "loop").symlink_to("loop")
    assert "loop is a symbolic link to loop, which is not there" in fault(directory)


def test_a_vanished_directory_is_no_fault_of_the_snapshot(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        validate(tmp_path / "gone", base_model())


VALIDATE = """
base = validate.BaseModel(Path("/"), {}, is_tied=True, size_bytes=1)
try:
    validate.validate(Path(sys.argv[1]), base)
except InvalidSnapshot as error:
    print(error.detail)
"""


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json"])
def test_an_unreadable_file(name: str) -> None:
    with open_folder() as folder:
        directory = snapshot(folder / "s", shards=2)
        if name == "model.safetensors":
            (directory / name).touch()
        (directory / name).chmod(0o200)
        sentence = as_other_user(VALIDATE, directory)
    assert f"cannot read {name}: its mode is 0200 and its owner" in sentence
    assert "chmod 0644" in sentence


def test_an_unreadable_folder() -> None:
    with open_folder() as folder:
        directory = snapshot(folder / "s")
        (directory / "adapter").mkdir(mode=0)
        sentence = as_other_user(VALIDATE, directory)
    assert f"cannot look into {directory}/adapter: its mode is 0000" in sentence


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


# --- races and failing disks -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX])
def test_a_file_that_fails_or_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = snapshot(tmp_path / "s", shards=2)
    errors: list[OSError] = [OSError(5, "Input/output error"), FileNotFoundError(2, "gone")]

    def failing(path: Path) -> Any:
        if path.name == name:
            raise errors[0]
        return open_file(path)

    for module in (validate_module, safetensors_header):
        monkeypatch.setattr(module, "open_file", failing)
    assert fault(directory) == f"cannot read {name}: Input/output error"
    errors.pop(0)
    with pytest.raises(FileNotFoundError):
        validate(directory, base_model())
