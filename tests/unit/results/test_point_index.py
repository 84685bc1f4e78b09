from evald.point import Kind, Outcome, PointKey
from evald.results.index import PointIndex
from evald.results.records import Accepted, Alert, AnyRecord, Counts, PointRecord, RunEnd, SetRecord


def accepted(step: int, revision: int = 0, kind: Kind = Kind.STEP, run: str = "a") -> Accepted:
    key = PointKey(run, step, revision, kind)
    return Accepted(
        run=run,
        step=step,
        revision=revision,
        kind=kind,
        record_id=f"{key.record_id}/accepted",
        directory=f"/staged/step_{step}",
        size_bytes=10,
        fingerprint="f",
    )


def ended(step: int, seq: int, revision: int = 0, outcome: Outcome = Outcome.OK) -> PointRecord:
    key = PointKey("a", step, revision)
    return PointRecord(
        seq=seq, run="a", step=step, revision=revision, record_id=key.record_id, outcome=outcome
    )


def set_done(step: int, name: str) -> SetRecord:
    record_id = f"{PointKey('a', step).record_id}/{name}"
    return SetRecord(
        run="a", step=step, record_id=record_id, set=name, counts=Counts(), seconds=1.0, metrics={}
    )


def run_end(step: int) -> RunEnd:
    return RunEnd(run="a", step=step, record_id="a/run_end", points={"ok": 1})


def index_of(*records: AnyRecord) -> PointIndex:
    index = PointIndex()
    for record in records:
        index.apply(record)
    return index


def test_an_empty_index_knows_nothing() -> None:
    index = PointIndex()
    assert index.get(PointKey("a", 1)) is None
    assert index.revisions("a", 1) == []
    assert index.open_points() == []
    assert index.outcome_counts() == {"ok": 0, "partial": 0, "skipped": 0}
    assert index.newest_step("a") is None
    assert not index.run_ended("a")


def test_open_points_come_in_order_of_acceptance_and_ended_ones_in_order_of_end() -> None:
    index = index_of(accepted(3), accepted(1), accepted(2), ended(2, 4), ended(3, 5))
    assert [state.key.step for state in index.open_points()] == [1]
    assert [state.key.step for state in index.ended_points()] == [2, 3]
    assert index.outcome_counts() == {"ok": 2, "partial": 0, "skipped": 0}


def test_acceptance_again_keeps_the_place_and_renews_the_facts() -> None:
    first, again = accepted(3), accepted(3)
    first.digest = "d"
    again.fingerprint, again.directory, again.final, again.owned = "g", "/elsewhere", True, False
    index = index_of(first, accepted(4), again)
    assert [state.key.step for state in index.open_points()] == [3, 4]
    state = index.open_points()[0]
    assert (state.fingerprint, state.directory, state.digest) == ("g", "/elsewhere", "d")
    assert state.final
    assert not state.owned


def test_revisions_are_sorted_and_belong_to_one_kind() -> None:
    index = index_of(accepted(1, 2), accepted(1, 0), accepted(1, 1), accepted(1, 0, Kind.BASELINE))
    assert [state.key.revision for state in index.revisions("a", 1)] == [0, 1, 2]
    assert len(index.revisions("a", 1, Kind.BASELINE)) == 1


def test_a_terminal_record_without_acceptance_makes_a_point() -> None:
    record = ended(7, 1, outcome=Outcome.SKIPPED)
    record.directory, record.fingerprint, record.digest = "/x", "f", "d"
    state = index_of(record).get(PointKey("a", 7))
    assert state is not None
    assert (state.outcome, state.end_seq, state.directory) == (Outcome.SKIPPED, 1, "/x")
    assert (state.fingerprint, state.digest) == ("f", "d")


def test_a_terminal_record_that_names_nothing_keeps_what_was_accepted() -> None:
    state = index_of(accepted(1), ended(1, 2)).get(PointKey("a", 1))
    assert state is not None
    assert (state.directory, state.fingerprint) == ("/staged/step_1", "f")


def test_set_records_are_known_once_each() -> None:
    index = index_of(accepted(1), set_done(1, "x"), set_done(1, "y"), set_done(1, "x"))
    state = index.get(PointKey("a", 1))
    assert state is not None
    assert state.set_ids == ["a/step/1/r0/x", "a/step/1/r0/y"]


def test_set_records_that_a_point_does_not_end_with_are_void() -> None:
    x, y = "a/step/1/r0/x", "a/step/1/r0/y"
    index = index_of(accepted(1), set_done(1, "x"), set_done(1, "y"))
    assert index.void_sets(ended(1, 4, outcome=Outcome.SKIPPED)) == [x, y]
    end = ended(1, 4)
    assert index.void_sets(end) == []  # (a black box does not say)
    end.provenance["sets"] = {"x": {}, "y": {}}
    assert index.void_sets(end) == []
    # the config of this life has other sets
    end.provenance["sets"] = {"y": {}, "z": {}}
    assert index.void_sets(end) == [x]
    assert index.void_sets(ended(2, 4, outcome=Outcome.SKIPPED)) == []


def test_applying_twice_equals_applying_once() -> None:
    records = (accepted(1), set_done(1, "x"), ended(1, 3), accepted(2), run_end(2))
    once, twice = index_of(*records), index_of(*records, *records)
    assert once.ended_points() == twice.ended_points()
    assert once.open_points() == twice.open_points()
    assert once.run_ended("a")
    assert twice.run_ended("a")


def test_the_newest_step_ignores_baselines_and_other_runs() -> None:
    index = index_of(
        accepted(5), accepted(3), accepted(9, kind=Kind.BASELINE), accepted(8, run="b")
    )
    assert index.newest_step("a") == 5
    assert index.newest_step("b") == 8


def test_a_run_that_goes_on_has_not_ended() -> None:
    assert index_of(accepted(1), run_end(1)).run_ended("a")
    assert not index_of(accepted(1), run_end(1), accepted(2)).run_ended("a")
    assert index_of(accepted(1), run_end(1), accepted(1)).run_ended("a")


def test_alerts_change_nothing() -> None:
    index = index_of(Alert(run="a", step=0, record_id="x", name="n", detail="d"))
    assert index.open_points() == []


def test_the_lag_is_that_of_the_run_that_is_furthest_behind_and_has_not_ended() -> None:
    index = index_of(accepted(10), accepted(20))
    assert index.lag_steps() is None
    for record in (ended(10, 3), accepted(45), accepted(7, run="b")):
        index.apply(record)
    assert index.lag_steps() == 35
    index.apply(ended(45, 6))
    assert index.lag_steps() == 0
    index.apply(ended(20, 7))  # late: the newest one counts
    assert index.lag_steps() == 0
    index.apply(run_end(45))
    assert index.lag_steps() is None
