"""An engine's log as others may see it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from evald.status.engine_log import log_lines


def write(results: Path, text: str, name: str = "0001.log", place: str = "engines/e-0") -> None:
    (results / place).mkdir(parents=True, exist_ok=True)
    (results / place / name).write_bytes(text.encode())


def test_the_last_lines_of_the_newest_log(tmp_path: Path) -> None:
    write(tmp_path, "old\n", "0009.log")
    write(tmp_path, "a\n\nb\rc\n", "0010.log")
    assert log_lines(tmp_path, "e-0", 2) == ("0010.log", ["b", "c"])
    assert log_lines(tmp_path, "e-0", 0) == ("0010.log", [])
    write(tmp_path, "boom\n", place="blackbox")
    assert log_lines(tmp_path, "blackbox", 5) == ("0001.log", ["boom"])


def test_no_secret_gets_out(tmp_path: Path) -> None:
    own, theirs = secrets.token_hex(32), "sk-theirs"
    texts = [
        f"server_args=ServerArgs(model_path='/m', api_key='{own}', admin_api_key='{theirs}')",
        f"server_args={{'model_path': '/m', 'api_key': '{theirs}', 'ssl_keyfile_password': None}}",
        f'{{"api_key": "{theirs}", "port": 1}}',
        f"GET /generate Authorization: Bearer {theirs}",
        f"python -m sglang --api-key {theirs} --port 3",
        f"HF_TOKEN={theirs} started; hf_token={theirs}",
        f"something with {own} in it",
    ]
    write(tmp_path, "\n".join(texts))
    _, lines = log_lines(tmp_path, "e-0", 100)
    assert len(lines) == len(texts)
    for shown in lines:
        assert own not in shown
        assert theirs not in shown
        assert "(hidden)" in shown
    assert "model_path='/m'" in lines[0]
    assert "'ssl_keyfile_password': None" in lines[1]
    # what only sounds like one stays: people look for it
    usual = "Prefill batch, #new-token: 12, token usage: 0.25, max_total_num_tokens=4096"
    write(tmp_path, usual)
    assert log_lines(tmp_path, "e-0", 9)[1] == [usual]


def test_control_characters_and_endless_lines(tmp_path: Path) -> None:
    write(tmp_path, "\x1b[31mred\x1b[0m \x07bell\ttab \u202eright\n" + "x" * 9000)
    first, second = log_lines(tmp_path, "e-0", 9)[1]
    assert first == r"red \x07bell    tab \u202eright"
    assert len(second) < 4100
    write(tmp_path, "begin " + "y" * 1_000_000 + "\nlast\n")
    assert log_lines(tmp_path, "e-0", 9)[1] == ["last"]


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../e-0", "e-0\n", "%2e"])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    write(tmp_path, "secret\n", place="engines")
    with pytest.raises(ValueError, match="it is no engine's name"):
        log_lines(tmp_path, name, 5)


def test_engines_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        log_lines(tmp_path, "e-7", 5)


@pytest.mark.parametrize(
    "word", ["api_key", "--api", "TOKEN_", "password ", "--watermark-c", "KEY"]
)
def test_no_line_takes_long(tmp_path: Path, word: str) -> None:
    """A line is what a prompt or a server says, and a search for secrets holds the daemon up."""
    write(tmp_path, word * (300_000 // len(word)))
    begun = time.process_time()
    log_lines(tmp_path, "e-0", 9)
    assert time.process_time() - begun < 5
