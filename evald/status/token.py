"""The token that whoever asks over TCP has to show: where it is kept, what it may look like.

Standard library only: a training process reads its token here, too.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from evald.errors import EvaldError

#: where commands and the training side look for it when they are given none.
TOKEN_VARIABLE = "EVALD_TOKEN"  # noqa: S105 - a variable's name
#: it travels in a header: visible ASCII, nothing that would have to be escaped.
_TOKEN = re.compile(r"[\x21-\x7e]+")
_OTHERS = stat.S_IROTH | stat.S_IWOTH


class TokenError(EvaldError):
    """A token that cannot be used."""


def check_token(text: str, origin: str) -> str:
    """Return the token in ``text``, without spaces around it; ``origin`` is for TokenError."""
    token = text.strip()
    if not token:
        raise TokenError(f"cannot use the token of {origin}: it is empty; put a long random one in")
    if not _TOKEN.fullmatch(token):
        raise TokenError(
            f"cannot use the token of {origin}: it must be one word of visible ASCII characters"
        )
    return token


def read_token(path: Path) -> str:
    """Read a token from a file that only its owner and group may read; raises TokenError."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TokenError(
            f"cannot read token file {path}: {cause}; write the token there"
        ) from error
    if mode & _OTHERS:
        raise TokenError(
            f"cannot use token file {path}: others may read or write it (mode "
            f"{stat.S_IMODE(mode):04o}); run chmod o= {path}"
        )
    return check_token(text, str(path))
