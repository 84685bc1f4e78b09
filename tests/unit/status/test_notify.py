import errno
import socket
from typing import Self

import pytest

from evald.status.notify import notify


class Manager:
    """Stands where the socket would be: unit tests open none."""

    sent: list[tuple[bytes, str]]

    def __init__(self, fault: OSError | None = None) -> None:
        self.sent = []
        self._fault = fault

    def __call__(self, *_: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def sendto(self, content: bytes, address: str) -> None:
        if self._fault:
            raise self._fault
        self.sent.append((content, address))


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")


@pytest.mark.parametrize(("name", "address"), [("/run/x", "/run/x"), ("@/abs", "\0/abs")])
def test_messages_go_to_the_manager(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    manager = Manager()
    monkeypatch.setattr(socket, "socket", manager)
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    assert notify("READY=1\nSTATUS=ünï")
    assert manager.sent == [("READY=1\nSTATUS=ünï".encode(), address)]


def test_a_manager_that_does_not_listen_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "socket", Manager(ConnectionRefusedError(errno.ECONNREFUSED, "no")))
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    assert not notify("READY=1")
