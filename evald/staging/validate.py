"""Whether a snapshot is one that an engine may see.

A truncated shard kills SGLang's server, and a missing tensor is loaded with answer 200: so every
snapshot is compared, tensor by tensor, with the model that the engines were booted on. Only
headers are read, no weights. Python files are ignored: nothing in a snapshot is ever executed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import msgspec

from evald.errors import InvalidSnapshot
from evald.staging.files import (
    MAX_DEPTH,
    SnapshotFile,
    is_training_state,
    list_files,
    open_file,
)
from evald.staging.manifest import Manifest
from evald.staging.rights import closed_folder, is_readable, unreadable
from evald.staging.safetensors_header import TensorInfo, read_header, shown

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: endings of weights that no engine gets.
_FOREIGN = (".bin", ".pt", ".pth", ".distcp")
#: a folder for adapters that come along with the weights; engines do not load it.
_ADAPTER = "adapter"
#: SGLang copies one of these into another; all other types must be the base model's.
_CONVERTIBLE = frozenset({"F64", "F32", "F16", "BF16"})
#: tensors that older exports carry and every loader skips.
_HARMLESS_EXTRA = ("*.rotary_emb.inv_freq",)
_HEAD = "lm_head.weight"
#: tensors whose first dimension is the vocabulary.
_VOCABULARY = ("*embed_tokens.weight", "*" + _HEAD, "*wte.weight", "*word_embeddings.weight")

#: what nobody may open: a pipe without a writer blocks, a device never ends.
_SPECIAL = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}

#: tensor name -> (its file's name, what the header says).
_Tensors = dict[str, tuple[str, TensorInfo]]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _ModelConfig(msgspec.Struct):
    tie_word_embeddings: bool | None = None
    text_config: _ModelConfig | None = None


class BaseModel(msgspec.Struct, frozen=True):
    """The model that the engines boot on: what snapshots must look like."""

    directory: Path
    tensors: dict[str, TensorInfo]
    #: the head shares the embedding's weights, so that ``lm_head`` may be there or not.
    is_tied: bool
    #: bytes of the weights.
    size_bytes: int

    @classmethod
    def read(cls, model_dir: Path) -> BaseModel:
        """Read names, types and shapes; raises InvalidSnapshot with one sentence."""
        with told("read base model", model_dir):
            found = _read_tensors(list_files(model_dir))
            tensors = {name: info for name, (_, info) in found.items()}
            tied = _says_tied(model_dir / "config.json")
        if tied is None:
            tied = not any(_is_head(name) for name in tensors)
        return cls(model_dir, tensors, tied, sum(info.size_bytes for info in tensors.values()))


def validate(
    directory: Path,
    base: BaseModel | None,
    *,
    owned: bool = True,
    manifest: Manifest | None = None,
    allow_absent: Sequence[str] = (),
    without_weights: str = "",
) -> None:
    """Compare a snapshot with itself, its manifest and ``base``; hashes are left to the digest.

    ``base`` None: nothing is known of the names and shapes that it must have.
    ``owned``: links may not leave the directory, which will be deleted. ``allow_absent``: shell
    patterns of tensors that may be missing. ``without_weights``: how to make the trainer save some.
    Raises InvalidSnapshot with one sentence for the first fault, and FileNotFoundError when the
    directory vanishes meanwhile.
    """
    with told("use snapshot", directory):
        files = list_files(directory)
        if owned:
            _check_links(directory, files)
        _check_readable(files)
        if manifest is not None:
            _check_sizes(files, manifest)
        tensors = _read_tensors(files, without_weights)
        if base is not None:
            _compare(tensors, base, allow_absent)


@contextmanager
def told(doing: str, directory: Path) -> Iterator[None]:
    """Make a cause a whole sentence."""
    try:
        yield
    except InvalidSnapshot as error:
        raise InvalidSnapshot(f"cannot {doing} {directory}: {error.detail}") from error


def _says_tied(config: Path) -> bool | None:
    """Return what config.json says about the head; None when it says nothing."""
    try:
        parsed = msgspec.json.decode(config.read_bytes(), type=_ModelConfig)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidSnapshot(f"cannot read config.json: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSnapshot(f"config.json is damaged: {error}") from error
    if parsed.text_config is not None and parsed.text_config.tie_word_embeddings is not None:
        return parsed.text_config.tie_word_embeddings
    return parsed.tie_word_embeddings


def _check_links(directory: Path, files: Iterable[SnapshotFile]) -> None:
    home = os.path.realpath(directory) + os.sep
    for file in files:
        if file.link is not None and not os.path.realpath(file.path).startswith(home):
            raise InvalidSnapshot(
                f"{file.name} is a symbolic link that leaves the snapshot (to {file.link}); copy "
                "the file into it"
            )


def _check_readable(files: Iterable[SnapshotFile]) -> None:
    for file in files:
        if file.too_deep:
            raise InvalidSnapshot(
                f"{shown(file.name)} is a folder that lies too deep: evald looks into at most "
                f"{MAX_DEPTH} folders in one another, and its path must not be too long; remove it"
            )
        if file.is_closed_folder:
            raise InvalidSnapshot(closed_folder(file.path))
        if file.dangling:
            raise InvalidSnapshot(
                f"{file.name} is a symbolic link to {file.link}, which is not there"
            )
        if file.is_special:
            kind = _SPECIAL.get(stat.S_IFMT(file.mode), "device")
            raise InvalidSnapshot(f"{file.name} is a {kind}, not a file; remove it")
        if file.name.endswith(_SUFFIX) and not file.is_regular:
            raise InvalidSnapshot(f"{file.name} is not a regular file")
        if file.is_regular and not file.name.endswith(".py") and not is_readable(file):
            raise InvalidSnapshot(unreadable(file, PermissionError()))


def _check_sizes(files: Iterable[SnapshotFile], manifest: Manifest) -> None:
    sizes = {file.name: file.size_bytes for file in files}
    for name, wanted in sorted(manifest.files.items()):
        if name not in sizes:
            raise InvalidSnapshot(f"the manifest names {shown(name)}, which is missing")
        if wanted.size is not None and sizes[name] != wanted.size:
            raise InvalidSnapshot(
                f"{name} has {sizes[name]} bytes, and the manifest says {wanted.size}; copy it "
                "again"
            )


def _read_tensors(files: Sequence[SnapshotFile], without_weights: str = "") -> _Tensors:
    """Read all shards' headers and check that index and shards tell the same."""
    shards = {file.name: file for file in files if _is_weights(file)}
    index_file = next((file for file in files if file.name == INDEX), None)
    stray = next((name for name in shards if "/" in name), None)
    if stray is not None:
        raise InvalidSnapshot(
            f"{stray} is a stray weights file in a folder (only {_ADAPTER}/ may have some); "
            "remove it"
        )
    if not shards:
        raise InvalidSnapshot(_no_weights(files, without_weights))
    if all(name.startswith(_ADAPTER + "_model") for name in shards):
        raise InvalidSnapshot(
            f"it is a LoRA adapter ({min(shards)}) without the model's own weights; save the whole "
            "model (merge_and_unload in peft), or export with evald.trainer, which merges"
        )
    index = _read_index(index_file) if index_file is not None else None
    if index is not None:
        _check_shards(shards, index)
    tensors: _Tensors = {}
    for name, file in shards.items():
        for tensor, info in _header(file).items():
            if tensor in tensors:
                other = tensors[tensor][0]
                raise InvalidSnapshot(f"tensor {shown(tensor)} is both in {other} and in {name}")
            tensors[tensor] = (name, info)
    if index is not None:
        _check_index(tensors, index)
    return tensors


def _is_weights(file: SnapshotFile) -> bool:
    in_adapter = PurePosixPath(file.name).parts[0] == _ADAPTER
    return file.name.endswith(_SUFFIX) and not file.is_hidden and not in_adapter


def _no_weights(files: Iterable[SnapshotFile], remedy: str) -> str:
    for file in files:
        if file.name.endswith(_FOREIGN) and not is_training_state(file.name):
            return f"it has weights in another format ({file.name}) and no *{_SUFFIX}; " + (
                remedy or "export in Hugging Face format (save_pretrained writes safetensors)"
            )
    if remedy:
        return f"it is finished and has no weights (no *{_SUFFIX} file); {remedy}"
    return f"it has its marker and no weights (no *{_SUFFIX} file); write the marker last"


def _header(file: SnapshotFile) -> dict[str, TensorInfo]:
    try:
        return read_header(file.path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidSnapshot(unreadable(file, error)) from error


def _read_index(file: SnapshotFile) -> Mapping[str, str]:
    try:
        with open_file(file.path) as stream:
            return msgspec.json.decode(stream.read(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSnapshot(f"{INDEX} is damaged: {error}") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidSnapshot(unreadable(file, error)) from error


def _check_shards(shards: Iterable[str], index: Mapping[str, str]) -> None:
    named = dict.fromkeys(index.values())
    for shard in named:
        if shard not in shards:
            raise InvalidSnapshot(f"{INDEX} names {shown(shard)}, which is missing")
    for shard in shards:
        if shard not in named:
            raise InvalidSnapshot(
                f"{shard} is a stray weights file: {INDEX} does not name it, and a server may load "
                "it all the same; remove it"
            )


def _check_index(tensors: _Tensors, index: Mapping[str, str]) -> None:
    for tensor, shard in index.items():
        if tensor not in tensors:
            raise InvalidSnapshot(
                f"{INDEX} says that tensor {shown(tensor)} is in {shard}, which does not have it"
            )
    for tensor, (shard, _) in tensors.items():
        if index.get(tensor) != shard:
            says = f"says that it is in {index[tensor]}" if tensor in index else "does not name it"
            raise InvalidSnapshot(f"{shard} has tensor {shown(tensor)}, but {INDEX} {says}")


def _compare(found: _Tensors, base: BaseModel, allow_absent: Sequence[str]) -> None:
    missing = [
        name
        for name in base.tensors
        if name not in found
        and not (base.is_tied and _is_head(name))
        and not _matches(name, allow_absent)
    ]
    if missing:
        raise InvalidSnapshot(
            f"tensor {shown(missing[0])} is missing{_more(missing)}; the base model has it "
            "(staging.allow_absent lists tensors that may be missing)"
        )
    for name, (shard, info) in found.items():
        expected = base.tensors.get(name)
        if expected is None:
            if not _matches(name, _HARMLESS_EXTRA) and not (base.is_tied and _is_head(name)):
                raise InvalidSnapshot(
                    f"{shard} has tensor {shown(name)}, which the base model does not have"
                )
        elif info.shape != expected.shape:
            raise InvalidSnapshot(_shape_fault(name, shard, info, expected))
        elif info.dtype != expected.dtype and not {info.dtype, expected.dtype} <= _CONVERTIBLE:
            raise InvalidSnapshot(
                f"tensor {shown(name)} in {shard} has type {info.dtype}, and the base model's has "
                f"{expected.dtype}, which no loader converts"
            )


def _shape_fault(name: str, shard: str, info: TensorInfo, expected: TensorInfo) -> str:
    fault = (
        f"tensor {shown(name)} in {shard} has shape {list(info.shape)}, and the base model's has "
        f"{list(expected.shape)}"
    )
    same_rows = bool(info.shape and expected.shape) and info.shape[1:] == expected.shape[1:]
    if same_rows and info.shape[0] > expected.shape[0] and _matches(name, _VOCABULARY):
        padding = info.shape[0] - expected.shape[0]
        return (
            f"{fault}: the trainer padded the vocabulary by {padding} rows; cut them off in the "
            "export, or let fleet.model be a padded model"
        )
    return fault


def _is_head(name: str) -> bool:
    return name == _HEAD or name.endswith("." + _HEAD)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
