"""What a daemon's log says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any


def events(log: str) -> Iterator[dict[str, Any]]:
    """Read events in their order; the last line may be in the making, and is left out then."""
    for line in log.splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def seconds(event: dict[str, Any]) -> float:
    """Tell when it was logged, in seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()
