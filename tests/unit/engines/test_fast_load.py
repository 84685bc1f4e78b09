"""The reader inside the engine: the same tensors as SGLang's own loader reads, from any file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from evald.engine_plugin.evald_fast_load import plugin as plugin_module
from evald.engine_plugin.evald_fast_load import reader, shards
from evald.engine_plugin.evald_fast_load.plugin import LOAD_FORMAT, MARK, Plugin
from evald.engine_plugin.evald_fast_load.reader import default_threads, read_tensors
from evald.engine_plugin.evald_fast_load.shards import Unsupported

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
]
Named = list[tuple[str, torch.Tensor]]


def read(*paths: Path) -> Named:
    return list(read_tensors(paths, device=CPU, threads=3))


def by_sglangs_own(path: Path) -> Named:
    """What its iterator does with one file."""
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    return [(name, tensors[name]) for name in sorted(tensors)]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(got: Named, wanted: Named) -> None:
    assert [name for name, _ in got] == [name for name, _ in wanted]
    for (name, mine), (_, theirs) in zip(got, wanted, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        assert bits(mine) == bits(theirs), name


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and pieces as small as these files need them."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(reader, "PIECE_BYTES", 1000)


@pytest.mark.usefixtures("small_chunks")
def test_every_dtype_and_shape_bit_by_bit_and_in_order(tmp_path: Path) -> None:
    tensors = {
        f"{len(shape)}.{dtype}": noise(index, *shape, dtype=dtype)
        for index, dtype in enumerate(DTYPES)
        for shape in [(), (3, 5), (2, 0), (7, 1, 11)]
    }
    tensors["large"] = noise(1, 3, 10_001)  # many chunks' size, and no multiple of a piece
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    same(read(path), by_sglangs_own(path))


@pytest.mark.usefixtures("small_chunks")
def test_files_come_in_the_order_given(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "ba"]
    for seed, path in enumerate(paths):
        save_file({f"{path.stem}{i}": noise(seed + i, 900) for i in range(9)}, path)
    same(read(*paths), [*by_sglangs_own(paths[0]), *by_sglangs_own(paths[1])])


def write(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 0) -> None:
    """Write a file in the order given: names sort otherwise, and data may lie anywhere."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("pad", [0, 3])
def test_any_layout(tmp_path: Path, pad: int) -> None:
    path = tmp_path / "model.safetensors"
    write(
        path,
        {
            "z": ("I64", [2], bytes(range(16))),
            "odd": ("U8", [3], b"abc"),
            "b": ("I32", [1000], bytes(i % 251 for i in range(4000))),
            "a": ("BF16", [5], bytes(range(10))),
            "y": ("F32", [500], bytes(i % 7 for i in range(2000))),
        },
        pad,
    )
    got = dict(read(path))
    assert list(got) == sorted(got)
    assert bits(got["z"]) == bytes(range(16))
    assert bits(got["odd"]) == b"abc"
    assert bits(got["b"]) == bytes(i % 251 for i in range(4000))
    assert bits(got["a"]) == bytes(range(10))
    assert bits(got["y"]) == bytes(i % 7 for i in range(2000))


@pytest.mark.usefixtures("small_chunks")
def test_memory_goes_with_its_tensors_and_no_more_is_taken_than_the_window(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{i:03d}": noise(i, 3000) for i in range(40)}, path)
    taken: list[int] = []

    class Counting(reader.Lane):
        def memory(self, size: int, *, needed: bool) -> torch.Tensor | None:
            taken.append(size)
            return super().memory(size, needed=needed)

    lane, reader.Lane = reader.Lane, Counting  # type: ignore[misc]
    try:
        tensors = read_tensors([path], device=CPU, threads=2)
        assert taken == []
        next(tensors)
        assert len(taken) == 1 + reader.CHUNKS_AHEAD
        for _ in range(9):
            next(tensors)
        assert len(taken) == 10 + reader.CHUNKS_AHEAD
        del tensors  # an end before the end: no thread is left behind, nothing hangs
    finally:
        reader.Lane = lane  # type: ignore[misc]


@pytest.mark.usefixtures("small_chunks")
def test_where_there_is_no_memory_ahead_chunks_come_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{i}": noise(i, 3000) for i in range(5)}, path)

    class Scarce(reader.Lane):
        def memory(self, size: int, *, needed: bool) -> torch.Tensor | None:
            return super().memory(size, needed=True) if needed else None

    monkeypatch.setattr(reader, "Lane", Scarce)
    same(read(path), by_sglangs_own(path))


def test_file_that_ends_early_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": noise(0, 3000), "b": noise(1, 3000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors ends before b does"):
        read_tensors([path], device=CPU, threads=2)  # before anything is loaded
    path.write_bytes(content)
    tensors = read_tensors([path], device=CPU, threads=2)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors ends before byte"):
        list(tensors)


def test_what_only_sglang_may_know_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for dtype, shape in [("F4", [4]), ("I32", [3])]:
        write(path, {"a": (dtype, shape, b"abcd")})
        with pytest.raises(Unsupported):
            read(path)


def test_ranks_share_the_cores() -> None:
    assert default_threads(10_000) == 2
    assert 2 <= default_threads() <= reader.THREADS


# --- the plugin ----------------------------------------------------------------------------------


class Server:
    """SGLang's part: an update that reads all tensors through the hooks, and rolls back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plugin = Plugin()
        self.refuses: Callable[[str], bool] = lambda _name: False
        #: which loader each load was by.
        self.own: list[bool] = []

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = False

        def original(_files: list[str], **_options: Any) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal own
            own = True
            return iter(by_sglangs_own(self.path))

        tensors = self.plugin.weights(original, [str(self.path)], max_workers=8)
        self.own.append(own)
        return tensors

    def load(self, _updater: object, _path: str, load_format: str) -> tuple[bool, str]:
        assert load_format in {"auto", LOAD_FORMAT}
        refused = next((name for name, _ in self.weights() if self.refuses(name)), None)
        if refused is not None:
            list(self.weights())
            return False, f"Failed: {refused}"
        return True, "Succeeded."

    def update(self, load_format: str) -> tuple[bool, str]:
        return self.plugin.update(self.load, object(), "somewhere", load_format)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    path = tmp_path / "model.safetensors"
    save_file({"a": noise(0, 3000), "b": noise(1, 3000)}, path)
    return Server(path)


def test_only_the_update_that_asks_for_it_is_fast_and_says_so(server: Server) -> None:
    list(server.weights())  # the start
    assert server.update("auto") == (True, f"Succeeded. {MARK}:")
    assert server.own == [True, True]
    assert server.update(LOAD_FORMAT) == (True, f"Succeeded. {MARK}: 6000 bytes read;")
    list(server.weights())  # and nothing sticks
    assert server.own == [True, True, False, True]


def test_roll_back_is_sglangs_own(server: Server) -> None:
    server.refuses = lambda name: name == "b"
    assert server.update(LOAD_FORMAT) == (False, "Failed: b")
    assert server.own == [False, True]
    server.refuses = lambda _name: False
    assert "bytes read" in server.update(LOAD_FORMAT)[1]


def test_what_it_cannot_read_is_not_called_fast(server: Server, tmp_path: Path) -> None:
    odd = tmp_path / "odd.safetensors"
    write(odd, {"a": ("F4", [8], b"abcd")})

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        return server.plugin.weights(lambda _files: iter(by_sglangs_own(server.path)), [str(odd)])

    server.weights = weights  # type: ignore[method-assign]
    assert server.update(LOAD_FORMAT) == (True, f"Succeeded. {MARK}:")


def test_processes_that_load_nothing_are_left_alone() -> None:
    plugin_module.register()  # no SGLang here: it would fail
