"""Writers of the three files that the show reads: trainer's log, ledger, status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from evald.demo.layout import Layout
from evald.point import Outcome
from evald.results.records import Counts, PointRecord, Record, SetRecord
from evald.status.view import EngineView, PointView, SetView, StatusView

SETS = ("copy", "add")


class Stage:
    """A demo's files, written as evald and the trainer write them."""

    def __init__(self, directory: Path) -> None:
        self.layout = Layout(
            config=directory / "demo.toml",
            directory=directory / ".demo",
            root=directory / "root",
        )
        self.layout.ledger.parent.mkdir(parents=True)
        self.layout.status.parent.mkdir(parents=True)

    def says(self, event: str, **values: Any) -> None:
        with self.layout.log("train").open("a") as log:
            log.write(json.dumps({"event": event, **values}) + "\n")

    def records(self, record: Record) -> None:
        with self.layout.ledger.open("ab") as ledger:
            ledger.write(msgspec.json.encode(record) + b"\n")

    def set_done(self, step: int, name: str, score: float) -> None:
        self.records(
            SetRecord(
                run="demo",
                step=step,
                record_id=f"demo/step/{step}/r0/{name}",
                set=name,
                counts=Counts(n_total=100, n_scored=100),
                seconds=1.0,
                metrics={f"eval/{name}": score, f"eval/{name}/stderr": 0.03},
            )
        )

    def ends(self, step: int, *scores: float, outcome: Outcome = Outcome.OK, **rest: Any) -> None:
        metrics = {"eval/lag_steps": 4.0}
        for name, score in zip(SETS, scores, strict=False):
            metrics |= {f"eval/{name}": score, f"eval/{name}/stderr": 0.04}
        self.records(
            PointRecord(
                run="demo",
                step=step,
                record_id=f"demo/step/{step}/r0",
                outcome=outcome,
                metrics=metrics,
                **rest,
            )
        )

    def shows(
        self,
        *,
        queued: tuple[int, ...] = (),
        running: dict[int, str] | None = None,
        engine_pid: int | None = None,
    ) -> None:
        def view(step: int, state: str) -> PointView:
            sets = [SetView(name="copy", done=10, total=100, score=0.25)]
            if state != "evaluating":
                sets = []
            return PointView(
                run="demo", step=step, revision=0, kind="step", state=state, since_s=1.0, sets=sets
            )

        status = StatusView(
            version="1",
            pid=1,
            beat=1,
            time=0.0,
            uptime_s=1.0,
            state="serving",
            run="demo",
            results=str(self.layout.ledger),
            cap=2,
            queued=[view(step, "queued") for step in queued],
            running=[view(step, state) for step, state in (running or {}).items()],
            engines=[
                EngineView(
                    name="engine-0",
                    state="serving",
                    weight_version="demo:2:aa:bb",
                    pid=engine_pid,
                )
            ],
        )
        self.layout.status.write_bytes(msgspec.json.encode(status))
