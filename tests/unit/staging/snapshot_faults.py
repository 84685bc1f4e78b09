"""Snapshots that are not quite right, and the sentence that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from staging_cases import (
    base_model,
    tensors,
)

from evald.errors import InvalidSnapshot
from evald.staging.validate import validate
from evald.testing import Tensor

EMBEDDING = "model.embed_tokens.weight"


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
