"""Settings of a grader: the table ``grader_config``, checked like every other table."""

from __future__ import annotations

from typing import Any

import msgspec

from evald.config import Table
from evald.config_convert import build_table
from evald.evals.graders.contract import Rules


def setting_faults(kind: type[Table], rules: Rules) -> list[str]:
    """One sentence for each fault; ``kind`` is the table that the grader reads."""
    if rules.config and not msgspec.structs.fields(kind):
        return [f"grader_config: grader {rules.grader!r} has no settings; remove it"]
    problems: list[str] = []
    build_table(kind, rules.config, "grader_config", problems)
    return problems


def setting_version(config: dict[str, Any]) -> str:
    """Name settings in a version; nothing without any."""
    return f"/{msgspec.json.encode(config, order='deterministic').decode()}" if config else ""
