"""Names of metrics, fit to be tags."""

from __future__ import annotations

import zlib

_MAX_CHARS = 250
_SPECIAL = frozenset(" -.,:;/@%^+=()[]{}<>|&~!$*'")


def tag(name: str) -> str:
    """Return a metric's name as loggers take it.

    Names that evald gives stay as they are. In others, line ends, quotes, backslashes and the like
    become ``_``, and what is too long is cut; a hash keeps apart what was different. ``_`` in
    front, W&B's own, gets ``eval/`` before it.
    """
    clean = "".join(c if c.isalnum() or c == "_" or c in _SPECIAL else "_" for c in name).strip()
    if clean.startswith("_") or not clean.strip("/"):
        clean = f"eval/{clean}"
    if clean == name and len(name) <= _MAX_CHARS:
        return name
    return f"{clean[: _MAX_CHARS - 9]}-{zlib.crc32(name.encode('utf-8', 'backslashreplace')):08x}"
