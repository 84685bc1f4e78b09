"""The ranks of a job: one process, or torch.distributed with one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from evald.trainer import ranks as module
from evald.trainer.contract import Alone, PeerLost, Ranks
from evald.trainer.ranks import Processes, cause_of, current_ranks, near_ranks, separate


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Played:
    """Rank 0 of a job whose other ranks answer as they are told."""

    rank = 0

    def __init__(self, *others: Any) -> None:
        self.size = 1 + len(others)
        self.near: tuple[int, ...] = (0,)
        self._others = others

    def exchange(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_a_job_without_torch_distributed_is_alone() -> None:
    ranks = current_ranks()
    assert isinstance(ranks, Alone)
    assert (ranks.rank, ranks.size, ranks.near) == (0, 1, (0,))
    assert ranks.exchange("x") == ["x"]
    assert separate(ranks) is ranks
    with pytest.raises(ValueError, match=r"not initialised; call init_process_group first, or use"):
        Processes()


@pytest.mark.usefixtures("job")
def test_one_process_needs_no_group() -> None:
    assert isinstance(current_ranks(), Alone)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("near", ["host", "all"])
def test_exchange_over_a_group_of_its_own(near: Any) -> None:
    ranks: Ranks = Processes(timeout_s=5.0, near=near)
    assert (ranks.rank, ranks.size, ranks.near) == (0, 1, (0,))
    assert ranks.exchange({"a": Path("/b")}) == [{"a": Path("/b")}]
    other = separate(ranks)
    assert other is not ranks
    dist.destroy_process_group()  # the job ends its own groups while an export is under way
    assert ranks.exchange(1) == [1]
    assert isinstance(ranks, Processes)
    ranks.close()
    ranks.close()
    with pytest.raises(PeerLost, match="this rank has closed the exchange"):
        ranks.exchange(1)
    assert other.exchange(2) == [2]


@pytest.mark.usefixtures("job")
def test_wrong_timeout() -> None:
    with pytest.raises(ValueError, match="cannot wait 0 s for other ranks"):
        Processes(timeout_s=0.0)


@pytest.mark.usefixtures("job")
def test_two_threads_never_mix_their_values() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        """Takes its time while it is pickled, in the middle of an exchange."""

        def __reduce__(self) -> Any:
            inside.set()
            assert leave.wait(10.0)
            return (str, ("slow",))

    ranks = Processes(timeout_s=5.0)
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.extend(ranks.exchange(Slow())))
    thread.start()
    assert inside.wait(10.0)
    with pytest.raises(ValueError, match="in two threads at once"):
        ranks.exchange(1)
    leave.set()
    thread.join(10.0)
    assert values == ["slow"]
    assert ranks.exchange(1) == [1]


def test_near_are_those_who_can_write(tmp_path: Path) -> None:
    assert near_ranks(Alone(), tmp_path) == (0,)
    assert near_ranks(Played(True, False, True), tmp_path) == (0, 1, 3)
    assert list(tmp_path.iterdir()) == []
    # rank 0 is near also when it cannot write: its own write says why
    assert near_ranks(Played(False), tmp_path / "gone") == (0,)
    file = tmp_path / "file"
    file.touch()
    assert near_ranks(Alone(), file) == (0,)


def test_two_containers_of_a_host_are_two_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = module._place()
    monkeypatch.setattr(module, "_SHARED_MEMORY", Path("/proc"))
    assert module._place()[0] == here[0]
    assert module._place() != here
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "none")
    host, device = module._place()
    assert host
    assert device is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:689. This is.",
            "Connection closed by peer [127.0.0.1]:689",
        ),
        ("Timed out waiting 5000ms\nfor recv operation to complete", None),
        ("", "RuntimeError"),
    ],
)
def test_cause_is_one_sentence(text: str, expected: str | None) -> None:
    assert cause_of(RuntimeError(text)) == (expected or text.replace("\n", " "))
