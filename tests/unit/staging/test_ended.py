"""The list of what has ended in a root, whatever somebody has put in its place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evald.point import PointKey
from evald.staging.ended import EndedList
from evald.staging.files import open_file


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "../..", "/etc/hostname"])
def test_a_name_that_cannot_be_looked_at_is_forgotten(tmp_path: Path, name: str) -> None:
    path = tmp_path / ".evald" / "ended.json"
    path.parent.mkdir()
    one = {"fingerprint": "f", "run": "t", "step": 1}
    path.write_text(json.dumps({"ended": {name: one}}))
    ended = EndedList(tmp_path)
    ended.load()
    (tmp_path / "step_2").mkdir()
    ended.note(tmp_path / "step_2", "g", PointKey("t", 2))
    again = EndedList(tmp_path)
    again.load()
    found = again.find(tmp_path / "step_2", "g")
    assert found is not None
    assert found.step == 2


def test_a_pipe_in_the_place_of_the_list_is_an_empty_list(tmp_path: Path) -> None:
    path = tmp_path / ".evald" / "ended.json"
    path.parent.mkdir()
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # a writer that writes nothing
    try:
        ended = EndedList(tmp_path)
        ended.load()
        assert ended.find(tmp_path / "step_1", "f") is None
    finally:
        os.close(held)


@pytest.mark.parametrize("place", ["/dev/zero", "/dev", "nothing"])
def test_only_a_regular_file_is_opened(tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(OSError, match=r"regular|directory"):
        open_file(tmp_path / "link")
