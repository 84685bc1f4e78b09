"""Where a process's next log lies, and what a dead one said last."""

from __future__ import annotations

from pathlib import Path

import pytest

from evald.engines.process_log import last_words, log_fault, next_log

KEY = "s3cret"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        ("\n\n  \n", ""),
        ("one\n", "one"),
        ("a\nb\n\nc\nd", "b | c | d"),
        (
            "x\n" * 9000 + "error: no such argument: --dp\n\n  \n",
            "x | x | error: no such argument: --dp",
        ),
        ("10%\r50%\r100%\nValueError: x\n", "50% | 100% | ValueError: x"),
        ("\x1b[1;31mred\x1b[0m\tand\x00black\x1b[?25h\n", r"red and\x00black"),
        ("  f(x)\n  ^^^^~~\nTypeError: y\n", "f(x) | TypeError: y"),
        ("x" * 9000 + "end", "..." + "x" * 297 + "end"),
        (
            "WANDB_API_KEY=w python --api-key k --tp 2",
            "WANDB_API_KEY=(hidden) python --api-key (hidden) --tp 2",
        ),
        (f"args: api_key='{KEY}', tp=2", "args: api_key='(hidden)', tp=2"),
        (KEY + "x" * 299, "...)" + "x" * 299),
    ],
)
def test_last_words(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "1.log"
    path.write_text(log)
    assert last_words(path, secret=KEY) == expected


def test_no_log_has_no_words(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none") == ""
    assert last_words(str(tmp_path)) == ""


def test_numbers_of_logs_go_on_and_the_oldest_go(tmp_path: Path) -> None:
    directory = tmp_path / "engine-0"
    for number in (1, 2, 3):
        path = next_log(directory, keep=2)
        assert path.name == f"{number:04d}.log"
        path.touch()
    (directory / "mine.log").touch()  # somebody else's is left alone
    (directory / "9999.log").touch()
    (directory / "10000.log").touch()
    assert next_log(directory, keep=2).name == "10001.log"
    assert {path.name for path in directory.iterdir()} == {"10000.log", "mine.log"}


def test_whether_a_log_can_be_written(tmp_path: Path) -> None:
    assert log_fault(tmp_path / "engines" / "engine-0") == ""
    assert list((tmp_path / "engines" / "engine-0").iterdir()) == []
    (tmp_path / "file").touch()
    fault = log_fault(tmp_path / "file" / "engine-0")
    assert fault.startswith(f"cannot write into {tmp_path}/file/engine-0: Not a directory; make")
