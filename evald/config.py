"""The one typed config tree.

Loaded from TOML and cross-checked once (``config_load``), then handed to the parts through their
constructors. Names carry their units; every relative path is relative to the config file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evald.config_alerts import AlertRule, Webhook
from evald.config_postures import (
    Attached,
    BlackBox,
    EngineLimits,
    Fleet,
    Group,
    Inherit,
    Shared,
)
from evald.config_sets import Aggregate, Defaults, EvalSet
from evald.config_types import (
    Count,
    Mode,
    Name,
    NotNegative,
    Positive,
    Seconds,
    Share,
    Table,
    Text,
)

__all__ = [
    "Aggregate",
    "AlertRule",
    "Attached",
    "BlackBox",
    "Config",
    "Defaults",
    "Dispatch",
    "EngineLimits",
    "EvalSet",
    "Fleet",
    "Group",
    "Inherit",
    "KeepBest",
    "Results",
    "Shared",
    "Staging",
    "Status",
    "Table",
    "Webhook",
]


class Staging(Table, frozen=True, kw_only=True):
    """Where snapshots appear."""

    #: directory that is watched, normally on tmpfs; created if it is missing.
    root: Text
    #: what a framework writes (``evald/presets.py``): defaults of pattern, marker and owned
    #: (false), and how one knows that a snapshot is finished. What is set beside it wins.
    preset: Literal["miles", "slime", "prime-rl", "hf-trainer", "verl"] | None = None
    #: name of a snapshot directory; ``{step}`` stands for the step number.
    pattern: Annotated[
        str,
        Meta(pattern=r"\{step\}", description="text with {step} in it, such as 'step_{step}'"),
    ] = "step_{step}"
    #: file that is written last, relative to the snapshot directory (preset "verl": to the root).
    marker: Text = ".complete"
    #: evald deletes ended snapshots, and nobody else does; false: evald never deletes here.
    owned: bool = True
    #: ended snapshots that stay before the oldest is deleted.
    keep: Count = 2
    #: budget for all snapshots in the root; None: the free space of the file system.
    max_bytes: Positive | None = None
    #: bytes of the root's file system that stay free: a snapshot that leaves less is skipped
    #: (no_space), and the SDK does not begin one. 0: all may be used.
    min_free_bytes: Count = 0
    #: "off" hands snapshots to the engine unchecked (only for trying that out).
    validation: Literal["full", "off"] = "full"
    #: tensors (shell patterns) that may be absent from a snapshot.
    allow_absent: list[str] = []
    #: a directory without marker in which nothing has changed for so long is "ckpt_missing", and
    #: sooner once a newer step of its run is there.
    unmarked_after_s: Seconds = 3600.0
    overtaken_after_s: Seconds = 300.0
    #: seconds between two scans; events only make them come sooner.
    scan_interval_s: Seconds = 2.0


class Dispatch(Table, frozen=True, kw_only=True):
    """Admission, order and deadlines."""

    #: points prepared or running at the same time.
    max_in_flight: Positive = 2
    #: an engine that has nothing left of a point goes to the next one at once; false: a point
    #: begins when the one before it has ended. Of no use with max_in_flight = 1, nor where evald
    #: does not load or a router stands before the engines: there one point has all of them.
    rolling: bool = True
    #: the last answers of a point go on together on few engines, so that the next point gets the
    #: others; false: each stays where it began. Of no use without rolling. Never with deterministic
    #: inference, nor where an answer cannot be continued (stop strings, penalties, grammars).
    consolidate: bool = True
    #: what happens to a snapshot beyond max_in_flight.
    overflow: Literal["backpressure", "skip", "latest"] = "backpressure"
    #: from the moment the point holds the engines; what it has had of them before the daemon was
    #: killed or stopped counts, and so it does for the deadlines of sets.
    point_deadline_s: Seconds = 7200.0
    #: from the moment the request is sent, retries included.
    sample_timeout_s: Seconds = 600.0
    #: how long SIGTERM lets running requests finish.
    drain_timeout_s: Seconds = 60.0
    #: share of samples without a score above which a point is "partial", not "ok".
    max_error_share: Share = 0.01
    #: share of a point's samples that deadlines and stragglers must have left: with less it is
    #: "skipped" with reason "deadline", else "partial".
    min_done_share: Share = 0.5
    #: evaluate the base model once for each run.
    baseline: bool = False
    #: x of the baseline; -1 where steps count from 0.
    baseline_step: int = 0
    #: an eval set that is not what earlier points of its run were measured with: the first point
    #: says so and is not compared, or it is skipped (and the daemon does not start).
    on_set_change: Literal["record", "refuse"] = "record"


class Results(Table, frozen=True, kw_only=True):
    """Where results go."""

    #: directory of results.jsonl, samples/ and engine logs; created if it is missing.
    dir: Text
    #: octal modes, as text.
    dir_mode: Mode = "0755"
    file_mode: Mode = "0644"
    #: group name that owns the files; None: the daemon's own.
    group: str | None = None
    #: MiB after which results.jsonl is closed as results.FIRST-LAST.jsonl (seq of its first and
    #: last record) and a new one is begun; every reader of evald's goes through all. 0: never.
    rotate_mb: NotNegative = 64.0
    #: samples of ended points are compressed; beyond this many GB (10^9 bytes) in all, and older
    #: than this many days, the oldest are deleted. Records stay, and so do samples that the next
    #: point is compared with. 0: no limit.
    samples_max_gb: NotNegative = 50.0
    samples_keep_days: NotNegative = 0.0


class KeepBest(Table, frozen=True, kw_only=True):
    """The best snapshot of each run is copied before it is given up.

    One that cannot be copied (no room) stays in the staging root, beside ``staging.keep`` others,
    and is tried again, until it is copied or a better one has been measured.
    """

    #: metric of a point's record, such as "eval/aime".
    metric: Text
    #: which value is the best; an equal one does not replace what is kept.
    rule: Literal["max", "min"] = "max"
    #: DIR/<run>/best leads to the copy, with the point's record as evald_record.json; best_by.txt
    #: beside it has rule and metric, and a daemon with others keeps nothing there.
    dir: Text


class Status(Table, frozen=True, kw_only=True):
    """How the daemon can be asked."""

    #: unix socket; None: a name made from the results directory, in the user's runtime directory.
    socket: str | None = None
    #: TCP as well: "host:port", "[::1]:port", "0.0.0.0:port" for all interfaces; port 0: any free
    #: one. Not encrypted: use an ssh tunnel or a proxy with TLS across networks that others use.
    listen: str | None = None
    #: the token that TCP asks for (exactly one of the two): an environment variable, or a file that
    #: others may not read.
    token_env: str | None = None
    token_file: str | None = None


class Config(Table, frozen=True, kw_only=True):
    """The whole tree."""

    #: run id for snapshots that name none.
    run: Name = "run"
    #: least severe events that are logged; ``evald run --log-level`` wins.
    log_level: Literal["debug", "info", "warning"] = "info"
    staging: Staging
    dispatch: Dispatch = msgspec.field(default_factory=Dispatch)
    results: Results
    status: Status = msgspec.field(default_factory=Status)
    #: None: what has ended goes when its turn comes.
    keep_best: KeepBest | None = None
    #: exactly one posture: who owns the engines.
    fleet: Fleet | None = None
    attached: Attached | None = None
    shared: Shared | None = None
    blackbox: BlackBox | None = None
    defaults: Defaults = msgspec.field(default_factory=Defaults)
    #: the eval YAML of miles and slime (``evald/eval_yaml``), relative to the config file, or
    #: ``base64:`` and its text; its sets come behind the [[eval]] tables.
    eval_config: Text | None = None
    #: what is measured; empty for a black box, which knows by itself.
    eval: list[EvalSet] = []
    aggregate: list[Aggregate] = []
    #: what a person is told of, and where else than in ledger and log (None: nowhere).
    alert: list[AlertRule] = []
    webhook: Webhook | None = None

    @property
    def results_file(self) -> Path:
        """The ledger."""
        return Path(self.results.dir) / "results.jsonl"

    @property
    def posture(self) -> Fleet | Attached | Shared | BlackBox:
        """The one posture that the config has (the loader has seen to it)."""
        for posture in (self.fleet, self.attached, self.shared, self.blackbox):
            if posture is not None:
                return posture
        raise ValueError("the config has no posture")

    @property
    def model_dir(self) -> Path | None:
        """Directory of the base model; None for a black box that compares nothing."""
        model = self.posture.model
        return None if model is None else Path(model)

    @property
    def engine_count(self) -> int:
        """Engines that evald launches itself (set by the loader from any two of the three)."""
        if self.fleet is None:
            return 0
        groups: list[Group] | list[Fleet] = self.fleet.group or [self.fleet]
        return sum(group.engines or 0 for group in groups)
