"""Logs and directories of a black box, and the last words of what has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from evald.point import PointKey
from evald.postures.blackbox_process import Attempts, last_words


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        ("one\n", "one"),
        ("a\nb\n\nc\nd", "b | c | d"),
        ("10%\r50%\r100%\nValueError: x\n", "50% | 100% | ValueError: x"),
        ("\x1b[31mred\x1b[0m\tand\x00black\n", "red and black"),
        ("  f(x)\n  ^^^^~~\nTypeError: y\n", "f(x) | TypeError: y"),
        ("x" * 9000 + "end", "..." + "x" * 297 + "end"),
    ],
)
def test_last_words(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "1.log"
    path.write_text(log)
    assert last_words(path) == expected


def test_a_log_that_is_gone(tmp_path: Path) -> None:
    assert last_words(tmp_path / "1.log") == "(cannot read it: No such file or directory)"


def test_every_attempt_has_an_empty_directory_of_its_own(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "blackbox", keep=2)
    first = attempts.new_output(PointKey("r", 4))
    (first / "results.json").touch()
    again = attempts.new_output(PointKey("r", 4))
    assert (first.name, again.name) == ("000001-r-step_4.r0", "000002-r-step_4.r0")
    assert not list(again.iterdir())
    (again.parent / "mine").mkdir()  # somebody else's is left alone
    attempts.new_output(PointKey("r", 5, 1))
    assert sorted(path.name for path in again.parent.iterdir()) == [
        "000002-r-step_4.r0",
        "000003-r-step_5.r1",
        "mine",
    ]
    log = attempts.new_log()
    log.touch()
    assert (log.name, attempts.new_log().name) == ("000001.log", "000002.log")
