"""What the loader completes: presets, absolute paths, and engines, GPUs, GPUs for each engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evald.config import Attached, BlackBox, Config, EvalSet, Fleet, Group, Shared
from evald.presets import PRESETS

#: graders that run the user's own code on this machine.
PROGRAMS = frozenset({"python", "command"})

Shape = TypeVar("Shape", Fleet, Group)


def lay_over_preset(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Lay ``[staging]`` of a parsed config over its preset; what contradicts it is a problem."""
    staging = raw.get("staging")
    name = staging.get("preset") if isinstance(staging, dict) else None
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if not isinstance(staging, dict) or preset is None:
        return raw  # none; or no preset's name, which is reported where [staging] is built
    marker = staging.get("marker", preset.marker)
    if not preset.has_marker and marker != preset.marker:
        finished = preset.finished.format(marker=preset.marker)
        problems.append(
            f"staging.marker: {marker!r}, but with preset {name!r} a snapshot is finished "
            f"{finished}; remove marker, or remove preset and set pattern and owned"
        )
    if preset.rotated and staging.get("owned") is True:
        problems.append(
            f"staging.owned: true, but with preset {name!r} the snapshots are what the trainer "
            "resumes from and deletes by itself; remove owned, or remove preset and export into a "
            "root for snapshots alone"
        )
    return {**raw, "staging": {**preset.settings, **staging}}


def resolve_paths(config: Config, base: Path) -> Config:
    """Make every path absolute; ``base`` is the directory of the config file."""

    def absolute(path: str) -> str:
        return os.path.normpath(base / Path(path).expanduser())

    def program(path: str | None) -> str | None:
        # a bare name is looked up on PATH when it is started
        return path if path is None or os.sep not in path else absolute(path)

    replace = msgspec.structs.replace
    staging = replace(config.staging, root=absolute(config.staging.root))
    results = replace(config.results, dir=absolute(config.results.dir))
    socket, token = config.status.socket, config.status.token_file
    status = replace(
        config.status,
        socket=absolute(socket) if socket else None,
        token_file=absolute(token) if token else token,
    )

    if (webhook := config.webhook) is not None:
        secrets = {"url_file": webhook.url_file, "token_file": webhook.token_file}
        found = {name: absolute(path) for name, path in secrets.items() if path}
        config = replace(config, webhook=replace(webhook, **found))
    if config.keep_best is not None:
        best = replace(config.keep_best, dir=absolute(config.keep_best.dir))
        config = replace(config, keep_best=best)
    sets = [_resolve_set(one, absolute) for one in config.eval]
    config = replace(config, staging=staging, results=results, status=status, eval=sets)
    posture = config.posture
    if isinstance(posture, BlackBox):
        posture = replace(posture, cwd=absolute(posture.cwd))
    if isinstance(posture, Fleet | BlackBox):
        posture = replace(posture, python=program(posture.python))
    if posture.model is not None:
        posture = replace(posture, model=absolute(posture.model))
    if isinstance(posture, Attached | Shared) and posture.api_key_file:
        posture = replace(posture, api_key_file=absolute(posture.api_key_file))
    if isinstance(posture, Fleet) and posture.inherit is not None:
        inherit = posture.inherit
        files = {"file": inherit.file, "api_key_file": inherit.api_key_file}
        given = {name: absolute(path) for name, path in files.items() if path}
        posture = replace(posture, inherit=replace(inherit, **given))
    return replace(config, **{type(posture).__name__.lower(): posture})


def _resolve_set(one: EvalSet, absolute: Callable[[str], str]) -> EvalSet:
    """Make the paths of one eval set absolute."""

    def own_code(config: dict[str, Any]) -> dict[str, Any]:
        # code of the user's own runs, and is found, beside the config file
        cwd = config.get("cwd", ".")
        return {**config, "cwd": absolute(cwd)} if isinstance(cwd, str) else config

    is_program = one.grader.removeprefix("boxed_") in PROGRAMS
    return msgspec.structs.replace(
        one,
        path=absolute(one.path) if one.path else "",
        grader_config=own_code(one.grader_config) if is_program else one.grader_config,
        function_config=own_code(one.function_config) if one.function else one.function_config,
    )


def resolve_engines(fleet: Fleet, problems: list[str]) -> Fleet:
    """Make engines, gpus and gpus_per_engine complete, of the fleet or of each of its groups."""
    if not fleet.group:
        return _resolve(fleet, "fleet", fleet.device, problems)
    problems += [
        f"fleet.{name}: there are [[fleet.group]] tables; set {name} in each of them"
        for name in ("engines", "gpus", "gpus_per_engine")
        if getattr(fleet, name) is not None
    ]
    groups = [
        _resolve(group, f"fleet.group[{i}]", fleet.device, problems)
        for i, group in enumerate(fleet.group)
    ]
    return msgspec.structs.replace(fleet, group=groups)


def _resolve(table: Shape, key: str, device: str, problems: list[str]) -> Shape:
    """Any two of the three give the third; on a CPU only engines count."""
    engines, gpus, each = table.engines, table.gpus, table.gpus_per_engine
    if device == "cpu":
        if gpus or (each or 1) > 1:
            problems.append(
                f"{key}.gpus: device is 'cpu', got gpus = {gpus}, gpus_per_engine = {each}; "
                "remove both, or set fleet.device = 'cuda'"
            )
        return msgspec.structs.replace(
            table, engines=1 if engines is None else engines, gpus=0, gpus_per_engine=1
        )
    each = each or (gpus // engines if gpus and engines and gpus % engines == 0 else 1)
    if gpus is None:
        gpus = (1 if engines is None else engines) * each
    if engines is None:
        engines = gpus // each
    if engines * each != gpus:
        problems.append(_mismatch(table, key, engines, gpus, each))
    return msgspec.structs.replace(table, engines=engines, gpus=gpus, gpus_per_engine=each)


def _mismatch(table: Fleet | Group, key: str, engines: int, gpus: int, each: int) -> str:
    if table.engines is None or table.gpus_per_engine is None:
        parts = each if table.engines is None else engines
        return f"{key}.gpus: {gpus} GPUs do not divide by {parts}; choose a multiple of {parts}"
    return (
        f"{key}.gpus: {gpus}, but engines = {engines} times gpus_per_engine = {each} makes "
        f"{engines * each}; remove one of the three"
    )
