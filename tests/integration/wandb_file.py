"""Reads back what W&B has put into the file of an offline run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768
_FILE_HEADER = 7
_CHUNK_HEADER = struct.Struct("<IHB")
_LAST_KINDS = {1, 4}


class WandbFile:
    """The records of ``run-ID.wandb``: a log in blocks, whose chunks add up to records."""

    def __init__(self, path: Path) -> None:
        self.records = [wandb_internal_pb2.Record.FromString(raw) for raw in _raw(path)]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The commits, without what W&B adds itself."""
        rows = [
            _items(one.history.item)
            for one in self.records
            if one.WhichOneof("record_type") == "history"
        ]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    @property
    def steps(self) -> list[int]:
        """W&B's own counter of each commit."""
        return [
            one.history.step.num
            for one in self.records
            if one.WhichOneof("record_type") == "history"
        ]

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        for one in self.records:
            summary |= _items(one.summary.update)
        return {k: v for k, v in summary.items() if not k.startswith("_")}

    @property
    def step_metrics(self) -> dict[str, str]:
        """Metric, or its glob -> what it is drawn over."""
        metrics = [one.metric for one in self.records if one.WhichOneof("record_type") == "metric"]
        return {one.name or one.glob_name: one.step_metric for one in metrics}

    @property
    def run(self) -> Any:
        return next(one.run for one in self.records if one.WhichOneof("record_type") == "run")


def _items(items: Any) -> dict[str, Any]:
    return {
        ".".join(one.nested_key) or one.key: json.loads(one.value_json, parse_constant=str)
        for one in items
    }


def _raw(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    offset, record = _FILE_HEADER, b""
    while offset + _CHUNK_HEADER.size <= len(content):
        left = _BLOCK - offset % _BLOCK
        if left < _CHUNK_HEADER.size:  # too little for a chunk
            offset += left
            continue
        _crc, length, kind = _CHUNK_HEADER.unpack_from(content, offset)
        offset += _CHUNK_HEADER.size
        record += content[offset : offset + length]
        offset += length
        if kind in _LAST_KINDS:
            yield record
            record = b""
