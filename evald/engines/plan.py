"""Which engines a fleet has: their names, their GPUs, and the server arguments of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from evald.config import Fleet, Group
from evald.engines.argument import ServerArguments
from evald.engines.inherit import Inherited, Setting
from evald.engines.settings import GROUP, Resolved, resolve_settings
from evald.engines.sizing import sized
from evald.errors import ConfigError

#: what evald asks for unless the config says otherwise.
DEFAULT_FLAGS: dict[str, Any] = {
    # fcfs, SGLang's own default, gains nothing from prompts that share a prefix.
    "schedule_policy": "lpm",
    # Also the measured token rate in /v1/loads.
    "enable_metrics": True,
    # One access line for each request would be most of the log.
    "log_level_http": "warning",
}
#: a server on a machine without a GPU, tried and measured; an idle one sleeps.
CPU_FLAGS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "max_total_tokens": 65536,
    "max_running_requests": 128,
    "sleep_on_idle": True,
}
#: asked for by [fleet] deterministic, whatever the layers say.
DETERMINISTIC = "enable_deterministic_inference"
#: name of the engines of a fleet without groups.
UNGROUPED = "engine"


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine before it is launched."""

    name: str
    #: None: the fleet has no groups.
    group: str | None
    #: UUIDs where they are known, else numbers; empty on a CPU.
    gpus: list[str]
    gpus_per_engine: int
    resolved: Resolved

    @property
    def load_format(self) -> str:
        """Name of the loader, which every update must repeat."""
        return str(self.resolved.value("load_format", "auto"))

    @property
    def context_len(self) -> int | None:
        """Tokens of a prompt with its answer, if the config sets them; else the model's own."""
        length = self.resolved.value("context_length")
        return length if isinstance(length, int) else None

    def with_default(self, name: str, value: Any, origin: str) -> EnginePlan:
        """Add a server argument, unless a layer of the config gives it."""
        if name in self.resolved.settings:
            return self
        settings = {**self.resolved.settings, name: Setting(value, origin)}
        resolved = msgspec.structs.replace(self.resolved, settings=settings)
        return msgspec.structs.replace(self, resolved=resolved)


def engine_plan(
    fleet: Fleet,
    *,
    gpus: Sequence[str] | None = None,
    inherited: Inherited | None = None,
    arguments: ServerArguments | None = None,
) -> list[EnginePlan]:
    """Return the engines of ``fleet``: ``engine-0``, ..., with groups ``<group>-0``, ...

    ``gpus``: what may be used, dealt out in order; None: as many as it takes, by number.
    ``inherited``, ``arguments``: see ``resolve_settings``. Raises ConfigError for too few GPUs.
    """
    groups: Sequence[Group | Fleet] = fleet.group or [fleet]
    needed = 0
    plans = []
    for group in groups:
        name = group.name if isinstance(group, Group) else None
        each = group.gpus_per_engine or 1
        size = each if fleet.device == "cuda" else 0
        resolved = resolve_settings(
            inherited=inherited,
            group=group.sglang if isinstance(group, Group) else {},
            override=fleet.sglang,
            gpus_per_engine=each,
            base=_known(DEFAULT_FLAGS, arguments),
            cpu_base=_known(CPU_FLAGS, arguments) if fleet.device == "cpu" else None,
            arguments=arguments,
            group_origin=f"{GROUP} {name}",
        )
        if fleet.device == "cuda":
            resolved.settings.update(sized(resolved.settings, arguments, gpus_per_engine=each))
        if fleet.deterministic:
            resolved.settings[DETERMINISTIC] = Setting(True, "[fleet] deterministic")
        for index in range(group.engines or 0):
            numbers = range(needed, needed + size)
            needed += size
            plans.append(
                EnginePlan(
                    name=f"{name or UNGROUPED}-{index}",
                    group=name,
                    gpus=[str(i) if gpus is None else gpus[i] for i in numbers if _has(gpus, i)],
                    gpus_per_engine=each,
                    resolved=resolved,
                )
            )
    if gpus is not None and needed > len(gpus):
        seen = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        problem = (
            f"fleet: its engines need {needed} GPUs, and evald sees {seen}; lower engines or "
            "gpus_per_engine, or let evald see more in CUDA_VISIBLE_DEVICES"
        )
        raise ConfigError([problem])
    return plans


def _has(gpus: Sequence[str] | None, index: int) -> bool:
    return gpus is None or index < len(gpus)


def _known(defaults: dict[str, Any], arguments: ServerArguments | None) -> dict[str, Any]:
    """Leave out what this SGLang does not have: nobody has asked for it."""
    return {n: v for n, v in defaults.items() if arguments is None or arguments.find(n)}
