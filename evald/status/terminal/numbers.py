"""Numbers for people who glance."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB")
_STEP = 1024
#: what three decimals, or one, do not show any more.
_SMALL, _ONE_DIGIT, _LARGE = 0.0005, 10, 10_000


def duration(seconds: float) -> str:
    """Return ``47s``, ``2m05s``, ``3h04m`` or ``12d03h``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def size(n_bytes: int) -> str:
    """Return bytes with a unit."""
    amount = float(n_bytes)
    for unit in _UNITS:
        if amount < _STEP:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= _STEP
    return f"{amount:.1f} TiB"


def score(value: float) -> str:
    """Return a score in about five characters, whatever its scale."""
    magnitude = abs(value)
    if math.isfinite(value) and (magnitude >= _LARGE or 0 < magnitude < _SMALL):
        return f"{value:.1e}"
    return f"{value:.3f}" if magnitude < _ONE_DIGIT else f"{value:.1f}"


def error(value: float) -> str:
    """Return an error bar as short as a score between 0 and 1 lets it be: ``.021``."""
    return score(value).removeprefix("0") if value < 1 else score(value)


def change(value: float) -> str:
    """Return a difference with its sign."""
    return score(value) if value < 0 else f"+{score(value)}"


def rate(value: float | None) -> str:
    """Return tokens/s: three digits are enough for a rate."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < _ONE_DIGIT else f"{value:.0f}"
