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


def check_token(text: str, origin: str, what: str = "token") -> str:
    """Return the token in ``text``, without spaces around it; the rest is for TokenError."""
    token = text.strip()
    if not token:
        put = "a long random one" if what == "token" else "it"
        raise TokenError(f"cannot use the {what} of {origin}: it is empty; put {put} in")
    if not _TOKEN.fullmatch(token):
        raise TokenError(
            f"cannot use the {what} of {origin}: it must be one word of visible ASCII characters"
        )
    return token


def read_token(path: Path, what: str = "token") -> str:
    """Read a token, or another secret, from a file that only its owner and group may read.

    Raises TokenError.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        if isinstance(error, PermissionError):
            raise TokenError(
                f"cannot read {what} file {path}: {cause}; give it to this user, or to a group of "
                "this user's with mode 0640"
            ) from error
        raise TokenError(
            f"cannot read {what} file {path}: {cause}; write the {what} there"
        ) from error
    if mode & _OTHERS:
        raise TokenError(
            f"cannot use {what} file {path}: others may read or write it (mode "
            f"{stat.S_IMODE(mode):04o}); run chmod o= {path}"
        )
    return check_token(text, str(path), what)
