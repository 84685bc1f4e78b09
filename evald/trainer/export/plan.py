"""What a snapshot will hold, known before a byte of it is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash
from torch import nn

from evald.trainer.export.base_files import BaseModel, OwnConfig, copy_base_files
from evald.trainer.export.gather import unwrap
from evald.trainer.export.lora import WEIGHTS, Adapter, adapters, without_shell
from evald.trainer.export.setting import Options
from evald.trainer.export.shards import ShardFile, plan_files, write_index
from evald.trainer.export.tensors import main_type, plan_pieces


@dataclass(frozen=True)
class Plan:
    """The files of a snapshot; of an iterator's weights nothing is known before they are there."""

    shards: Sequence[ShardFile] = ()
    adapters: Sequence[Adapter] = ()
    #: the model's, where no base directory has one.
    own_config: OwnConfig | None = None
    is_stream: bool = False

    @classmethod
    def of(cls, weights: Any, base: BaseModel, options: Options) -> Self:
        """Plan the snapshot of ``weights``; raises ExportError when they are not the base's."""
        pieces = plan_pieces(weights, base.shapes, options.dtype)
        if pieces is None:
            return cls(is_stream=True)
        base.check([spec for piece in pieces for spec in piece.outputs], options.allow_absent)
        shards = plan_files(pieces, options.max_shard_bytes)
        if not isinstance(weights, nn.Module):
            return cls(shards)
        model = unwrap(weights)
        own_config = OwnConfig.of(without_shell(model)) if base.directory is None else None
        return cls(shards, adapters(model), own_config)

    @property
    def files(self) -> list[ShardFile]:
        """All safetensors files: the shards, then the adapters."""
        return [*self.shards, *(_adapter_file(adapter) for adapter in self.adapters)]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for file in self.files for spec in file.specs)

    def fingerprint(self) -> str:
        """Return what is the same on every rank that plans the same."""
        files = [(file.name, file.specs) for file in self.files]
        return xxhash.xxh3_64_hexdigest(repr((self.is_stream, files)).encode())

    def write_rest(self, directory: Path, base: BaseModel, *, marker: str) -> None:
        """Write everything of the snapshot that is no tensor, into ``directory``."""
        write_index(directory, self.shards)
        dtype = main_type(spec for file in self.shards for spec in file.specs)
        if base.directory is not None:
            copy_base_files(base.directory, directory, marker=marker, dtype=dtype)
        elif self.own_config is not None:
            self.own_config.write(directory, dtype)
        for adapter in self.adapters:
            adapter.write_config(directory)


def _adapter_file(adapter: Adapter) -> ShardFile:
    size = sum(spec.size_bytes for piece in adapter.pieces for spec in piece.outputs)
    [file] = plan_files(adapter.pieces, size)
    return file._replace(name=f"{adapter.folder}/{WEIGHTS}")
