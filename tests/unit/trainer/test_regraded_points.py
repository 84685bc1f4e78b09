"""Earlier samples that were graded again, as a training job sees them: a record, and no answer."""

from __future__ import annotations

from typing import Any

from evald.point import Kind
from evald.trainer.dispatcher.inflight import InFlight, Name
from evald.trainer.point_records import PointRecords

POINT = ("r", "step", 3)


def record(seq: int, revision: int, *, regraded: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "type": "point",
        "seq": seq,
        "run": "r",
        "kind": "step",
        "step": 3,
        "revision": revision,
        "outcome": "ok",
        "void_sets": [],
        "provenance": {"regraded_from": "r/step/3/r0"} if regraded else {},
        **changes,
    }


def test_a_drop_waits_for_its_own_weights() -> None:
    points = InFlight()
    points.apply(record(1, 0))
    name = Name(Kind.STEP, 3)
    points.drop(name, now_s=0.0)
    points.apply(record(2, 1, regraded=True))
    assert points.missing() == [name]
    assert points.has_ended(name)
    points.apply(record(3, 2))
    assert points.missing() == []
    # and one that comes after it expects what follows it
    points.apply(record(4, 3, regraded=True))
    points.drop(name, now_s=0.0)
    points.apply(record(5, 3))
    assert points.missing() == [name]
    points.apply(record(6, 4))
    assert points.missing() == []


class Lines:
    """A ledger that can be read again."""

    restarts = 0

    def __init__(self, *records: dict[str, Any]) -> None:
        self.all = list(records)

    def records(self, after: int) -> list[dict[str, Any]]:
        return [one for one in self.all if one["seq"] > after]


async def test_a_request_is_not_answered_by_old_weights() -> None:
    lines = Lines(record(1, 0))
    points = PointRecords(lines)  # type: ignore[arg-type]
    await points.catch_up()
    lines.all.append(record(2, 1, type="set", set="a", record_id="r/step/3/r1/a"))
    lines.all.append(record(3, 1, regraded=True, metrics={"eval/a": 0.5}))
    await points.catch_up()
    assert points.newest_after(POINT, 1) is None
    assert (points.newest(POINT), points.newest_measured(POINT)) == (1, 1)
    answer = await points.answer(POINT, 1)
    assert answer.point["metrics"] == {"eval/a": 0.5}
    assert [one["set"] for one in answer.sets] == ["a"]
    lines.all.append(record(4, 2))
    await points.catch_up()
    assert points.newest_after(POINT, 1) == 2
