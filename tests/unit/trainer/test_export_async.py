"""Async mode: training goes on as soon as the weights are in host memory."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import assert_same, assert_valid, changed, experts, names, saved, stored, untied

from evald.trainer.contract import ExportError, NoSpace
from evald.trainer.export import SnapshotExporter
from evald.trainer.export.background import HostBuffer
from evald.trainer.export.pieces import spec_of

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(untied(), tmp_path_factory.mktemp("base"))


@pytest.fixture
def exporter(tmp_path: Path, base: Path) -> Iterator[SnapshotExporter]:
    exporter = SnapshotExporter(
        tmp_path, base_dir=base, mode="async", max_shard_bytes=60_000, busy_timeout_s=LIMIT_S
    )
    yield exporter
    exporter.close(LIMIT_S)


class Gate:
    """Holds every write of this process until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self._write = os.write
        monkeypatch.setattr(os, "write", self._held)

    def open(self) -> None:
        self._open.set()

    def _held(self, fd: int, data: Any) -> int:
        self.reached.set()
        assert self._open.wait(LIMIT_S)
        return self._write(fd, data)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_weights_may_change_the_moment_the_call_returns(
    tmp_path: Path, exporter: SnapshotExporter, gate: Gate
) -> None:
    model = untied()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    future = exporter.export(model, 1)
    changed(model)
    assert gate.reached.wait(LIMIT_S)
    assert not future.done()
    assert [name[0] for name in names(tmp_path)] == ["."]
    gate.open()
    assert_same(stored(future.result(LIMIT_S)), expected)


def test_second_snapshot_waits_for_the_first_and_uses_its_memory(
    tmp_path: Path, exporter: SnapshotExporter, gate: Gate, base: Path
) -> None:
    model = untied()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    one = exporter.export(model, 1)
    changed(model)
    second = {name: value.clone() for name, value in model.state_dict().items()}
    with concurrent.futures.ThreadPoolExecutor(1) as training:
        call = training.submit(exporter.export, model, 2)
        assert not concurrent.futures.wait([call], 0.2).done
        gate.open()
        two = call.result(LIMIT_S)
    assert one.done()
    assert_same(stored(one.result()), first)
    assert_same(stored(two.result(LIMIT_S)), second)
    for step in (1, 2):
        manifest = assert_valid(tmp_path / f"step_{step}", base)
        assert 0 < manifest["stall_s"] < manifest["export_s"]


def test_snapshot_in_flight_for_too_long_is_busy(tmp_path: Path, base: Path, gate: Gate) -> None:
    exporter = SnapshotExporter(tmp_path, base_dir=base, mode="async", busy_timeout_s=0.2)
    one = exporter.export(untied(), 1)
    two = exporter.export(untied(), 2)
    with pytest.raises(ExportError, match=r"step 2: the snapshot before it .* after 0.2 s") as busy:
        two.result(LIMIT_S)
    assert busy.value.reason == "busy"
    gate.open()
    one.result(LIMIT_S)
    exporter.close()
    assert names(tmp_path) == {"step_1"}


def test_failure_in_the_background_is_the_future_s(
    tmp_path: Path, exporter: SnapshotExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int, __: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        future = exporter.export(untied(), 1)
        with pytest.raises(NoSpace, match="step 1: the file system is full"):
            future.result(LIMIT_S)
    assert names(tmp_path) == set()
    exporter.export(untied(), 2).result(LIMIT_S)
    assert names(tmp_path) == {"step_2"}


def test_other_model_than_before(tmp_path: Path) -> None:
    exporter = SnapshotExporter(tmp_path, base_dir=None, mode="async")
    for step, build in enumerate((untied, experts, untied)):
        model = changed(build())
        expected = stored(saved(model, tmp_path / "expected"))
        assert_same(stored(exporter.export(model, step).result(LIMIT_S)), expected)
        for path in (tmp_path / "expected").iterdir():
            path.unlink()
    exporter.close()


def test_prepared_memory_is_what_the_export_uses(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    new_block = HostBuffer._new_block

    def noted(self: HostBuffer, size_bytes: int) -> Any:
        taken.append(size_bytes)
        return new_block(self, size_bytes)

    monkeypatch.setattr(HostBuffer, "_new_block", noted)
    exporter = SnapshotExporter(tmp_path, base_dir=base, mode="async")
    exporter.prepare(untied())
    assert len(taken) == 1
    for step in (1, 2):
        exporter.export(untied(), step).result(LIMIT_S)
    assert len(taken) == 1
    exporter.close()


def test_prepare_never_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    exporter = SnapshotExporter(tmp_path / "file" / "root", base_dir=None, mode="async")
    exporter.prepare(untied())
    assert "export_not_prepared" in capsys.readouterr().out
    SnapshotExporter(tmp_path, base_dir=None).prepare(untied())  # nothing to prepare


def test_too_little_host_memory(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        return 1000

    monkeypatch.setattr("evald.trainer.export.background.available_bytes", available)
    exporter = SnapshotExporter(tmp_path, base_dir=base, mode="async")
    with pytest.raises(ExportError, match=r'host memory .* export with mode="sync"'):
        exporter.export(untied(), 1).result(LIMIT_S)
    assert len(asked) == 1  # and then it did not even try
    with pytest.raises(ExportError, match="host memory"):
        exporter.export(iter(untied().state_dict().items()), 1).result(LIMIT_S)
    exporter.close()
    assert names(tmp_path) == set()


def test_closing_waits_for_the_snapshot_in_flight(tmp_path: Path, base: Path, gate: Gate) -> None:
    exporter = SnapshotExporter(tmp_path, base_dir=base, mode="async")
    future = exporter.export(untied(), 1)
    threading.Timer(0.2, gate.open).start()
    exporter.close(LIMIT_S)
    assert future.done()
    assert json.loads((tmp_path / "step_1" / ".complete").read_bytes())["step"] == 1


def test_forked_process_is_told_to_make_its_own(tmp_path: Path, base: Path) -> None:
    exporter = SnapshotExporter(tmp_path, base_dir=base, mode="async")
    exporter.export(untied(), 1).result(LIMIT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python does not like forks of threaded processes either
        child = os.fork()
    if child == 0:
        code = 1
        try:
            exporter.close(LIMIT_S)
            exporter.export({}, 2)
        except ValueError as error:
            code = 0 if "was forked from the exporter's; make a new one in it" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    exporter.export(untied(), 2).result(LIMIT_S)
    exporter.close(LIMIT_S)
    assert names(tmp_path) == {"step_1", "step_2"}


# --- host memory --------------------------------------------------------------------------------


def test_memory_grows_and_is_used_again() -> None:
    buffer = HostBuffer()
    tensors = [torch.randn(3, 5), torch.arange(7, dtype=torch.uint8), torch.randn(1 << 21)]
    specs = [spec_of(str(number), tensor) for number, tensor in enumerate(tensors)]
    for _ in range(3):
        buffer.clear()
        copies = buffer.copy_all(specs * 3, tensors * 3)
        buffer.wait()
        assert_same(dict(enumerate(copies)), dict(enumerate(tensors * 3)))  # type: ignore[arg-type]
        assert all(copy.data_ptr() % 64 == 0 for copy in copies)
    addresses = [copy.data_ptr() for copy in copies]
    buffer.clear()
    assert [copy.data_ptr() for copy in buffer.copy_all(specs * 3, tensors * 3)] == addresses
    buffer.reserve(specs)
    assert len({copy.data_ptr() for copy in buffer.copy_all(specs, tensors)}) == 3
