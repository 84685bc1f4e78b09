"""The shape of the status: one struct that is served over HTTP and written to ``status.json``."""

from __future__ import annotations

from typing import Literal

import msgspec

#: header of ``/records``: the newest seq; a reader that is beyond it has read another ledger.
LAST_SEQ_HEADER = "Evald-Last-Seq"


class EngineView(msgspec.Struct, kw_only=True):
    """One engine."""

    name: str
    state: str
    weight_version: str | None = None
    in_flight: int = 0
    #: restarts that count against the engine, since the daemon started.
    restarts: int = 0
    pid: int | None = None
    detail: str = ""
    #: generated tokens/s in answers to evald, lately; None: idle, or not known yet.
    tokens_per_s: float | None = None
    #: used share of the KV cache, 0..1, of the fullest rank; None: idle, or the server tells not.
    kv_use: float | None = None
    #: requests that wait on the server, also somebody else's; None as for ``kv_use``.
    waiting: int | None = None
    #: answers that counted, and their tokens, since the daemon started.
    answers: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class SetView(msgspec.Struct, kw_only=True):
    """Progress of one eval set within a running point."""

    name: str
    done: int
    total: int
    #: mean score over the samples done so far.
    score: float | None = None
    #: seconds until its last sample, as the latest ones went; None: it cannot be said (yet).
    left_s: float | None = None


class PointView(msgspec.Struct, kw_only=True):
    """A queued or running point."""

    run: str
    step: int
    revision: int
    kind: str
    #: "queued", "preparing", "waiting", "pinning", "evaluating" or "recording".
    state: str
    #: seconds in this state.
    since_s: float
    sets: list[SetView] = []


class StagingView(msgspec.Struct, kw_only=True):
    """The staging root."""

    root: str
    #: bytes of the snapshots that evald knows in the root.
    used_bytes: int
    free_bytes: int
    snapshots: int
    #: size of the root's file system; 0: not known, as while the root is away.
    total_bytes: int = 0
    #: budget for ``used_bytes``; None: the free space of the file system.
    max_bytes: int | None = None
    #: bytes that must stay free.
    min_free_bytes: int = 0
    #: names of snapshots and of their markers; "": an evald that does not say.
    pattern: str = ""
    marker: str = ""


class DiskView(msgspec.Struct, kw_only=True):
    """Where results are written."""

    #: of the file system of the results; free: for the daemon's user.
    results_free_bytes: int
    results_total_bytes: int
    #: stored samples of ended points, as of the last look at them; None: not looked yet.
    samples_bytes: int | None = None


class RegradeView(msgspec.Struct, kw_only=True):
    """Stored samples that are, or were, graded again on an operator's word."""

    #: as its asker has named it.
    ticket: str
    run: str
    state: Literal["running", "done", "failed"] = "running"
    points: int
    points_done: int = 0
    #: of the point that is graded now.
    samples: int = 0
    samples_done: int = 0
    #: sentences for people: the newest of ``n_said`` (points that are done, why it failed).
    said: list[str] = []
    n_said: int = 0


class StatusView(msgspec.Struct, kw_only=True):
    """Everything that status shows."""

    version: str
    pid: int
    #: goes up at each write: a reader sees by it that the daemon lives (no common clock needed).
    beat: int
    #: seconds since the epoch.
    time: float
    uptime_s: float
    #: "starting", "serving", "draining"; "paused": by an operator, or as ``not_written`` says.
    state: str
    #: one sentence while evaluation pauses, as results cannot be written (the disk is full).
    not_written: str = ""
    #: one sentence while the config on disk is not the one in use.
    config_fault: str = ""
    run: str
    results: str
    #: max_in_flight.
    cap: int
    queued: list[PointView] = []
    running: list[PointView] = []
    #: terminal records by outcome, over the ledger's life.
    ended: dict[str, int] = {}
    engines: list[EngineView] = []
    staging: StagingView | None = None
    disk: DiskView | None = None
    #: newest known step minus newest ended one, of the run that is furthest behind; None: no step.
    lag_steps: int | None = None
    #: the newest ones.
    regrades: list[RegradeView] = []
    last_seq: int = 0
    #: TCP address at which the daemon can be asked with its token; None: none.
    listen: str | None = None
