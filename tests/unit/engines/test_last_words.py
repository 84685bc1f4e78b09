"""What a dead server said last."""

from __future__ import annotations

from pathlib import Path

from evald.engines.last_words import last_words


def test_the_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x\n" * 9000 + b"error: unrecognized arguments: --contextlength=1\n\n  \n")
    assert last_words(str(log), None) == "error: unrecognized arguments: --contextlength=1"


def test_the_key_never_gets_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("args: api_key='s3cret' \x1b[31m")
    assert last_words(str(log), "s3cret") == r"args: api_key='***' \x1b[31m"


def test_no_log_has_no_words(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert last_words(str(tmp_path / "empty"), None) == ""
    assert last_words(str(tmp_path / "none"), None) == ""
