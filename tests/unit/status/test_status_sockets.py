import os
from pathlib import Path

import pytest

from evald.config import Config, Fleet, Results, Staging, Status
from evald.errors import ConfigError, EvaldError
from evald.status.sockets import check_fallback, fallback_dir, runtime_dirs, socket_path


def config(results: str, path: str | None = None) -> Config:
    return Config(
        run="demo",
        staging=Staging(root="/r"),
        results=Results(dir=results),
        status=Status(socket=path),
        fleet=Fleet(model="m"),
        eval=[],
    )


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_the_runtime_directory_is_systemds_then_the_sessions_then_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fallback = fallback_dir()
    assert fallback.name == f"evald-{os.geteuid()}"
    assert runtime_dirs()[0] == fallback
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_dirs()[:2] == [Path("/run/user/7/evald"), fallback]
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/evald-a:/run/other")
    assert runtime_dirs()[:2] == [Path("/run/evald-a"), Path("/run/user/7/evald")]


def test_a_socket_is_named_after_run_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/evald")
    one, other = socket_path(config("/a")), socket_path(config("/b"))
    assert one.parent == Path("/run/evald")
    assert one.name.startswith("demo-")
    assert len(one.name) == len("demo-12345678.sock")
    assert one != other
    assert one == socket_path(config("/x/../a"))
    assert socket_path(config("/a", "/s/x.sock")) == Path("/s/x.sock")


def test_a_path_that_is_too_long_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"it has 108 bytes.*at most 107; set status.socket"):
        socket_path(config("/a", "/" + "ü" * 53 + "x"))
    assert socket_path(config("/a", "/" + "ü" * 53))


def test_the_fallback_must_be_private(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    check_fallback(private)
    private.chmod(0o750)
    with pytest.raises(EvaldError, match=r"others may enter it \(mode 0750"):
        check_fallback(private)
    link = tmp_path / "link"
    link.symlink_to(private)
    with pytest.raises(EvaldError, match="it is not a directory; remove it, or set"):
        check_fallback(link)


def test_the_fallback_must_be_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(EvaldError, match="it belongs to user"):
        check_fallback(tmp_path)
