"""A few runs of chaos for every change; many: ``python -m tests.chaos --runs 300``."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from . import invariants
from .__main__ import run_one
from .faults import FAULTS
from .invariants import check
from .kill_points import kill_at
from .plan import ACTIONS, make_plan, steady_plan
from .points import NAMES, arm, find
from .world import World

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    report = run_one(seed, points=20)
    assert report.breaches == [], report.hits
    # (what is removed before evald has seen it never was)
    assert sum(report.outcomes.values()) >= 20 - report.hits.count("damage")


@pytest.mark.parametrize("name", ["torn", "record.before"])
def test_a_daemon_that_dies_at_a_point_goes_on_behind_it(name: str) -> None:
    row = kill_at(name, 2)
    assert (row.kills, row.breaches) == (2, [])


@pytest.fixture(scope="module")
def quiet() -> Iterator[World]:
    """A run without faults, that has ended."""
    world = World(steady_plan(4))
    try:
        world.run()
        yield world
    finally:
        world.close()


def test_a_run_without_faults_measures_everything(quiet: World) -> None:
    assert check(quiet) == []
    # one may end while the one before it is graded
    assert sorted((one.step, str(one.outcome)) for one in quiet.points()) == [
        (step, "ok") for step in (1, 2, 3, 4)
    ]


def test_a_wrong_score_a_second_end_and_a_gap_are_found(quiet: World) -> None:
    whole = quiet.ledger.read_bytes()
    last = [line for line in whole.splitlines() if b'"type":"point"' in line][-1]
    point = json.loads(last)
    try:
        point["metrics"]["eval/a"] += 0.25
        quiet.ledger.write_bytes(whole.replace(last, json.dumps(point).encode()))
        assert any("eval/a is" in breach for breach in check(quiet))
        quiet.ledger.write_bytes(whole + last + b"\n")
        assert any("terminal records" in breach for breach in check(quiet))
        assert any("seq is not" in breach for breach in check(quiet))
        quiet.ledger.write_bytes(whole.replace(last + b"\n", b""))
        assert any("has no terminal record" in breach for breach in check(quiet))
    finally:
        quiet.ledger.write_bytes(whole)


def test_what_is_left_is_found(quiet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "GONE_S", 0.1)
    extra = [quiet.places.root / f"step_{number}" for number in (97, 98, 99)]
    for path in extra:
        path.mkdir()
        (path / ".complete").touch()
    with subprocess.Popen(["sleep", "60"], cwd=quiet.places.work) as child:
        breaches = check(quiet)
        child.kill()
    for path in extra:
        shutil.rmtree(path)
    assert any("snapshots are left" in breach for breach in breaches)
    assert any("sleep 60" in breach for breach in breaches)


def test_a_seed_gives_the_same_plan_and_all_rows_of_the_tables_are_drawn() -> None:
    plans = [make_plan(seed) for seed in range(60)]
    assert plans[7] == make_plan(7)
    assert {fault.name for plan in plans for fault in plan.faults} == set(FAULTS)
    assert {action.how for plan in plans for action in plan.actions} == set(ACTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_every_point_is_where_its_name_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute = find(name)
    monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # undone at the end
    arm(f"{name}:1000000:kill")
