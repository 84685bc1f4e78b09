"""The base model's directory: what a snapshot's tensors must be called, and what comes along."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from evald.trainer.contract import ExportError
from evald.trainer.export.checkpoint_names import is_transformers_model
from evald.trainer.export.pieces import TensorSpec
from evald.trainer.export.shards import INDEX, WHOLE
from evald.trainer.export.tensors import is_head

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
#: weights, their indexes, state of a training job: a snapshot has its own, or none.
_LEFT_OUT = (
    "*.safetensors",
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.distcp",
    "trainer_state.json",
    "adapter_config.json",
)
#: a folder of chat templates, beside the tokenizer's own.
_TEMPLATES = "additional_chat_templates"
#: buffers that older checkpoints carry and models compute anew.
_COMPUTED = ("*.rotary_emb.inv_freq",)
#: names that a message shows.
_SHOWN = 3
_TYPE_KEYS = ("dtype", "torch_dtype")

_log = structlog.get_logger("evald.trainer")


class BaseModel(msgspec.Struct, frozen=True):
    """What snapshots must look like; every part of it may be unknown."""

    directory: Path | None = None
    #: name -> shape of each tensor.
    shapes: dict[str, tuple[int, ...]] | None = None
    #: the head shares the embedding's weights, so that it may be there or not.
    is_tied: bool = True

    @classmethod
    def read(cls, base_dir: str | Path | None) -> BaseModel:
        """Read names and shapes from headers; raises ExportError with the cause.

        A hub id, or a directory without safetensors, is no error: then names are not checked.
        """
        if base_dir is None:
            return cls()
        directory = Path(base_dir)
        if not directory.is_dir():
            _log.warning(
                "base_dir_unknown",
                base_dir=str(base_dir),
                why="no such directory here (a hub id?): the snapshots get no tokenizer, and their "
                "tensors' names are not checked; give the directory of the base model",
            )
            return cls()
        try:
            shapes = dict(_shapes(directory))
        except (OSError, ValueError) as error:
            raise ExportError(f"the base model in {directory} cannot be read: {error}") from error
        if not shapes:
            _log.warning(
                "base_dir_without_safetensors",
                base_dir=str(directory),
                why="the names of the snapshots' tensors are not checked",
            )
        return cls(directory, shapes or None, _is_tied(directory, shapes))

    def check(self, specs: Sequence[TensorSpec], allow_absent: Sequence[str]) -> None:
        """Compare all names and shapes of a snapshot; raises ExportError with the cause."""
        if not specs:
            raise ExportError("the weights are empty: they have no tensor at all")
        self.check_part(specs)
        names = {spec.name for spec in specs}
        missing = [
            name
            for name in self.shapes or ()
            if name not in names
            and not (self.is_tied and is_head(name))
            and not _matches(name, (*_COMPUTED, *allow_absent))
        ]
        if missing:
            raise ExportError(
                f"the weights lack {_count(missing)} of the base model in {self.directory} "
                f"({_some(missing)}); export the whole model in its Hugging Face names "
                "(allow_absent lists tensors that may be missing)"
            )

    def check_part(self, specs: Iterable[TensorSpec]) -> None:
        """Compare some names and shapes of a snapshot; raises ExportError with the cause."""
        shapes, known = {spec.name: spec.shape for spec in specs}, self.shapes or {}
        empty = [name for name, shape in shapes.items() if 0 in shape and shape != known.get(name)]
        if empty:
            raise ExportError(
                f"{_count(empty)} came out empty ({_some(empty)}): the weights are elsewhere, as "
                "under DeepSpeed ZeRO-3 or FSDP1; gather them before the export"
            )
        if self.shapes is None:
            return
        extra = [
            name
            for name in shapes
            if name not in known
            and not (self.is_tied and is_head(name))
            and not _matches(name, _COMPUTED)
        ]
        if extra:
            raise ExportError(
                f"the weights have {_count(extra)} that the base model in {self.directory} does "
                f"not have ({_some(extra)}); export them in the base model's Hugging Face names"
            )
        other = [
            f"{name} {list(shape)} instead of {list(known[name])}"
            for name, shape in shapes.items()
            if known.get(name, shape) != shape
        ]
        if other:
            raise ExportError(
                f"{_count(other)} have other shapes than in the base model in {self.directory} "
                f"({_some(other)}); cut padding off, or give the base_dir of this model"
            )


def copy_base_files(base_dir: Path, directory: Path, *, marker: str, dtype: Any = None) -> None:
    """Copy tokenizer, config, templates and code into a snapshot: all but weights and state.

    ``dtype``: the torch type of the weights written, which config.json shall name.
    """
    for path in sorted(base_dir.iterdir()):
        name = path.name
        if name.startswith(".") or name == marker or _matches(name, _LEFT_OUT):
            continue
        if path.is_file():  # links of the hub's cache are followed: a snapshot stands alone
            shutil.copyfile(path, directory / name)
    templates = base_dir / _TEMPLATES
    if templates.is_dir():
        (directory / _TEMPLATES).mkdir(exist_ok=True)
        for path in sorted(templates.glob("*.jinja")):
            shutil.copyfile(path, directory / _TEMPLATES / path.name)
    config = directory / "config.json"
    if dtype is not None and config.exists():
        _name_type(config, dtype)


class OwnConfig(NamedTuple):
    """A transformers model's own config, for where no base directory has one."""

    config: Any
    generation_config: Any

    @classmethod
    def of(cls, model: Any) -> OwnConfig | None:
        """Copy it; None for a module without one."""
        if not is_transformers_model(model):
            return None
        config = copy.deepcopy(model.config)  # saving sets fields of it
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        return cls(config, copy.deepcopy(getattr(model, "generation_config", None)))

    def write(self, directory: Path, dtype: Any) -> None:
        """Write config.json, with the torch type ``dtype``, and generation_config.json."""
        self.config.save_pretrained(str(directory))
        if self.generation_config is not None:
            self.generation_config.save_pretrained(str(directory))
        if dtype is not None:
            _name_type(directory / "config.json", dtype, add=True)


def _name_type(path: Path, dtype: Any, *, add: bool = False) -> None:
    """Correct the type that a config names; what names this one, or none, stays untouched."""
    name = str(dtype).removeprefix("torch.")
    config = json.loads(path.read_bytes())
    changed = add and not any(config.get(key) for key in _TYPE_KEYS)
    if changed:
        config[_TYPE_KEYS[0]] = name
    for part in (config, config.get("text_config")):
        for key in _TYPE_KEYS if isinstance(part, dict) else ():
            if part.get(key) not in {None, name}:
                part[key] = name
                changed = True
    if changed:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _shapes(directory: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in _weight_files(directory):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"{path.name} has a damaged header")
            header = json.loads(file.read(length))
        try:
            header.pop(_METADATA, None)
            shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name} has a damaged header") from error
        yield from shapes.items()


def _weight_files(directory: Path) -> list[Path]:
    """Return the files that loaders read; some directories hold other formats beside them."""
    try:
        index = json.loads((directory / INDEX).read_bytes())
    except FileNotFoundError:
        whole = directory / WHOLE
        return [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))
    try:
        return sorted({directory / name for name in index["weight_map"].values()})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{INDEX} has no weight_map that says which tensor is in which file"
        ) from error


def _is_tied(directory: Path, shapes: Iterable[str]) -> bool:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise ExportError(f"the base model's config.json cannot be read: {error}") from error
    for part in (config.get("text_config") or {}, config):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return not any(is_head(name) for name in shapes)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensors" if len(names) != 1 else "1 tensor"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
