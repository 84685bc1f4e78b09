"""The environment of programs that are no code under test."""

from __future__ import annotations

import os


def plain_environ() -> dict[str, str]:
    """Return this process's, but for coverage: it would only slow them down."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
