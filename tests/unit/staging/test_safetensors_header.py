import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from staging_cases import FUZZ, refusal

from evald.errors import InvalidSnapshot
from evald.staging.safetensors_header import (
    DTYPE_BITS,
    TensorInfo,
    header_length,
    parse_header,
    read_header,
    shown,
)
from evald.testing import model_tensors, write_safetensors


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_good_file_gives_its_tensors(tmp_path: Path) -> None:
    tensors = model_tensors()
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = read_header(tmp_path / "model.safetensors")
    assert found == {
        name: TensorInfo(tensor.dtype, tensor.shape, len(tensor.data))
        for name, tensor in tensors.items()
    }


def test_empty_and_packed_tensors_are_fine(tmp_path: Path) -> None:
    header = {
        "none": entry(0, 0, [0, 3]),
        "scalar": entry(0, 4, []),
        "packed": entry(4, 5, [2], "F4"),
    }
    assert list(read_header(write(tmp_path / "a.safetensors", header, b"12345"))) == list(header)


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (b"{", b"", "a.safetensors has a header that is not JSON"),
        (b"[]", b"", "a.safetensors has a header that is not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b'{"\xff": 1}', b"", "not JSON"),
        ({"__metadata__": {"a": 1}}, b"", "not JSON"),
        ({"w": {"dtype": "F32"}}, b"", "tensor w"),
        ({"w": entry(0, 4, [-1])}, b"1234", "tensor w"),
        ({"w": entry(0, 4, [10**30])}, b"1234", "tensor w"),
        ({"w": entry(0, 4, [1], "F31")}, b"1234", "tensor w of unknown type F31"),
        (
            {"w": entry(0, 4, [2])},
            b"1234",
            "tensor w with 4 bytes, but type F32 and shape [2] need 8",
        ),
        ({"w": entry(0, 1, [1], "F4")}, b"1", "need 1"),
        ({"w": entry(4, 8, [1])}, b"12345678", "tensor w at byte 4 leaves a gap after the header"),
        (
            {"v": entry(0, 8, [2]), "w": entry(4, 8, [1])},
            b"12345678",
            "tensor w at byte 4 overlaps tensor v, which ends at 8",
        ),
        ({"w": entry(0, 8, [2])}, b"1234", "truncated: its tensors (the last is w) take 8 bytes"),
        ({"w": entry(0, 4, [1])}, b"12345", "has 1 bytes after its last tensor"),
        ({}, b"1", "has 1 bytes after its last tensor"),
    ],
)
def test_every_fault_is_one_sentence(
    tmp_path: Path, header: object, data: bytes, sentence: str
) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    with pytest.raises(InvalidSnapshot) as caught:
        read_header(path)
    assert sentence in caught.value.detail
    assert caught.value.detail.startswith("a.safetensors")
    assert "\n" not in caught.value.detail


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "truncated: 0 bytes hold no header"),
        (b"1234567", "truncated: 7 bytes hold no header"),
        (struct.pack("<Q", 10) + b"{}", "its header alone takes 18 bytes, and the file has 10"),
        (b"\xff" * 9, "damaged header: its length says"),
    ],
)
def test_a_bad_length_is_told(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(InvalidSnapshot) as caught:
        read_header(tmp_path / "a.safetensors")
    assert sentence in caught.value.detail


def test_names_in_sentences_are_printable_and_short() -> None:
    assert shown("model.norm") == "model.norm"
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 10_000)) == 160


offsets = st.integers(-2, 2**70)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "X"]),
        "shape": st.lists(st.integers(-1, 2**64), max_size=80),
        "data_offsets": st.lists(offsets, min_size=1, max_size=3),
    }
)
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
headers = st.dictionaries(
    st.text() | st.just("__metadata__"), entries | json_values, max_size=5
).map(lambda header: json.dumps(header).encode())


@FUZZ
@given(header=st.binary() | headers, data_bytes=st.integers(0, 2**70))
def test_any_header_is_valid_or_invalid(header: bytes, data_bytes: int) -> None:
    sentence = refusal(lambda: parse_header(header, data_bytes, "a.safetensors"))
    if sentence is None:
        tensors = parse_header(header, data_bytes, "a.safetensors")
        assert sum(tensor.size_bytes for tensor in tensors.values()) == data_bytes
    else:
        assert sentence.startswith("a.safetensors")
        assert sentence.isprintable()


@FUZZ
@given(prefix=st.binary(max_size=12), file_bytes=st.integers(0, 2**63))
def test_any_length_is_valid_or_invalid(prefix: bytes, file_bytes: int) -> None:
    if refusal(lambda: header_length(prefix, file_bytes, "a.safetensors")) is None:
        assert 8 + header_length(prefix, file_bytes, "a.safetensors") <= file_bytes


@FUZZ
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(["F32", "BF16", "I8"]), st.lists(st.integers(0, 9), max_size=3)),
        max_size=6,
    ),
    spare=st.integers(-1, 1),
)
def test_gapless_tensors_are_valid_at_exactly_their_size(
    shapes: list[tuple[str, list[int]]], spare: int
) -> None:
    header, at = {}, 0
    for number, (dtype, shape) in enumerate(shapes):
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[f"t{number}"] = entry(at, at + size, shape, dtype)
        at += size
    text = json.dumps(header).encode()
    if spare == 0:
        assert len(parse_header(text, at, "a")) == len(shapes)
    elif at + spare >= 0:
        with pytest.raises(InvalidSnapshot):
            parse_header(text, at + spare, "a")
