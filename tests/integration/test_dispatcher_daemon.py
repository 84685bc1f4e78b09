"""A training loop's dispatcher against the whole daemon as a process, with fake engines."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path
from typing import Any

from rig import Rig, rig, until

from evald.results.records import RunEnd
from evald.testing import write_fake_python, write_snapshot
from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.publish import publish


class TinyExporter:
    """Publishes the tiny model with the seed that is handed over as weights."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def export(
        self, weights: Any, step: int, *, final: bool = False, run: str | None = None
    ) -> concurrent.futures.Future[Path]:
        def build(directory: Path) -> None:
            write_snapshot(directory, seed=weights, answer=7, marker=None)

        future: concurrent.futures.Future[Path] = concurrent.futures.Future()
        future.set_result(publish(build, self.root, step, run=run, final=final))
        return future

    def close(self, timeout_s: float = 1.0) -> None:
        """Nothing is open."""


def dispatcher(r: Rig, **settings: Any) -> EvalDispatcher:
    defaults: dict[str, Any] = {
        "first_step": 1,
        "interval": 2,
        "base_dir": r.model,
        "overflow": "backpressure",
        "exporter": TinyExporter(r.root),
    }
    return EvalDispatcher(r.root, **(defaults | settings))


def test_a_run_with_restarts_of_both_sides_has_each_point_once(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python", delay_s=0.02)) as r:
        # the job starts first: its points wait for the daemon
        first = dispatcher(r)
        assert first.baseline().action == "requested"
        assert first.maybe_dispatch(1, 1).action == "not_due"
        assert first.maybe_dispatch(2, 2).action == "published"
        r.start()
        assert first.maybe_dispatch(4, 4).action == "published"
        until(lambda: any(r["type"] == "point" for r in first.poll()), "the first record")
        first.close()

        # the job dies after step 5, before it could give it, and comes back from its checkpoint
        second = dispatcher(r)
        assert second.resume(4, 4).action == "known"
        assert second.baseline(completed_step=4).action == "known"
        assert second.resume(5, 5).action == "published"
        assert second.maybe_dispatch(6, 6).action == "published"
        # the daemon dies with points in hand, and comes back
        r.kill()
        assert second.maybe_dispatch(7, 7, epoch_end=True).action in {"published", "skipped"}
        r.start()
        assert second.finish(9, 9).action == "published"
        drained = second.drain(60)
        assert drained, drained.detail + r.log()[-3000:]
        records = second.poll()
        second.close()

        until(lambda: any(isinstance(x, RunEnd) for x in r.records()), "the run's end")
        points = {(p.kind.value, p.step): p for p in r.points()}
        assert len(points) == len(r.points())
        assert [key for key in sorted(points) if key != ("step", 7)] == [
            ("baseline", 0), ("step", 2), ("step", 4), ("step", 5), ("step", 6), ("step", 9),
        ]  # fmt: skip
        for key, point in points.items():
            expected = "ok" if key != ("step", 7) else point.outcome
            assert point.outcome == expected, point.detail
        # each point has its own bytes, and the last one is known to be the last
        measured = [p.digest for p in points.values() if p.outcome == "ok"]
        assert len(set(measured)) == len(measured)
        polled = [record["step"] for record in records if record["type"] == "point"]
        assert 9 in polled
        assert len(polled) == len(set(polled))

        # the whole job once more, with the same bytes: the answers are there at once
        with dispatcher(r, interval=1, max_in_flight=1, overflow="skip") as third:
            assert third.baseline().action == "known"
            for step in (5, 6):
                assert third.maybe_dispatch(step, step).action == "published"
                manifest = json.loads((r.root / f"step_{step}" / ".complete").read_bytes())
                assert manifest["run"] == r.status()["run"]
            again = third.poll()
            assert [(x["type"], x["step"]) for x in again] == [("point", 5), ("point", 6)]
            assert third.drain(0)


def test_a_new_results_directory_measures_the_same_job_again(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python")
    # (which snapshots stay goes by the order in which points end)
    with rig(tmp_path, python=python, staging="keep = 2", dispatch="rolling = false") as r:
        for life in range(2):
            r.start()
            with dispatcher(r, baseline=False, overflow="skip") as job:
                for step in (2, 4):
                    assert job.maybe_dispatch(step, step).action == "published", r.log()[-3000:]
                assert job.finish(5, 5).action == "published"
                drained = job.drain(20)
                assert drained, drained.detail
            until(lambda: any(isinstance(x, RunEnd) for x in r.records()), "the run's end")
            assert [(p.step, p.outcome) for p in r.points()] == [(2, "ok"), (4, "ok"), (5, "ok")]
            r.stop()
            kept = {path.name for path in r.root.glob("step_*")}
            assert kept == {"step_4", "step_5"}
            r.results.parent.rename(tmp_path / f"results.{life}")


def test_another_host_over_a_spool_and_the_http_api(tmp_path: Path) -> None:
    with rig(
        tmp_path,
        python=write_fake_python(tmp_path / "python", delay_s=1.0),
        dispatch="max_in_flight = 1",
        staging="max_bytes = 3000000\nkeep = 0",
    ) as r:
        r.start()
        spool = tmp_path / "spool"
        with EvalDispatcher(
            spool,
            first_step=1,
            interval=1,
            base_dir=r.model,
            exporter=TinyExporter(spool),
            destination=str(r.root),
            url=f"unix:{tmp_path}/evald.sock",
        ) as job:
            assert job.maybe_dispatch(1, 1).action == "published"
            until(lambda: r.status()["running"], "the point runs")
            busy = job.maybe_dispatch(2, 2)
            assert (busy.reason, busy.detail) == (
                "busy",
                "1 point is in flight, and the cap is 1",
            )
            # the record of a skip is there long before that of the point
            assert r.point(2).reason == "busy"
            assert job.drain(60)
            with (r.model / "large.safetensors").open("wb") as file:
                file.truncate(3_000_001)
            big = job.maybe_dispatch(3, iter([]))
            assert big.reason == "no_space"
            assert "staging.max_bytes = 3000000" in big.detail
            assert job.drain(60)
            polled = [(x["step"], x["reason"]) for x in job.poll() if x["type"] == "point"]
            assert job.finish(3).reason == "no_space"  # as it was told
        assert polled == [(2, "busy"), (1, ""), (3, "no_space")]
        assert polled == [(p.step, p.reason) for p in r.points()]
        until(lambda: any(isinstance(x, RunEnd) for x in r.records()), "the run's end")
        assert list(spool.iterdir()) == []
