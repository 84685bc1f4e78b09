"""The terminal itself: taken over as a whole, and given back as it was, whatever happens."""

from __future__ import annotations

import os
import signal
import termios
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

#: alternate screen, no cursor, no line wrap; and back. Old terminals pass by what they do not know.
_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = b"\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
#: keys that end it: q, and Ctrl-D.
_QUIT = b"qQ\x04"
_DEFAULT_SIZE = (80, 24)


class Hangup(Exception):
    """The terminal is gone."""


class Screen:
    """A context: while it is open, the terminal shows what ``draw`` was given last.

    ``output`` and ``keys``: file descriptors of a terminal; ``keys`` None: there is no keyboard.
    """

    def __init__(self, output: int, keys: int | None, *, encoding: str) -> None:
        self._output = output
        self._keys = keys
        self._encoding = encoding
        #: as the terminal was before.
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        """Take the terminal over."""
        self._enter()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Give it back; one that is gone needs nothing."""
        with suppress(OSError, Hangup):
            self._leave()

    def size(self) -> tuple[int, int]:
        """Return columns and rows; a terminal that does not know has 80 and 24."""
        try:
            columns, rows = os.get_terminal_size(self._output)
        except OSError:
            return _DEFAULT_SIZE
        return columns or _DEFAULT_SIZE[0], rows or _DEFAULT_SIZE[1]

    def draw(self, rows: list[str]) -> None:
        """Show ``rows`` in place of what was there, without a flicker. Raises Hangup."""
        body = "\r\n".join(f"{row}{_CLEAR_LINE}" for row in rows)
        frame = f"{_HOME}{body}{_CLEAR_REST}"
        self._write(frame.encode(self._encoding, "backslashreplace"))

    def wants_to_quit(self) -> bool:
        """Read what was typed; tell whether it ends the view. Raises Hangup."""
        if self._keys is None:
            return False
        try:
            typed = os.read(self._keys, 1024)
        except OSError as error:
            raise Hangup from error
        if not typed:
            raise Hangup
        return any(key in _QUIT for key in typed)

    def suspend(self) -> None:
        """Stop as Ctrl-Z asks for, and come back when the shell lets it go on. Raises Hangup."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()

    def _enter(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSADRAIN)  # Ctrl-C and Ctrl-Z stay signals
        self._write(_ENTER)

    def _leave(self) -> None:
        try:
            self._write(_LEAVE)
        finally:
            if self._keys is not None and self._before is not None:
                with suppress(termios.error):
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._output, rest) :]
            except OSError as error:
                raise Hangup from error
