"""Each attempt of a black box has an output directory of its own."""

from __future__ import annotations

from pathlib import Path

from evald.point import PointKey
from evald.postures.blackbox.process import new_output


def test_every_attempt_has_an_empty_directory_of_its_own(tmp_path: Path) -> None:
    first = new_output(tmp_path, PointKey("r", 4), keep=2)
    (first / "results.json").touch()
    again = new_output(tmp_path, PointKey("r", 4), keep=2)
    assert (first.name, again.name) == ("000001-r-step_4.r0", "000002-r-step_4.r0")
    assert not list(again.iterdir())
    (again.parent / "mine").mkdir()  # somebody else's is left alone
    new_output(tmp_path, PointKey("r", 5, 1), keep=2)
    assert sorted(path.name for path in again.parent.iterdir()) == [
        "000002-r-step_4.r0",
        "000003-r-step_5.r1",
        "mine",
    ]
