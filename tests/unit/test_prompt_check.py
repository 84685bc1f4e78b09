"""What the check of all prompts makes of files that are not what they were at the start."""

from __future__ import annotations

from pathlib import Path

from evald.config import EvalSet
from evald.prompt_check import Answer, Job, check


def test_a_file_that_is_gone_by_now_stops_nobody(tmp_path: Path) -> None:
    gone = EvalSet(name="a", path=str(tmp_path / "a.jsonl"), grader="exact")
    warning = (
        "WARNING: prompts not checked: cannot read eval set 'a': "
        f"{tmp_path}/a.jsonl: No such file or directory; set path to a JSONL file"
    )
    assert check(Job([gone], str(tmp_path), None)) == Answer(notes=[warning])
