from __future__ import annotations

import collections
import random

import pytest

from evald.engines import ports
from evald.engines.ports import free_port, port_range
from evald.errors import EvaldError


@pytest.fixture(autouse=True)
def nobody_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests of this process were handed."""
    monkeypatch.setattr(ports, "_recent", collections.deque(maxlen=ports.RECENT))


def test_range_lies_outside_of_the_ephemeral_ports() -> None:
    assert port_range("32768\t60999\n") == range(10_000, 32768)
    assert port_range("10240 40000") == range(40_001, 65_536)
    assert port_range("1024 65535") == range(10_000, 65_536)


def test_never_the_same_port_twice() -> None:
    few = range(20_000, 20_050)
    drawn = [
        free_port(rng=random.SystemRandom(), ports=few, is_free=lambda _port: True)
        for _ in range(50)
    ]
    assert sorted(drawn) == list(few)
    with pytest.raises(EvaldError, match=r"cannot find a free port: .* 20000 and 20049 are taken"):
        free_port(ports=few, is_free=lambda _port: True)


def test_skips_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "ATTEMPTS", 3)
    asked: list[int] = []

    def is_free(port: int) -> bool:
        asked.append(port)
        return False

    with pytest.raises(EvaldError, match="cannot find a free port"):
        free_port(ports=range(21_000, 31_000), is_free=is_free)
    assert len(asked) == 3


def test_uses_the_range_of_this_machine() -> None:
    assert ports.LOWEST <= free_port(is_free=lambda _port: True) <= ports.HIGHEST
