"""A status server whose ledger tells of a whole training run, in the middle of a point."""

from __future__ import annotations

import msgspec
from status_stage import Stage
from training_run import make_run, write_samples

from evald.status.view import DiskView, EngineView, PointView, SetView, StagingView, StatusView


async def fill(stage: Stage, run: str, n_points: int) -> None:
    """Write a run into the ledger, and samples of its last two points."""
    for record in make_run(run, n_points):
        await stage.ledger.append(record)
    for number in (n_points - 1, n_points):
        write_samples(stage.work, run, 20 * number, seed=number)


class BusyStage(Stage):
    """A daemon in the middle of a point."""

    #: samples that are done.
    done = 60

    def view(self) -> StatusView:
        point = PointView(
            run="demo",
            step=820,
            revision=0,
            kind="step",
            state="evaluating",
            since_s=31.0,
            sets=[
                SetView(name="aime", done=200, total=200, score=0.455),
                SetView(name="gpqa-diamond", done=self.done, total=200, score=0.43, left_s=42.0),
                SetView(name="math500", done=0, total=200),
            ],
        )
        queued = PointView(run="demo", step=840, revision=0, kind="step", state="queued", since_s=3)
        engines = [
            EngineView(
                name=f"engine-{number}",
                state=state,
                weight_version=f"demo:820:6a0a4e6f:412838d{number}",
                in_flight=in_flight,
                pid=4711 + number,
                tokens_per_s=rate,
                kv_use=use,
                waiting=0,
                restarts=number % 2,
            )
            for number, (state, in_flight, rate, use) in enumerate(
                [
                    ("serving", 64, 5312.0, 0.62),
                    ("serving", 61, 5120.5, 0.58),
                    ("pinning", 0, None, None),
                    ("quarantined", 0, None, None),
                ]
            )
        ]
        return msgspec.structs.replace(
            super().view(),
            state="serving",
            uptime_s=7210.0,
            running=[point],
            queued=[queued],
            engines=engines,
            lag_steps=40,
            staging=StagingView(
                root="/dev/shm/evald",
                used_bytes=24_600_000_000,
                free_bytes=30_000_000_000,
                snapshots=3,
                max_bytes=40_000_000_000,
            ),
            disk=DiskView(
                results_free_bytes=4_100_000_000,
                results_total_bytes=500_000_000_000,
                samples_bytes=12_700_000_000,
            ),
        )
