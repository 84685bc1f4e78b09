"""TCP in the config: addresses, tokens, and what a URL may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evald.config import Status
from evald.config_load import build_config
from evald.errors import ConfigError, EvaldError
from evald.results.sample_files import samples_file
from evald.status.client import Remote, find_daemon
from evald.status.listen import check_listen, parse_listen, show_address, tcp_listener
from evald.status.token import TokenError, check_token, read_token

SECRET = "secret-" * 3


def tcp(listen: str | None = None, *, env: str | None = None, file: str | None = None) -> Status:
    return Status(listen=listen, token_env=env, token_file=file)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8008", ("127.0.0.1", 8008)),
        ("eval-node.local:0", ("eval-node.local", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address
    assert show_address(*address) == text


@pytest.mark.parametrize(
    "text", ["8008", ":8008", "::1:8008", "host", "host:", "host:http", "a b:1", "h:1/x", "h:65536"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address; write host:port|has no port from 0"):
        parse_listen(text)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (tcp("127.0.0.1:1"), "set exactly one of .* got neither"),
        (tcp("127.0.0.1:1", env="A", file="b"), "got both"),
        (tcp(env="A"), "status.token_env: without status.listen nobody asks"),
        (tcp(file="a"), "status.token_file: without status.listen nobody asks"),
        (tcp("8008", env="A"), "status.listen: '8008' is no address"),
    ],
)
def test_a_listener_needs_exactly_one_token(status: Status, sentence: str) -> None:
    (problem,) = check_listen(status)
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(problem)


def test_a_good_listener_and_none() -> None:
    assert check_listen(Status()) == []
    assert tcp_listener(Status(), {}) is None
    status = tcp("[::1]:8008", env="T")
    assert check_listen(status) == []
    listener = tcp_listener(status, {"T": f" {SECRET}\n"})
    assert listener is not None
    assert (listener.host, listener.port, listener.token) == ("::1", 8008, SECRET)
    assert SECRET not in repr(listener)


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"status.token_env: the token has 15 characters, and"):
        tcp_listener(tcp("h:1", env="T"), {"T": SECRET[:15]})
    assert tcp_listener(tcp("h:1", env="T"), {"T": SECRET[:16]})


def test_the_config_is_checked_and_its_token_file_made_absolute() -> None:
    raw: dict[str, Any] = {
        "staging": {"root": "/dev/shm/x"},
        "results": {"dir": "out"},
        "fleet": {"model": "base"},
        "eval": [{"name": "math", "path": "math.jsonl"}],
        "status": {"listen": "127.0.0.1:8008", "token_file": "token"},
    }
    config = build_config(raw, base=Path("/etc/evald"), environ={})
    assert config.status.token_file == "/etc/evald/token"  # noqa: S105 - a file's name
    del raw["status"]["token_file"]
    with pytest.raises(ConfigError, match=r"set exactly one of status\.token_env and"):
        build_config(raw, base=Path("/etc/evald"), environ={})


def test_a_token_that_is_missing_is_a_config_error(tmp_path: Path) -> None:
    status = tcp("h:1", env="T")
    with pytest.raises(ConfigError, match=r"status.token_env: .*variable T: it is empty; put"):
        tcp_listener(status, {})
    status = tcp("h:1", file=str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"status.token_file: cannot read token file .*No such"):
        tcp_listener(status, {})


def test_a_token_file_is_for_its_owner_and_group(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")
    path.chmod(0o644)
    with pytest.raises(
        TokenError, match=r"others may read or write it \(mode 0644\); run chmod o="
    ):
        read_token(path)
    path.chmod(0o640)
    assert read_token(path) == "abc"
    path.write_text(" \n")
    with pytest.raises(TokenError, match="it is empty"):
        read_token(path)
    path.write_bytes(b"\xff")
    with pytest.raises(TokenError, match="it is not UTF-8"):
        read_token(path)
    for text in ("two words", "ü", "a\nb"):
        with pytest.raises(TokenError, match="one word of visible ASCII"):
            check_token(text, "x")


def test_a_url_names_a_daemon_with_its_token(tmp_path: Path) -> None:
    found = find_daemon("http://h:1/", environ={"EVALD_TOKEN": "abc"})
    assert found == Remote("http://h:1", "abc")
    assert "abc" not in f"{found} {found!r}"
    path = tmp_path / "token"
    path.write_text("def\n")
    path.chmod(0o600)
    environ = {"EVALD_TOKEN": "abc"}
    assert find_daemon("https://h/p", token_file=str(path), environ=environ) == Remote(
        "https://h/p", "def"
    )
    assert find_daemon("http://h:1", environ={}) == Remote("http://h:1")
    for url in ("http://", "http://h:x", "http://h:0"):
        with pytest.raises(EvaldError, match="that is no URL; write http://host:port"):
            find_daemon(url, environ={})


def test_samples_are_found_by_record_id(tmp_path: Path) -> None:
    assert samples_file(tmp_path, "r/step/40/r0", "a") == tmp_path / "samples/r/step_40.r0/a.jsonl"
    assert (
        samples_file(tmp_path, "r.1/baseline/-1/r2", "b+c@d")
        == tmp_path / "samples/r.1/baseline_-1.r2/b+c@d.jsonl"
    )


@pytest.mark.parametrize(
    ("record_id", "name"),
    [
        ("../step/40/r0", "a"),
        ("r/../40/r0", "a"),
        ("r/step/40/r0/../..", "a"),
        ("r/step/40/r0\n", "a"),
        ("/r/step/40/r0", "a"),
        ("r/step/../r0", "a"),
        ("r/step/40", "a"),
        ("", "a"),
        ("r/step/40/r0", ""),
        ("r/step/40/r0", ".."),
        ("r/step/40/r0", "../a"),
        ("r/step/40/r0", "/etc/passwd"),
        ("r/step/40/r0", "a\x00b"),
    ],
)
def test_no_name_leads_out_of_the_samples(tmp_path: Path, record_id: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot use (record_id|set)="):
        samples_file(tmp_path, record_id, name)
