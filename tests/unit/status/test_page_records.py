"""Lines of the ledger as the page gets them."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.point import Kind, Outcome
from evald.results.records import Accepted, Alert, AnyRecord, Counts, PointRecord, RunEnd, SetRecord
from evald.status.page_records import Batch, PageRecords


def line(record: AnyRecord, seq: int) -> bytes:
    record.seq = seq
    return msgspec.json.encode(record)


def point(step: int, seq: int, **fields: Any) -> bytes:
    given = {"outcome": Outcome.OK, "record_id": f"r/step/{step}/r0"} | fields
    return line(PointRecord(run="r", step=step, **given), seq)


def set_of(step: int, name: str, seq: int) -> bytes:
    record = SetRecord(
        run="r",
        step=step,
        record_id=f"r/step/{step}/r0/{name}",
        set=name,
        counts=Counts(n_total=2),
        seconds=1.0,
        metrics={f"eval/{name}": 0.5},
    )
    return line(record, seq)


def metrics(batch: Batch, names: list[str], at: int = 0) -> dict[str, float]:
    names.extend(batch.names)
    flat = batch.records[at].metrics
    return {names[int(number)]: value for number, value in zip(flat[::2], flat[1::2], strict=True)}


def test_names_of_metrics_are_told_once_and_numbers_are_short() -> None:
    records, names = PageRecords(), list[str]()
    first = records.batch([point(1, 1, metrics={"eval/step": 1, "eval/a": 1 / 3, "eval/b": 2.0})])
    assert first.names == ["eval/a", "eval/b"]  # the step stands in the record
    assert metrics(first, names) == {"eval/a": 0.333333, "eval/b": 2}
    second = records.batch([point(2, 2, metrics={"eval/b": 123456789.0, "eval/c": 1e-9})])
    assert second.names == ["eval/c"]
    assert metrics(second, names) == {"eval/b": 123457000, "eval/c": 1e-9}
    assert second.last_seq == 2


def test_sets_of_a_point_that_ends_in_the_batch_are_left_out() -> None:
    lines = [set_of(1, "a", 1), set_of(2, "a", 2), point(1, 3), set_of(1, "b", 4)]
    batch = PageRecords().batch(lines)
    shown = [(one.type, one.step, one.set, one.sets) for one in batch.records]
    assert shown == [("set", 2, "a", []), ("point", 1, "", ["a"])]


def test_what_cannot_be_read_or_is_not_shown_only_counts() -> None:
    newer = b'{"type": "future", "schema": 1, "seq": 8, "anything": [1]}'
    odd = b'{"type": "point", "seq": 9, "metrics": "none"}'
    accepted = line(
        Accepted(run="r", step=1, record_id="x", directory="/d", size_bytes=1, fingerprint="f"), 7
    )
    batch = PageRecords().batch([b"{torn", b"[]", accepted, newer, odd])
    assert (batch.records, batch.last_seq) == ([], 9)


def test_alerts_ends_skips_and_new_grades() -> None:
    lines = [
        line(Alert(run="r", step=0, record_id="x", name="disk", detail="full"), 1),
        line(RunEnd(run="r", step=9, record_id="y", points={"ok": 1}), 2),
        point(3, 3, outcome=Outcome.SKIPPED, reason="busy", metrics={"eval/skipped_busy": 1}),
        point(4, 4, revision=1, provenance={"regraded_from": "r/step/4/r0", "sets": {"b": {}}}),
        point(0, 5, kind=Kind.BASELINE, provenance={"sets": ["a black box"], "regraded_from": 7}),
    ]
    alert, end, skip, again, base = PageRecords().batch(lines).records
    assert (alert.name, alert.detail) == ("disk", "full")
    assert end.type == "run_end"
    assert (skip.outcome, skip.reason) == ("skipped", "busy")
    assert (again.regraded_from, again.revision, again.sets) == ("r/step/4/r0", 1, ["b"])
    assert (base.kind, base.sets, base.regraded_from) == ("baseline", [], "")
