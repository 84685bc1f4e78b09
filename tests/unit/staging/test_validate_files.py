"""The files of a snapshot: shards, index, manifest, links and rights."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_faults import fault, zeros
from staging_cases import (
    FUZZ,
    as_other_user,
    base_model,
    deep_folders,
    open_folder,
    snapshot,
)

from evald.staging import safetensors_header
from evald.staging import validate as validate_module
from evald.staging.files import open_file
from evald.staging.manifest import Manifest, ManifestFile
from evald.staging.validate import INDEX, validate
from evald.testing import write_safetensors

SECOND = "model-00002-of-00002.safetensors"


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = directory / INDEX
    content = json.loads(path.read_bytes())
    edit(content["weight_map"])
    path.write_text(json.dumps(content))


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
