"""The server arguments of an engine: four layers, what is not taken over, and where each is from.

Order: evald's own < inherited < [[fleet.group]] < [fleet.sglang]. Only what was given counts: a
field set to SGLang's default value in one layer wins over the layers before it, and ``false``
turns an inherited boolean off. ``tp_size`` is no layer's matter: it is ``gpus_per_engine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from evald.engines.argument import ServerArguments, option_words
from evald.engines.inherit import Inherited, Setting
from evald.engines.inherit_table import (
    NEEDS_WIDTH,
    WIDTHS,
    lookup,
    why_not_inherited,
    why_not_on_cpu,
)

BASE = "evald"
GROUP = "[[fleet.group]]"
OVERRIDE = "[fleet.sglang]"
GPUS = "[fleet] gpus_per_engine"

#: values that are shown to nobody.
_SECRETS = ("api_key", "password", "watermark_config")
_LONGEST = 100


class Dropped(msgspec.Struct, frozen=True):
    """An inherited value that was not taken over."""

    name: str
    value: Any
    reason: str


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The server arguments of the engines of one group, by field name."""

    settings: dict[str, Setting]
    #: never inherited, or left out by [fleet.inherit] without.
    dropped: list[Dropped]
    #: sized for another tensor parallel size: back to SGLang's own value.
    reset: list[Dropped]
    notes: list[str]

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, ``default`` if no layer gives one."""
        setting = self.settings.get(name)
        return default if setting is None else setting.value


def resolve_settings(
    *,
    inherited: Inherited | None,
    group: Mapping[str, Any],
    override: Mapping[str, Any],
    gpus_per_engine: int,
    base: Mapping[str, Any],
    arguments: ServerArguments | None,
    cpu_base: Mapping[str, Any] | None = None,
    group_origin: str = GROUP,
) -> Resolved:
    """Merge the layers: ``base`` is what evald asks for, ``group`` and ``override`` the config's.

    ``cpu_base``: what evald asks for beside ``base`` on the CPU; None on GPUs. ``arguments`` joins
    the spellings of one field; None, when SGLang was not asked: dashes and underscores only.
    """
    evalds = _layer({**base, **(cpu_base or {})}, BASE, arguments)
    here = {
        **_layer(group, group_origin, arguments),
        **_layer(override, OVERRIDE, arguments),
    }
    given = {} if inherited is None else inherited.settings
    cpu_own = None if cpu_base is None else _layer(cpu_base, BASE, arguments)
    if "device" in given and given["device"].value == "cpu":
        cpu_own = None  # its kernels are right for the CPU, too
    without = {} if inherited is None else {_canonical(n, arguments): n for n in inherited.without}
    taken: dict[str, Setting] = {}
    dropped: list[Dropped] = []
    for name, setting in given.items():
        reason = why_not_inherited(name, setting.value)
        if reason is None and cpu_own is not None:
            reason = why_not_on_cpu(name, cpu_own)
        if reason is None and name in without:
            reason = "[fleet.inherit] without names it"
        if reason is None:
            taken[name] = setting
        else:
            dropped.append(Dropped(name, setting.value, reason))
    inherited_tp = given["tp_size"].value if "tp_size" in given else 1
    reset = _reset(taken, here, tp=gpus_per_engine, inherited_tp=inherited_tp)
    for gone in reset:
        del taken[gone.name]
    settings = {**evalds, **taken, **here}
    settings.pop("tp_size", None)
    if gpus_per_engine > 1:
        settings["tp_size"] = Setting(gpus_per_engine, GPUS)
    notes = [] if inherited is None else list(inherited.notes)
    notes += [
        f"fleet.inherit.without: {written} is not among the inherited arguments"
        for name, written in without.items()
        if name not in given
    ]
    return Resolved(settings=settings, dropped=dropped, reset=reset, notes=notes)


def _canonical(name: str, arguments: ServerArguments | None) -> str:
    return arguments.canonical(name) if arguments else name.replace("-", "_")


def _layer(
    table: Mapping[str, Any], origin: str, arguments: ServerArguments | None
) -> dict[str, Setting]:
    layer: dict[str, Setting] = {}
    for key, value in table.items():
        argument = arguments.find(key) if arguments else None
        read = argument.read(value) if argument and argument.type == "human_readable_int" else value
        layer[_canonical(key, arguments)] = Setting(read, origin)
    return layer


def _reset(
    taken: Mapping[str, Setting], here: Mapping[str, Setting], *, tp: int, inherited_tp: Any
) -> list[Dropped]:
    """Find what was sized for the rollout engine's GPUs; what is set here stays, with its needs."""
    reset = []
    if tp != inherited_tp:
        sized = f"sized for tp_size {inherited_tp}, and these engines have {tp}"
        for name, setting in taken.items():
            needs = lookup(NEEDS_WIDTH, name) or ()
            if name in WIDTHS and name not in here:
                reset.append(Dropped(name, setting.value, sized))
            elif needs and not any(width in here for width in needs):
                reason = f"it goes with {' or '.join(needs)}, which is back to 1"
                reset.append(Dropped(name, setting.value, reason))
        return reset
    # All GPUs of an engine are tensor parallel: replicas would need GPUs of their own.
    dp, attention = taken.get("dp_size"), {**taken, **here}.get("enable_dp_attention")
    shared = attention is not None and attention.value
    if dp is not None and dp.value != 1 and "dp_size" not in here and not shared:
        reason = f"without enable_dp_attention it needs {dp.value} times the GPUs of an engine"
        reset.append(Dropped("dp_size", dp.value, reason))
    return reset


def check_settings(settings: Mapping[str, Setting], arguments: ServerArguments) -> list[str]:
    """Return one sentence for each value that the installed SGLang would not take."""
    problems = []
    for name, setting in settings.items():
        argument = arguments.by_dest.get(name)
        shown = f"{setting.origin} {name} = {show(name, setting.value)}"
        if argument is None:
            near = arguments.suggest(name)
            hint = f"did you mean {near}? If not, " if near else ""
            remove = "remove it"
            if setting.origin.startswith("[fleet.inherit]"):
                remove = "name it in fleet.inherit.without to leave it out"
            problems.append(
                f"{shown} is no server argument of SGLang {arguments.version}; {hint}{remove}"
            )
            continue
        value = argument.read(setting.value) if argument.kind == "list" else setting.value
        if problem := argument.problem(value):
            problems.append(f"{shown} {problem} (SGLang {arguments.version})")
    return problems + _gpu_problems(settings)


def _gpu_problems(settings: Mapping[str, Setting]) -> list[str]:
    """Find what [fleet.sglang] or a group asks of GPUs that the engine does not have."""

    def value(name: str) -> int:
        setting = settings.get(name)
        number = setting.value if setting else 1
        return number if isinstance(number, int) and number > 0 else 1

    tp, dp = value("tp_size"), value("dp_size")
    attention = settings.get("enable_dp_attention")
    problems = []
    if dp > 1 and not (attention and attention.value):
        problems.append(
            f"{settings['dp_size'].origin} dp_size = {dp} without enable_dp_attention needs {dp} "
            f"times the engine's {tp} GPUs; raise [fleet] engines instead"
        )
    for name in ("dp_size", "attn_dp_size", "attn_cp_size"):
        if value(name) > 1 and tp % value(name) and not (name == "dp_size" and problems):
            problems.append(
                f"{settings[name].origin} {name} = {value(name)} must divide the engine's {tp} "
                "GPUs (gpus_per_engine)"
            )
    return problems


def command_line(settings: Mapping[str, Setting], arguments: ServerArguments | None) -> list[str]:
    """Return the words that give these settings to SGLang's command line."""
    words: list[str] = []
    for name, setting in settings.items():
        argument = arguments.by_dest.get(name) if arguments else None
        if argument is None:
            words += option_words(f"--{name.replace('_', '-')}", setting.value)
        else:
            words += argument.words(setting.value)
    return words


def explain(resolved: Resolved) -> list[str]:
    """Return lines for ``evald check``: each value and its origin, then what was left behind."""
    lines = [
        f"{name} = {show(name, setting.value)}  (from {setting.origin})"
        for name, setting in resolved.settings.items()
    ]
    lines += [
        f"not inherited: {gone.name} = {show(gone.name, gone.value)}: {gone.reason}"
        for gone in resolved.dropped
    ]
    lines += [
        f"reset: {gone.name} = {show(gone.name, gone.value)}: {gone.reason}"
        for gone in resolved.reset
    ]
    return lines + resolved.notes


def show(name: str, value: Any) -> str:
    """Write a value for people; keys and passwords are hidden."""
    if any(secret in name for secret in _SECRETS):
        return "(hidden)"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
