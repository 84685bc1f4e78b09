"""What callers give: a value that cannot be used is a ValueError, with the remedy."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

#: of a file or folder.
AnyPath: TypeAlias = str | os.PathLike[str]
#: as many digits as evald reads in the name of a snapshot.
_STEP_DIGITS = 15


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for what is none of the words that are allowed."""
    if value not in allowed:
        raise ValueError(f"cannot use {name}={value!r}: give {' or '.join(map(repr, allowed))}")


def known_names(what: str, names: Iterable[Any], known: Iterable[str]) -> None:
    """Raise ValueError for an argument that ``what`` does not have."""
    known = sorted(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"cannot use {name!r} in {what}: there is no such argument; {hint}")


def whole(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` as an int (numpy's are fine); raises ValueError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"cannot use {name}={value!r}: give a whole number, {least} or more")
    return number


def above_zero(name: str, value: Any, unit: str) -> float:
    """Return a finite time of so many ``unit``."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not math.isfinite(value) or value <= 0:
        raise ValueError(f"cannot use {name}={value!r}: give a number of {unit} above 0")
    return float(value)


def step_number(name: str, value: Any) -> int:
    """Return a step's number as an int (numpy's are fine); raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(  # noqa: TRY004 - wrong arguments are one kind of error
            f"cannot use a {type(value).__name__} as {name}: give a whole number, an int"
        )
    number = operator.index(value)
    if abs(number) >= 10**_STEP_DIGITS:
        raise ValueError(f"cannot use {name}: it has more than {_STEP_DIGITS} digits")
    return number


def wait_seconds(name: str, value: Any) -> float:
    """Return a wait's length (inf: as long as can be); raises ValueError for what is none."""
    numeric = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not numeric or math.isnan(value):
        raise ValueError(f"cannot wait for {name}={value!r}: give a number of seconds")
    return min(float(value), threading.TIMEOUT_MAX)


def checkpoint(path: Any) -> Path | None:
    """Return a checkpoint's path; raises ValueError for what is none."""
    try:
        return None if path is None else Path(path)
    except TypeError:
        raise ValueError(f"cannot use path={path!r}: give a checkpoint's directory") from None
