from __future__ import annotations

from pathlib import Path

import pytest
from demo_stage import SETS, Stage

from evald.demo.scene import Scene
from evald.errors import LedgerError
from evald.point import Outcome


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def scene_of(stage: Stage, *, steps: int = 6, every: int = 2) -> Scene:
    return Scene(stage.layout, steps=steps, every=every, sets=SETS)


def states(scene: Scene) -> dict[int, str]:
    return {step: row.state for step, row in scene.rows.items()}


def test_last_step_always_has_a_snapshot(stage: Stage) -> None:
    assert list(scene_of(stage, steps=5).rows) == [2, 4, 5]
    assert list(scene_of(stage, steps=4).rows) == [2, 4]
    assert list(scene_of(stage, steps=1).rows) == [1]


def test_before_anything_is_written(stage: Stage) -> None:
    scene = scene_of(stage)
    scene.refresh()
    assert set(states(scene).values()) == {""}
    assert scene.status is None
    assert scene.last_mean is None


def test_states_come_from_where_they_are_known_best(stage: Stage) -> None:
    scene = scene_of(stage, steps=10)
    stage.says("start", steps=10)
    for step in (2, 4, 6):
        stage.says("published", step=step)
    stage.says("progress", step=7, loss=1.5, seconds=3.0)
    stage.ends(2, 0.5, 0.3)
    stage.set_done(4, "add", 0.75)
    stage.shows(queued=(), running={2: "recording", 4: "evaluating"})
    scene.refresh()
    assert states(scene) == {2: "ok", 4: "evaluating", 6: "published", 8: "training", 10: ""}
    assert scene.rows[4].scores == {"add": 0.75, "copy": 0.25}
    assert scene.rows[4].sets_done == {"add"}
    assert scene.rows[4].mean is None
    assert [scene.rows[step].lag_steps for step in (2, 4, 6, 8)] == [4, 2, 0, None]
    assert (scene.training.step, scene.training.loss) == (7, 1.5)


def test_a_point_with_a_set_done_is_past_its_pin(stage: Stage) -> None:
    scene = scene_of(stage)
    for step in (2, 4):
        stage.says("published", step=step)
    stage.shows(running={2: "pinning", 4: "pinning"})
    stage.set_done(2, "add", 0.75)
    scene.refresh()
    assert [states(scene)[step] for step in (2, 4)] == ["evaluating", "pinning"]


def test_mean_and_its_standard_error(stage: Stage) -> None:
    scene = scene_of(stage)
    stage.ends(6, 0.5, 0.3)
    scene.refresh()
    assert scene.last_mean == pytest.approx(0.4)
    assert scene.rows[6].stderr == pytest.approx((2 * 0.04**2) ** 0.5 / 2)
    assert scene.rows[4].stderr == 0.0


def test_noise_in_the_log_and_unknown_records_are_passed_by(stage: Stage) -> None:
    scene = scene_of(stage)
    stage.layout.log("train").write_text('Loading weights: 100%\n[1]\n{"event": "new"}\n')
    stage.says("published", step=99)
    stage.layout.ledger.write_text('{"schema": 1, "seq": 1, "type": "novelty"}\n')
    stage.ends(99, 0.1, 0.1)
    scene.refresh()
    assert scene.published == []
    scene.close()


def test_broken_ledger_is_said(stage: Stage) -> None:
    scene = scene_of(stage)
    stage.layout.ledger.write_text("nonsense\n")
    with pytest.raises(LedgerError, match="line 1"):
        scene.refresh()


def test_success_has_no_shortfall(stage: Stage) -> None:
    scene = scene_of(stage)
    for step in (2, 4, 6):
        stage.says("published", step=step)
        stage.ends(step, 0.9, 0.9)
        stage.ends(step, 0.9, 0.9)  # a replay is the same record
    stage.says("end", step=6)
    scene.refresh()
    assert scene.shortfalls(0.85) == []
    assert scene.shortfalls(0.95) == ["the last mean is 0.900, below 0.95"]


def test_each_shortfall_is_named(stage: Stage) -> None:
    scene = scene_of(stage)
    stage.says("published", step=2)
    stage.says("published", step=4)
    stage.ends(2, 0.9, 0.9, outcome=Outcome.PARTIAL, detail="2 of 200 samples failed")
    stage.ends(4, outcome=Outcome.SKIPPED, reason="invalid_snapshot", detail="no weights")
    stage.ends(98)
    scene.refresh()
    assert scene.shortfalls(0.85) == [
        "the trainer did not reach its end",
        "no snapshot of step 6",
        "step 2 ended partial: 2 of 200 samples failed",
        "step 4 ended skipped (invalid_snapshot): no weights",
        "step 6 has no terminal record",
        "3 points for 2 snapshots",
    ]
