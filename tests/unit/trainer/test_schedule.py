"""When a step is due: tables of steps, and of arguments that nobody can mean."""

from __future__ import annotations

from typing import Any

import pytest

from evald.trainer.dispatcher.schedule import Schedule


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"first_step": 0, "interval": 5}, [4, 9, 14, 19]),
        ({"first_step": 1, "interval": 5}, [5, 10, 15, 20]),
        ({"first_step": 0, "interval": 1, "num_steps": 3}, list(range(21))),
        # the last one also off cadence, and only once where both agree
        ({"first_step": 0, "interval": 5, "num_steps": 12}, [4, 9, 11, 14, 19]),
        ({"first_step": 1, "interval": 5, "num_steps": 12}, [5, 10, 12, 15, 20]),
        ({"first_step": 1, "interval": 5, "num_steps": 10}, [5, 10, 15, 20]),
        ({"first_step": 1, "interval": 50, "num_steps": 7}, [7]),
        ({"first_step": 0, "steps": [0, 3, 3, 17]}, [0, 3, 17]),
        ({"first_step": 1, "steps": (), "num_steps": 9}, [9]),
        ({"first_step": 0, "epoch_steps": 8}, [7, 15]),
        ({"first_step": 1, "epoch_steps": 8}, [8, 16]),
        # as miles: a cadence and the ends of epochs
        ({"first_step": 0, "interval": 5, "epoch_steps": 7}, [4, 6, 9, 13, 14, 19, 20]),
        ({"first_step": 1, "every_minutes": 1, "epoch_steps": 20}, [20]),
        ({"first_step": 1, "every_minutes": 1}, []),
        ({"first_step": 1, "interval": 3, "num_steps": 0}, [3, 6, 9, 12, 15, 18]),
    ],
)
def test_steps_that_are_due(settings: dict[str, Any], expected: list[int]) -> None:
    schedule = Schedule(**settings)
    found = [step for step in range(settings["first_step"], 21) if schedule.is_due(step)]
    assert found == expected


def test_every_minutes_goes_by_the_callers_clock() -> None:
    schedule = Schedule(first_step=1, every_minutes=0.5)
    assert not schedule.is_due(7, since_s=29.9)
    assert schedule.is_due(7, since_s=30.0)


@pytest.mark.parametrize("settings", [{"interval": 100}, {"steps": ()}, {"every_minutes": 60}])
def test_an_announced_end_of_an_epoch_is_due(settings: dict[str, Any]) -> None:
    schedule = Schedule(first_step=1, **settings)
    assert not schedule.is_due(7)
    assert schedule.is_due(7, epoch_end=True)


@pytest.mark.parametrize(
    ("first", "count", "last"), [(0, 10, 9), (1, 10, 10), (0, 0, -1), (1, 0, 0), (1, None, None)]
)
def test_last_step(first: int, count: int | None, last: int | None) -> None:
    schedule = Schedule(first_step=first, interval=1, num_steps=count)
    assert schedule.last_step == last
    assert schedule.is_last(9) == (last == 9)
    # a run of no steps has no last one
    assert not schedule.is_last(first - 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give interval, steps, every_minutes or epoch_steps; steps="),
        ({"first_step": 2, "interval": 1}, "first_step=2: give the number of the run's first"),
        ({"first_step": True, "interval": 1}, "first_step=True"),
        ({"first_step": "1", "interval": 1}, "first_step='1'"),
        ({"interval": 0}, "interval=0: give a whole number, 1 or more"),
        ({"interval": 2.5}, "interval=2.5: give a whole number"),
        ({"interval": True}, "interval=True"),
        ({"epoch_steps": 0}, "epoch_steps=0"),
        ({"num_steps": -1, "interval": 1}, "num_steps=-1: give a whole number, 0 or more"),
        ({"every_minutes": 0}, "every_minutes=0: give a number of minutes above 0"),
        ({"every_minutes": float("nan")}, "every_minutes=nan"),
        ({"every_minutes": "5"}, "every_minutes='5'"),
        ({"steps": 5}, "steps=5: give a list of step numbers"),
        ({"steps": "12"}, "steps='12': give a list"),
        ({"steps": [0, 5]}, "step 0: with first_step=1 no step has that number"),
        ({"steps": [-1]}, "steps=-1: give a whole number, 0 or more"),
        ({"steps": [1, 9], "num_steps": 8}, "step 9: the last of num_steps=8 steps is 8"),
        ({"interval": 1, "steps": [1]}, "interval and steps at the same time: give one"),
        ({"interval": 1, "every_minutes": 1}, "interval and every_minutes at the same time"),
        ({"steps": (), "every_minutes": 1}, "steps and every_minutes at the same time"),
        ({"steps": [1], "epoch_steps": 5}, "a list of steps is complete; add the ends"),
    ],
)
def test_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(**({"first_step": 1} | settings))


@pytest.mark.parametrize(
    ("settings", "save_interval", "words"),
    [
        ({"interval": 5}, 2, "interval=5: it is no multiple of save_interval=2.* use 4 or 6"),
        ({"interval": 5}, 10, "use 10, or mode='sync'"),
        ({"interval": 4, "epoch_steps": 7}, 4, "epoch_steps=7: it is no multiple"),
        ({"steps": [4, 6]}, 4, "step 6: with save_interval=4 none is saved there"),
        ({"every_minutes": 3}, 4, "every_minutes: they are saved at steps"),
    ],
)
def test_no_step_is_due_without_a_checkpoint(
    settings: dict[str, Any], save_interval: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(first_step=1, **settings).refuse_unsaved(save_interval)


@pytest.mark.parametrize(
    ("settings", "save_interval"),
    [
        ({"first_step": 1, "interval": 10}, 5),
        ({"first_step": 0, "steps": [4, 9], "num_steps": 13}, 5),
        # the last one is forced: a trainer saves at the end
        ({"first_step": 0, "steps": [4, 12], "num_steps": 13}, 5),
        ({"first_step": 1, "interval": 10, "epoch_steps": 15}, 5),
    ],
)
def test_saved_steps_can_be_reused(settings: dict[str, Any], save_interval: int) -> None:
    Schedule(**settings).refuse_unsaved(save_interval)
