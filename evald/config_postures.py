"""The config's tables of postures: whose engines, or whose evaluation, and what evald may do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from evald.config_types import Count, Name, Positive, Seconds, Table, Text


class EngineLimits(Table, frozen=True, kw_only=True):
    """What all postures with engines have in common: how long evald waits for what."""

    #: one update_weights_from_disk.
    load_timeout_s: Seconds = 600.0
    #: running requests of an engine before it is pinned again.
    drain_timeout_s: Seconds = 60.0
    #: a point waits this long for an engine that serves.
    alive_timeout_s: Seconds = 600.0
    #: seconds between two health probes, and how long one may take.
    probe_interval_s: Seconds = 15.0
    probe_timeout_s: Seconds = 30.0
    #: failed probes in a row that make an engine unhealthy.
    probe_failures: Positive = 3
    #: pin attempts on one digest before the snapshot is blamed.
    pin_attempts: Positive = 2
    #: most requests in flight for each engine; None: as many as raise its throughput.
    max_requests: Positive | None = None


class Group(Table, frozen=True, kw_only=True):
    """Engines of one shape within a fleet."""

    name: Name
    #: any two of engines, gpus and gpus_per_engine give the third.
    engines: Count | None = None
    gpus: Count | None = None
    gpus_per_engine: Positive | None = None
    #: server arguments of this group; [fleet.sglang] wins over them.
    sglang: dict[str, Any] = {}


class Inherit(Table, frozen=True, kw_only=True):
    """Server arguments of the rollout engines that the user has tuned; exactly one source."""

    #: JSON, YAML or TOML file of server arguments.
    file: str | None = None
    #: a full sglang.launch_server command line.
    command: str | None = None
    #: a live engine: the launch_command of its /server_info.
    url: str | None = None
    #: where the live engine's key is, if it wants one.
    api_key_env: str | None = None
    api_key_file: str | None = None
    #: server arguments that are not taken over, beside those that never are.
    without: list[str] = []


class Fleet(EngineLimits, frozen=True, kw_only=True):
    """SGLang servers that evald launches and owns."""

    #: local directory of the base model: engines boot on it, snapshots must match it.
    model: Text
    device: Literal["cuda", "cpu"] = "cuda"
    #: any two of engines, gpus and gpus_per_engine give the third.
    engines: Count | None = None
    gpus: Count | None = None
    gpus_per_engine: Positive | None = None
    #: two kinds of engines in one fleet, instead of the three above.
    group: list[Group] = []
    #: SGLang's deterministic inference: the same seed gives the same answer, whatever else is in
    #: the batch; slower, and on GPUs only.
    deterministic: bool = False
    #: "update" loads snapshots into running engines; "restart" starts the engines on them.
    pin_mode: Literal["update", "restart"] = "update"
    #: a loader of evald's own in the engines, for updates. "auto": on GPUs, if a test at the first
    #: start finds it right, faster than SGLang's and its memory flat; "on": on a CPU, too, and
    #: however fast; "off": never. After a failure that SGLang's own loader would not have had, and
    #: when it loses memory, that one takes over.
    fast_pin: Literal["auto", "on", "off"] = "auto"
    #: interpreter that has SGLang; None: the daemon's own.
    python: str | None = None
    #: from launch to the first generated token.
    start_timeout_s: Seconds = 1800.0
    #: SIGTERM to SIGKILL.
    stop_grace_s: Seconds = 10.0
    #: environment variables that engines inherit beside the built-in list.
    pass_env: list[str] = []
    #: log files kept for each engine.
    keep_logs: Positive = 10
    inherit: Inherit | None = None
    #: any server argument of the installed SGLang, in its own name.
    sglang: dict[str, Any] = {}


class Attached(EngineLimits, frozen=True, kw_only=True):
    """SGLang servers that somebody else runs: never killed, never restarted."""

    #: local directory of the base model: tokenizer and shapes.
    model: Text
    #: the servers, ``http://host:port``.
    urls: Annotated[list[Text], Meta(min_length=1)]
    #: load snapshots into them; false: whoever runs them does, and evald only verifies.
    pin: bool = True
    #: one URL in front of them that spreads the requests; all workers must stand in ``urls``.
    router: str | None = None
    #: where the servers' API key is, if they want one.
    api_key_env: str | None = None
    api_key_file: str | None = None
    #: path here -> path there, for servers that see the staging root elsewhere.
    path_map: dict[str, str] = {}
    #: a one-token probe through the router, after a loss, must succeed within this.
    route_timeout_s: Seconds = 180.0


class Shared(EngineLimits, frozen=True, kw_only=True):
    """The training job's own engines: evald never loads weights into them."""

    #: local directory of the base model: tokenizer.
    model: Text
    #: the engines, ``http://host:port``.
    urls: Annotated[list[Text], Meta(min_length=1)]
    api_key_env: str | None = None
    api_key_file: str | None = None
    #: POSTed before and after a point, if the trainer wants it so: no request of its own meanwhile.
    pause: str | None = None
    resume: str | None = None
    pause_timeout_s: Seconds = 60.0

    @property
    def pause_and_resume(self) -> tuple[str, str] | None:
        """Both URLs, or None (the loader has seen to it that neither is there alone)."""
        if self.pause is None or self.resume is None:
            return None
        return self.pause, self.resume


class BlackBox(Table, frozen=True, kw_only=True):
    """An evaluator of your own, in a process of its own: exactly one of class and command."""

    #: "module:Class", see ``evald.blackbox.CheckpointEvaluator``.
    class_: str | None = msgspec.field(default=None, name="class")
    #: words; {dir}, {step}, {run}, {revision}, {record_id}, {output_dir} (an empty directory) and
    #: {output} (a JSON file in it, to be written) are filled in, {{word}} stands for {word}.
    #: Exit code 0: done; 75: skipped; any other: crashed.
    command: list[str] | None = None
    #: given to the class.
    config: dict[str, Any] = {}
    #: interpreter that runs the class; None: the daemon's own.
    python: str | None = None
    #: working directory; modules of the class are found there, too.
    cwd: Text = "."
    #: one point; what is not done by then is killed and skipped with reason "deadline".
    timeout_s: Seconds = 7200.0
    #: from launch until the class is constructed.
    start_timeout_s: Seconds = 1800.0
    #: SIGTERM to SIGKILL; dispose() has this long.
    stop_grace_s: Annotated[float, Meta(ge=0)] = 30.0
    #: environment variables that the process inherits beside the built-in list.
    pass_env: list[str] = []
    #: environment variables to set.
    env: dict[str, str] = {}
    #: local directory of the base model, whose tensors snapshots must have; None: not compared.
    model: str | None = None
    #: logs and output directories that are kept.
    keep_logs: Positive = 10
