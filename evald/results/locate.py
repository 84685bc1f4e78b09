"""Which ledger a command line means."""

from __future__ import annotations

from pathlib import Path

from evald.config_load import load_config

LEDGER_NAME = "results.jsonl"


def results_file(target: str) -> Path:
    """Return the ledger of ``target``: a config file, a results directory, or the ledger itself.

    It need not exist yet. Raises ConfigError for a bad config.
    """
    path = Path(target)
    if path.suffix == ".toml":
        return load_config(path).results_file
    # what is a file is meant as one, whatever its name (a copy, a moved ledger)
    return path if path.suffix == ".jsonl" or path.is_file() else path / LEDGER_NAME
