from __future__ import annotations

import time
from pathlib import Path

import pytest
from rig import rig, until

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

#: the last table of the rig's config is a set with ten questions, whose label is 7.
TABLE = """
grader = "boxed_python"
[eval.grader_config]
function = "my_graders:half"
pass_env = ["HALF"]
"""
MODULE = """
import os
async def half(response, reference, metadata, prompt):
    assert response == reference and prompt.startswith("b")
    return {"score": os.environ["HALF"] and float(os.environ["HALF"]), "answer": response}
"""


def test_a_daemon_grades_with_a_users_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALF", "0.5")
    with rig(tmp_path, python=write_fake_python(tmp_path / "fake-python")) as r:
        (tmp_path / "my_graders.py").write_text(MODULE)
        r.config.write_text(r.config.read_text() + TABLE)
        r.start()
        write_snapshot(r.root / "step_1", answer=7)
        point = r.point(1)
        assert str(point.outcome) == "ok", point.detail
        assert (point.metrics["eval/a"], point.metrics["eval/b"]) == (1.0, 0.5)
        version = point.provenance["sets"]["b"]["grader_version"]
        assert "my_graders:half" in version
        workers = [pid for pid in r.processes() if "my_graders" in command(pid)]
        assert workers
        r.kill()
        until(lambda: not any(map(command, workers)), "the grader's processes are gone")


def test_a_daemon_does_not_start_without_its_grader(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "fake-python")) as r:
        r.config.write_text(r.config.read_text() + TABLE)
        started = time.monotonic()
        done = r.evald("check", str(r.config))
        assert done.returncode == 78
        assert "eval set 'b': grader 'boxed_python': cannot import my_graders:half" in done.stderr
        assert time.monotonic() - started < 30


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""
