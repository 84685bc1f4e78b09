"""An eval set that is not what its run was measured with: said, or refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from evaluator_world import DIGEST, FakePosture, World, rows_of

from evald.errors import EvalSkip
from evald.evals.curve import CurveWatch
from evald.evals.stats.set_metrics import Earlier
from evald.point import Kind, Outcome, PointKey
from evald.postures.contract import PointResult
from evald.results.index import PointIndex, SetSeen
from evald.results.records import PointRecord


def record_of(
    result: PointResult, step: int, *, outcome: Outcome = Outcome.OK, kind: Kind = Kind.STEP
) -> PointRecord:
    """Give the terminal record that the ledger would keep of a result."""
    key = PointKey("r", step, 0, kind)
    record = PointRecord(
        seq=step + 1,
        run="r",
        step=step,
        kind=kind,
        record_id=key.record_id,
        outcome=outcome,
        provenance=result.provenance,
    )
    return msgspec.json.decode(msgspec.json.encode(record), type=PointRecord)


class Run:
    """A run whose points are evaluated one after another, and remembered."""

    def __init__(self, world: World, on_change: Literal["record", "refuse"] = "record") -> None:
        self.world = world
        self.index = PointIndex()
        self.step = 0
        world.curve = CurveWatch(self.index, on_change)

    async def point(self, *sets: Any, outcome: Outcome = Outcome.OK) -> PointResult:
        self.world.sets = list(sets)
        result = await self.world.evaluate(FakePosture(str))
        self.step += 10
        self.index.apply(record_of(result, self.step, outcome=outcome))
        return result


@pytest.fixture
def run(world: World) -> Run:
    return Run(world)


async def test_the_first_point_with_another_set_says_so_once(run: Run, make_set: Any) -> None:
    same = make_set(rows_of(2, "b"), "same")
    first = await run.point(make_set(rows_of(2)), same)
    assert first.curve_breaks == []
    changed = await run.point(make_set(rows_of(3)), same)
    assert changed.curve_breaks == ["toy"]
    assert changed.metrics["eval/toy/curve_break"] == 1.0
    assert "eval/same/curve_break" not in changed.metrics
    done = {one.name: one for one in run.world.done[-2:]}
    assert done["toy"].metrics["eval/toy/curve_break"] == 1.0
    again = await run.point(make_set(rows_of(3)), same)
    assert again.curve_breaks == []


@pytest.mark.parametrize(
    ("rows", "fields", "breaks"),
    [
        (2, {}, False),
        (2, {"n_samples_per_eval_prompt": 2, "grader_timeout_s": 3.0}, False),
        (2, {"temperature": 0.5}, True),
        (2, {"grader": "contains"}, True),
        (3, {}, True),
    ],
)
async def test_what_decides_a_score_breaks_a_curve(
    run: Run, make_set: Any, rows: int, fields: dict[str, Any], breaks: bool
) -> None:
    await run.point(make_set(rows_of(2)))
    result = await run.point(make_set(rows_of(rows), **fields))
    assert bool(result.curve_breaks) is breaks


async def test_only_measured_points_count_and_other_runs_do_not(run: Run, make_set: Any) -> None:
    await run.point(make_set(rows_of(2)))
    await run.point(make_set(rows_of(3)), outcome=Outcome.SKIPPED)
    assert (await run.point(make_set(rows_of(2)))).curve_breaks == []
    # a set that was not measured for a while is compared with its own last point
    await run.point(make_set(rows_of(2, "b"), "other"))
    assert (await run.point(make_set(rows_of(4)))).curve_breaks == ["toy"]
    assert run.index.sets_seen("another run") == {}


async def test_points_before_and_after_the_break_are_not_compared(run: Run, make_set: Any) -> None:
    await run.point(make_set(rows_of(4)))
    journal = run.world.results_dir / "samples" / "r" / "step_7.r0" / "toy.jsonl"
    before = journal.rename(journal.with_name("before"))
    run.world.earlier = [Earlier("prev", str(before), DIGEST)]
    assert (await run.point(make_set(rows_of(4)))).metrics["eval/toy/delta_prev"] == 0.0
    changed = await run.point(make_set(rows_of(4), temperature=0.5))
    assert not [name for name in changed.metrics if "delta_prev" in name]


async def test_another_tokenizer_breaks_the_curve(run: Run, make_set: Any) -> None:
    await run.point(make_set(rows_of(2)))
    (run.world.model / "chat_template.jinja").write_text("{{ messages }}")
    assert (await run.point(make_set(rows_of(2)))).curve_breaks == ["toy"]


async def test_a_changed_set_is_refused_if_the_config_wants_it(world: World, make_set: Any) -> None:
    run = Run(world, "refuse")
    await run.point(make_set(rows_of(2)))
    with pytest.raises(EvalSkip) as caught:
        await run.point(make_set(rows_of(3), temperature=0.5))
    assert caught.value.reason == "set_changed"
    assert caught.value.detail.startswith(
        "eval set 'toy' is not what run 'r' was measured with until step 10: other data and "
        "settings; restore it, "
    )
    await run.point(make_set(rows_of(2)))


async def test_snapshots_may_bring_their_own_template_even_so(world: World, make_set: Any) -> None:
    run = Run(world, "refuse")
    eval_set = make_set(rows_of(2), tokenizer="snapshot")
    await run.point(eval_set)
    (world.model / "chat_template.jinja").write_text("{{ messages }}")
    assert (await run.point(eval_set)).curve_breaks == ["toy"]
    base = make_set(rows_of(2, "b"), "base")
    await run.point(base)
    (world.model / "chat_template.jinja").write_text("{{ messages[0] }}")
    with pytest.raises(EvalSkip, match="until step 30: other tokenizer or chat template"):
        await run.point(base)


def test_a_record_of_somebody_elses_says_nothing() -> None:
    index = PointIndex()
    telling: list[Any] = [None, [], {"a": 1}, {"a": {"config": 5}}, {"a": {"config": "c"}}]
    for step, told in enumerate(telling):
        index.apply(
            PointRecord(
                run="r",
                step=step,
                record_id=f"r/step/{step}/r0",
                outcome=Outcome.OK,
                provenance={"sets": told},
            )
        )
    assert index.sets_seen("r") == {"a": SetSeen(step=4, config="c")}


def test_points_that_end_in_another_order_are_compared_by_their_steps() -> None:
    """A reload between steps 2 and 3, and 3 ends first: 2 breaks no curve, and nor does 4."""
    index = PointIndex()

    def end(step: int, config: str, revision: int = 0, name: str = "a") -> None:
        index.apply(
            PointRecord(
                run="r",
                step=step,
                revision=revision,
                record_id=f"r/step/{step}/r{revision}",
                outcome=Outcome.OK,
                provenance={"sets": {name: {"config": config}}},
            )
        )

    def before(step: int, name: str = "a") -> str | None:
        seen = index.set_before(PointKey("r", step), name)
        return None if seen is None else f"{seen.config}{seen.step}"

    assert before(1) is None
    end(1, "old")
    assert (before(2), before(3)) == ("old1", "old1")
    end(3, "new")
    assert (before(2), before(4)) == ("old1", "new3")
    end(2, "old")
    assert (before(2), before(4)) == ("old1", "new3")
    # the trainer goes back, and step 2 is measured once more
    end(2, "new", revision=1)
    assert before(3) == "new2"
    # a set that is measured now and then is compared with its own last point
    end(5, "b", name="b")
    assert (before(6), before(7, "b"), before(0)) == ("new3", "b5", "new2")
