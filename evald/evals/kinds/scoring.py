"""What the kinds share that generate nothing."""

from __future__ import annotations

from typing import Any

#: of a request that is only scored: no token is generated, and temperature changes nothing.
SCORE_ONLY: dict[str, Any] = {"max_new_tokens": 0, "temperature": 0.0}
