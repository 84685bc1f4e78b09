"""Text from elsewhere (file names, answers, messages), made fit for one line of a record."""

from __future__ import annotations

import re
from typing import Any

import msgspec

#: a sentence that is longer tells nothing more.
_MAX_CHARS = 2000


#: options and variables whose values nobody should see. (Bounded: a line may be anything.)
_SECRET = re.compile(
    r"(--(?:(?:admin-)?api|ssl-keyfile-p|watermark-c)[a-z-]{0,64}[=\s]+"
    r"|(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)[A-Z0-9_]{0,64}=)('[^']*'|\"[^\"]*\"|\S+)"
)


def hide_secrets(command: str) -> str:
    """Return a command line for people and logs, without the keys and passwords in it."""
    return _SECRET.sub(r"\1(hidden)", command)


def escape(text: str) -> str:
    """Return ``text`` with all that is not printable escaped: control characters, line ends."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Return ``text`` printable and on one line; what is not printable is escaped."""
    text = escape(text)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def encode_json(struct: msgspec.Struct) -> bytes:
    """Return ``struct`` as JSON, also where it holds text that UTF-8 cannot.

    Half a surrogate pair stands for a byte of a file's name that is not UTF-8, or ends an answer
    that was cut; it is escaped.
    """
    try:
        return msgspec.json.encode(struct)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(struct)))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
        case _:
            return value
