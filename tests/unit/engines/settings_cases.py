"""What the tests of server arguments share: a small SGLang, and settings resolved for it."""

from __future__ import annotations

from typing import Any

from small_sglang import small_sglang

from evald.config import Inherit
from evald.engines.argument import ServerArguments
from evald.engines.inherit import Inherited, Setting, read_inherited
from evald.engines.settings import (
    Resolved,
    resolve_settings,
)

SGLANG = small_sglang()


FROM = "[fleet.inherit] command"


def rollout(command: str = "", **values: Any) -> Inherited:
    given = {name: Setting(value, FROM) for name, value in values.items()}
    if command:
        inherit = Inherit(command=f"sglang serve {command}")
        given = read_inherited(inherit, base=None, arguments=SGLANG, environ={}).settings | given
    return Inherited(settings=given)


def resolve(
    inherited: Inherited | None = None,
    override: dict[str, Any] | None = None,
    *,
    group: dict[str, Any] | None = None,
    gpus: int = 1,
    base: dict[str, Any] | None = None,
    cpu_base: dict[str, Any] | None = None,
    arguments: ServerArguments | None = SGLANG,
) -> Resolved:
    return resolve_settings(
        inherited=inherited,
        group=group or {},
        override=override or {},
        gpus_per_engine=gpus,
        base=base or {},
        cpu_base=cpu_base,
        arguments=arguments,
    )


def values(resolved: Resolved) -> dict[str, Any]:
    return {name: setting.value for name, setting in resolved.settings.items()}


def names(gone: list[Any]) -> list[str]:
    return [item.name for item in gone]
