"""Stored samples are graded again: what the new revision says, and what it leaves as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evaluator_world import hang
from regrade_world import RegradeWorld, correct, rows

from evald.config import Aggregate, EvalSet
from evald.point import Kind, Outcome
from evald.regrade.plan import CannotRegrade
from evald.results.compressed import compress
from evald.results.follow import read_records
from evald.results.index import PointIndex
from evald.results.modes import Modes


@pytest.fixture
def world(tmp_path: Path, make_model: Any) -> Iterator[RegradeWorld]:
    made = RegradeWorld(tmp_path, make_model())
    yield made
    made.ledger.close()


def half_correct(text: str) -> str:
    return correct(text) if text > "q3" else "no"


def by(grader: str, *sets: EvalSet) -> list[EvalSet]:
    return [msgspec.structs.replace(one, grader=grader) for one in sets]


async def test_a_better_grader_makes_a_new_revision_of_the_same_responses(
    world: RegradeWorld, make_set: Any
) -> None:
    sets = [make_set(rows(5), n_samples_per_eval_prompt=2)]
    old = await world.measure(3, by("exact", *sets), correct)
    assert old.metrics["eval/toy"] == 0
    before = world.samples(3, 0)
    said = await world.regrade(by("boxed_exact", *sets), 3)
    assert said == ["r:step:3.r1 is ok: toy 0.0000 -> 1.0000"]
    new = world.point(3, 1)
    assert (new.outcome, new.metrics["eval/toy"], new.metrics["eval/toy-pass@2"]) == ("ok", 1, 1)
    assert new.provenance["regraded_from"] == old.record_id == "r/step/3/r0"
    assert new.provenance["regraded_sets"] == ["toy"]
    was, now = old.provenance["sets"]["toy"], new.provenance["sets"]["toy"]
    assert (now["grader"], now["grader_version"]) != (was["grader"], was["grader_version"])
    assert now["grader"] == "boxed_exact"
    assert now["config"] != was["config"]
    assert (now["data"], now["asked"]) == (was["data"], was["asked"])
    # what was measured has not changed
    for name in ("engines", "weight_versions", "timings", "digest", "fingerprint", "directory"):
        assert getattr(new, name) == getattr(old, name)
    for name in ("eval/step", "eval/duration_seconds", "eval/toy/response_len/mean"):
        assert new.metrics[name] == old.metrics[name]
    assert new.counts == msgspec.structs.replace(old.counts)
    record = world.set_records(3, 1)["toy"]
    assert (record.record_id, record.metrics["eval/toy"]) == ("r/step/3/r1/toy", 1)
    # the old revision is what it was, the new one has the same texts
    assert world.samples(3, 0) == before
    assert world.folders() == ["step_3.r0", "step_3.r1"]
    lines = [json.loads(line) for line in world.samples(3, 1)["toy.jsonl"].splitlines()]
    assert {(line["question"], line["sample"]) for line in lines} == {
        (str(q), n) for q in range(1, 6) for n in (0, 1)
    }
    assert {line["response"] for line in lines} == {correct(f"q{n}") for n in range(5)}
    assert {line["config"] for line in lines} == {now["config"]}
    assert [world.point(3, 0)] == [old]


async def test_what_was_cut_is_cut_in_the_new_revision_too(
    world: RegradeWorld, make_set: Any
) -> None:
    sets = [make_set(rows(5), stragglers="cut", cut_at_share=0.8)]

    def reply(text: str) -> Any:
        return hang(text) if text == "q4" else correct(text)

    old = await world.measure(3, by("exact", *sets), reply)
    assert (old.outcome, old.counts.n_cut) == (Outcome.PARTIAL, 1)
    await world.regrade(by("boxed_exact", *sets), 3)
    new = world.point(3, 1)
    assert (new.outcome, new.counts.n_cut, new.counts.n_timeout) == (Outcome.PARTIAL, 1, 1)
    assert [new.metrics[f"eval/toy/score_{end}"] for end in ("low", "high")] == [0.8, 1.0]


async def test_a_corrected_label_counts_and_other_prompts_do_not(
    world: RegradeWorld, make_set: Any
) -> None:
    wrong = [{"prompt": "q0", "label": "typo"}, *rows(4)[1:]]
    await world.measure(1, [make_set(wrong, grader="boxed_exact")], correct)
    assert world.point(1, 0).metrics["eval/toy"] == 0.75
    corrected = make_set(rows(4), grader="boxed_exact")
    await world.regrade([corrected], 1)
    new = world.point(1, 1)
    assert new.metrics["eval/toy"] == 1
    assert (
        new.provenance["sets"]["toy"]["data"] != world.point(1, 0).provenance["sets"]["toy"]["data"]
    )
    line = json.loads(world.samples(1, 1)["toy.jsonl"].splitlines()[0])
    assert line["reference"] in {f"q{n}" for n in range(4)}
    other = make_set([*rows(3), {"prompt": "other", "label": "q3"}], grader="boxed_exact")
    with pytest.raises(CannotRegrade, match="are not those that it was measured with"):
        await world.regrade([other], 1)
    cooler = msgspec.structs.replace(corrected, temperature=0.5)
    with pytest.raises(CannotRegrade, match="are not those that it was measured with"):
        await world.regrade([cooler], 1)
    assert world.folders() == ["step_1.r0", "step_1.r1"]


async def test_all_points_are_compared_with_each_other_again(
    world: RegradeWorld, make_set: Any
) -> None:
    sets = [make_set(rows(8))]
    await world.measure(0, by("exact", *sets), lambda _: "no", kind=Kind.BASELINE)
    for step in (20, 5):
        await world.measure(
            step, by("exact", *sets), lambda text: correct(text) if text > "q3" else "no"
        )
    alone = by("boxed_exact", *sets)
    await world.regrade(alone, 20)
    lonely = world.point(20, 1)
    assert lonely.metrics["eval/toy"] == 0.5
    # its neighbours are still what another grader has said
    assert not [name for name in lonely.metrics if "delta" in name]
    assert lonely.curve_breaks == ["toy"]
    assert lonely.metrics["eval/toy/curve_break"] == 1
    # an earlier step that is graded again is not what the next point is compared with
    await world.regrade(alone, 5)
    assert world.ledger.index.sets_seen("r")["toy"].step == 20
    planned = (await world.plan(alone, 20, 5, 0)).points
    assert [one.source.key.step for one in planned] == [0, 5, 20]
    said = await world.regrade(alone)
    assert [sentence.split()[0] for sentence in said] == [
        "r:baseline:0.r1",
        "r:step:5.r2",
        "r:step:20.r2",
    ]
    newest = world.point(20, 2)
    assert newest.provenance["regraded_from"] == "r/step/20/r1"
    assert newest.metrics["eval/toy/delta_prev"] == 0
    assert newest.metrics["eval/toy/delta_baseline"] == 0.5
    assert newest.curve_breaks == []
    # and what is measured from now on is compared with what was graded again
    later = await world.measure(30, alone, correct)
    assert later.metrics["eval/toy/delta_prev"] == 0.5
    assert later.curve_breaks == []


async def test_compressed_samples_are_graded_kept_and_compared_with(
    world: RegradeWorld, make_set: Any
) -> None:
    one, two = make_set(rows(4), "one"), make_set(rows(4), "two")
    for step in (1, 2):
        await world.measure(step, by("exact", one, two), correct)
        for name in world.samples(step, 0):
            path = Path(world.results.dir) / f"samples/r/step_{step}.r0" / name
            assert compress(path, Modes(), lambda: False)
    (said,) = await world.regrade(by("boxed_exact", one, two), 2, only=["two"])
    assert said == "r:step:2.r1 is ok: one stays (not asked for); two 0.0000 -> 1.0000"
    assert sorted(world.samples(2, 1)) == ["one.jsonl.gz", "two.jsonl"]
    assert world.point(2, 1).metrics["eval/one/delta_prev"] == 0
    later = await world.measure(3, by("exact", one, two), correct)
    assert later.metrics["eval/one/delta_prev_n"] == 4


async def test_sets_that_are_not_asked_for_stay_and_aggregates_are_new(
    world: RegradeWorld, make_set: Any
) -> None:
    one, two = make_set(rows(4), "one"), make_set(rows(4), "two")
    world.aggregates = [Aggregate(name="both", sets=["one", "two"])]
    old = await world.measure(1, by("exact", one, two), correct)
    assert old.metrics["eval/both"] == 0
    (said,) = await world.regrade(by("boxed_exact", one, two), 1, only=["two"])
    assert said == "r:step:1.r1 is ok: one stays (not asked for); two 0.0000 -> 1.0000"
    new = world.point(1, 1)
    assert (new.metrics["eval/one"], new.metrics["eval/two"], new.metrics["eval/both"]) == (
        0,
        1,
        0.5,
    )
    assert new.counts.n_total == 8
    assert new.provenance["sets"]["one"] == old.provenance["sets"]["one"]
    assert new.provenance["regraded_sets"] == ["two"]
    assert world.samples(1, 1)["one.jsonl"] == world.samples(1, 0)["one.jsonl"]
    kept, was = world.set_records(1, 1)["one"], world.set_records(1, 0)["one"]
    assert (kept.metrics, kept.counts) == (was.metrics, was.counts)
    # without the set's samples it stays all the same
    (Path(world.results.dir) / "samples/r/step_1.r1/one.jsonl").unlink()
    await world.regrade(by("boxed_exact", one, two), 1)
    assert "are gone" in (await world.plan(by("boxed_exact", one, two), 1)).points[0].kept["one"]
    assert world.point(1, 2).metrics["eval/both"] == 0.5


async def test_what_has_no_response_stays_as_it_is(world: RegradeWorld, make_set: Any) -> None:
    long = {"prompt": "x" * 3000, "label": "x"}
    sets = [make_set([*rows(3), long])]
    await world.measure(1, by("exact", *sets), correct)
    await world.regrade(by("boxed_exact", *sets), 1)
    new = world.point(1, 1)
    assert (new.counts.n_scored, new.counts.n_error, new.counts.n_too_long) == (3, 1, 1)
    assert (new.outcome, new.metrics["eval/toy"]) == (Outcome.PARTIAL, 0.75)
    assert "more than the model's context" in new.detail


async def test_a_sample_that_the_users_function_has_graded_stays_as_it_is(
    world: RegradeWorld, make_set: Any
) -> None:
    sets = [make_set(rows(4))]
    await world.measure(1, by("exact", *sets), correct)
    path = Path(world.results.dir) / "samples/r/step_1.r0/toy.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first.replace(b'"self_graded":false', b'"self_graded":true') + b"\n" + rest)
    await world.regrade(by("boxed_exact", *sets), 1)
    assert world.point(1, 1).metrics["eval/toy"] == 0.75


async def test_a_grader_that_was_broken_costs_nothing_and_one_that_is_changes_nothing(
    world: RegradeWorld, make_set: Any
) -> None:
    (good,) = by("boxed_exact", make_set(rows(3)))
    broken = msgspec.structs.replace(
        good, grader="remote", grader_config={"url": "http://127.0.0.1:9/", "retries": 0}
    )
    lost = await world.measure(1, [broken], correct)
    assert (lost.outcome, lost.reason, lost.counts.n_grader_error) == ("skipped", "crashed", 3)
    await world.regrade([good], 1)
    new = world.point(1, 1)
    assert (new.outcome, new.metrics["eval/toy"], new.reason) == ("ok", 1, "")
    assert "eval/skipped_crashed" not in new.metrics
    with pytest.raises(CannotRegrade, match=r"3 could not be graded.*nothing was changed"):
        await world.regrade([broken], 1)
    assert [state.key.revision for state in world.ledger.index.revisions("r", 1)] == [0, 1]
    assert world.folders() == ["step_1.r0", "step_1.r1"]


async def test_the_index_knows_the_snapshot_of_a_regraded_point(
    world: RegradeWorld, make_set: Any
) -> None:
    sets = [make_set(rows(3))]
    await world.measure(1, by("exact", *sets), correct)
    await world.regrade(by("boxed_exact", *sets), 1)
    first, second = world.ledger.index.revisions("r", 1)
    assert (second.owned, second.size_bytes) == (False, first.size_bytes)
    assert (second.fingerprint, second.directory, second.digest) == (
        first.fingerprint,
        first.directory,
        first.digest,
    )
    again = PointIndex()
    for _ in range(2):
        for record in read_records(world.ledger.path):
            again.apply(record)
    assert again.revisions("r", 1) == world.ledger.index.revisions("r", 1)
    assert again.sets_seen("r") == world.ledger.index.sets_seen("r")
