from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from demo_stage import SETS, Stage

from evald.demo.scene import Scene
from evald.demo.screen import Screen, chart_lines, duration, live_lines, table_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def scene(stage: Stage) -> Scene:
    return Scene(stage.layout, steps=6, every=2, sets=SETS)


def middle(stage: Stage, scene: Scene) -> None:
    stage.says("published", step=2)
    stage.says("published", step=4)
    stage.says("progress", step=5, loss=0.5, seconds=61.0)
    stage.ends(2, 0.5, 0.3)
    stage.shows(running={4: "pinning"})
    scene.refresh()


def test_table(stage: Stage, scene: Scene) -> None:
    middle(stage, scene)
    assert table_lines(scene) == [
        " step  state      sets  copy   add   mean stderr   lag",
        "    2  ok          2/2 0.500 0.300  0.400  0.028     4",
        "    4  pinning     0/2                               0",
        "    6  training",
    ]


def test_live_lines_before_and_in_the_middle(stage: Stage, scene: Scene) -> None:
    assert live_lines(scene, 5)[:2] == ["trainer: starting    time: 5 s", "evald: starting"]
    middle(stage, scene)
    assert live_lines(scene, 65)[:3] == [
        "trainer: trains, step 5 of 6, loss 0.500, 61 s    time: 1 min 05 s",
        "evald: serving, 1 running, 0 queued",
        "engine engine-0: serving, weights demo:2:aa:bb",
    ]


def test_terminal_is_redrawn_in_place(
    stage: Stage, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    out = Terminal()
    screen = Screen(out)
    screen.show(scene, 1)
    middle(stage, scene)
    screen.show(scene, 2)
    screen.say("done")
    drawings = re.split(r"\r\x1b\[5A\x1b\[J", out.getvalue())
    assert len(drawings) == 3
    assert drawings[2] == "done\n"
    for drawing in drawings[:2]:
        assert len(drawing.splitlines()) == 5
        assert max(map(len, drawing.splitlines())) < 40


def test_elsewhere_only_changes_are_printed(stage: Stage, scene: Scene) -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.show(scene, 0)
    middle(stage, scene)
    screen.show(scene, 1)
    screen.show(scene, 2)
    stage.says("end", step=6)
    scene.refresh()
    screen.show(scene, 20)
    assert out.getvalue().splitlines() == [
        "[    1 s] trainer: trains, step 5 of 6, loss 0.500, 61 s",
        "[    1 s] engine engine-0: serving, weights demo:2:aa:bb",
        "[    1 s] step 2: ok, mean 0.400 (copy 0.50 add 0.30), lag 4 steps",
        "[    1 s] step 4: pinning",
        "[    1 s] step 6: training",
        "[   20 s] trainer: has ended, step 5 of 6, loss 0.500, 61 s",
    ]


def test_chart(stage: Stage, scene: Scene) -> None:
    assert chart_lines(scene) == ["(no point has a score)"]
    stage.ends(2, 0.2, 0.2)
    stage.ends(6, 0.9, 1.0)
    scene.refresh()
    lines = chart_lines(scene, unicode=False)
    assert len(lines) == 24
    top = next(line for line in lines if line.startswith(" 1.00"))
    assert "o" not in top
    row = next(line for line in lines if line.startswith(" 0.20"))
    assert row.index("o") == 10
    assert lines[-1].split() == ["2", "6", "step"]
    assert "●" in "".join(chart_lines(scene))


def test_duration() -> None:
    assert duration(47.4) == "47 s"
    assert duration(125) == "2 min 05 s"
