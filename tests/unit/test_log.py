import json
import os
import sys
from pathlib import Path

import pytest
import structlog

from evald.log import configure_logging, journal_lines, to_journal


def test_a_line_of_the_journal_has_its_priority_and_fields() -> None:
    line = journal_lines(
        None,
        "info",
        {"event": "point_ended", "level": "warning", "step": 40, "detail": 'a "b" c', "x": None},
    )
    assert line == '<4>point_ended step=40 detail="a \\"b\\" c" x=null'


def test_what_looks_like_fields_cannot_forge_any() -> None:
    line = journal_lines(None, "info", {"event": "seen", "level": "info", "name": "a outcome=ok"})
    assert line == '<6>seen name="a outcome=ok"'
    assert journal_lines(None, "info", {"event": "x", "level": "info", "d": {"a": 1}}) == (
        '<6>x d={"a": 1}'
    )


def test_every_line_of_a_traceback_has_the_priority() -> None:
    event = {"event": "bug", "level": "error", "exception": "Traceback:\n  a\n  b"}
    assert journal_lines(None, "error", event).splitlines() == [
        "<3>bug",
        "<3>Traceback:",
        "<3>  a",
        "<3>  b",
    ]


@pytest.mark.parametrize("journal", [True, False])
def test_where_standard_error_leads(
    journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        status = os.fstat(file.fileno())
        stream = f"{status.st_dev}:{status.st_ino}" if journal else "8:1"
        assert to_journal(stream) is journal
        configure_logging("info", {"JOURNAL_STREAM": stream})
        structlog.get_logger().warning("seen", name="x\ny")
        structlog.get_logger().debug("not_seen")
    written = (tmp_path / "log").read_text()
    if journal:
        assert written == '<4>seen name="x\\\\ny"\n'
    else:
        assert json.loads(written)["name"] == "x\\ny"


def test_the_level_can_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        log = structlog.get_logger("of a module")
        configure_logging("info", {})
        log.debug("one")
        configure_logging("debug", {})
        log.debug("two")
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["event"] == "two"
