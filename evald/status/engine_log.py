"""The last lines of an engine's newest log, fit to be shown: no secrets, no control characters."""

from __future__ import annotations

import os
import re
from pathlib import Path

from evald.engines.process_log import TERMINAL
from evald.text import escape, hide_secrets

MAX_LINES = 2000
_TAIL_BYTES = 512 << 10
_MAX_LINE_CHARS = 4000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
#: SGLang writes all its arguments into its log, keys among them. (Bounded: a line may be anything.)
_ARGUMENT = re.compile(
    r"((?:api_key|password|secret|hf_token|watermark_config)\w{0,64}['\"]?\s*[=:]\s*)"
    r"('[^']*'|\"[^\"]*\"|(?!None\b)[^\s,)}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\bBearer\s+)\S+", re.IGNORECASE)
#: the keys that evald makes for its engines: of this start, and of earlier ones.
_OWN_KEY = re.compile(r"\b[0-9a-f]{64}\b")
#: the one process that is no engine; its logs lie beside the engines' directories.
_BLACKBOX = "blackbox"


def log_lines(results_dir: Path, engine: str, n_lines: int) -> tuple[str, list[str]]:
    """Return the name of the engine's newest log and its last lines. Blocking.

    Raises ValueError for a name that is none, FileNotFoundError when it has no log (engines that
    somebody else has started), OSError.
    """
    if not _NAME.fullmatch(engine):
        raise ValueError(f"cannot use {engine!r}: it is no engine's name")
    path = _newest(results_dir, engine)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - _TAIL_BYTES, 0))
        tail = file.read(_TAIL_BYTES).decode(errors="replace")
    # progress bars end their lines with a carriage return
    lines = [line for line in re.split(r"[\r\n]+", TERMINAL.sub("", tail)) if line.strip()]
    if size > _TAIL_BYTES:
        del lines[:1]  # the rest of a line
    shown = lines[-min(n_lines, MAX_LINES) :] if n_lines else []
    return path.name, [_safe(line) for line in shown]


def _newest(results_dir: Path, engine: str) -> Path:
    directory = results_dir / (engine if engine == _BLACKBOX else f"engines/{engine}")
    found = [path for path in directory.glob("*.log") if path.stem.isdigit()]
    if not found:
        raise FileNotFoundError(engine)
    return max(found, key=lambda path: int(path.stem))


def _safe(line: str) -> str:
    line = _BEARER.sub(r"\1(hidden)", _ARGUMENT.sub(r"\1(hidden)", hide_secrets(line)))
    line = escape(_OWN_KEY.sub("(hidden)", line).replace("\t", "    "))
    return line if len(line) <= _MAX_LINE_CHARS else line[:_MAX_LINE_CHARS] + " ..."
