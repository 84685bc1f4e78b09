"""``evald check CONFIG``: everything that can be known before start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")


def run(args: argparse.Namespace) -> int:
    """Print the resolved config and what a person should know; ConfigError on a bad one."""
    from evald.config_load import dump_config, load_config
    from evald.engines.prepare import explain_fleet
    from evald.evals.preparation import check_prompts
    from evald.log import configure_logging
    from evald.preflight import preflight

    config = load_config(args.config)
    checked = preflight(config)
    for line in _lines(dump_config(config, brief=True)):
        print(line)
    if config.fleet is not None and checked.fleet is not None:
        print()
        for line in explain_fleet(config.fleet, checked.fleet):
            print(line)
    print()
    for loaded in checked.sets:
        print(f"eval set {loaded.eval_set.name}: {len(loaded.questions)} questions")
    configure_logging("warning")  # this output is for a person
    prompts = []
    if config.model_dir is not None:
        context_len = checked.context_len
        prompts = check_prompts(checked.sets, config.model_dir, context_len=context_len)
    for note in [*checked.notes, *prompts]:
        print(note)
    print("config is good")
    return 0


def _lines(value: Any, key: str = "") -> list[str]:
    """Flatten the tree to ``key = value`` lines."""
    if isinstance(value, dict) and value:
        pairs = ((f"{key}.{name}" if key else name, item) for name, item in value.items())
        return [line for name, item in pairs for line in _lines(item, name)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [line for i, item in enumerate(value) for line in _lines(item, f"{key}[{i}]")]
    return [f"{key} = {value!r}"]
