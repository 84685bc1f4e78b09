"""The status live on a terminal: fresh data, keys, signals, other sizes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TextIO

from evald.errors import EvaldError
from evald.status.client import Door
from evald.status.terminal.layout import lines
from evald.status.terminal.numbers import duration
from evald.status.terminal.screen import Hangup, Screen
from evald.status.terminal.source import Source
from evald.status.terminal.text import Glyphs, Line, Painter, Span, draw, glyphs_of

#: as a shell shows a program that a signal has ended.
_SIGNALLED = 128


class LiveWatch:
    """Keeps ``screen`` up to date: new data every ``interval_s``, a new frame when it is resized.

    ``keys``: the keyboard's file descriptor, where there is one.
    """

    def __init__(
        self,
        source: Source,
        screen: Screen,
        *,
        keys: int | None,
        glyphs: Glyphs,
        colour: bool,
        interval_s: float,
    ) -> None:
        self._source = source
        self._screen = screen
        self._keys = keys
        self._glyphs = glyphs
        self._colour = colour
        self._interval_s = interval_s
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Show until somebody ends it; the exit code."""
        asking = asyncio.create_task(self._ask(), name="ask")
        with self._listening():
            try:
                await asyncio.wait((asking, self._ended), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    asking.result()  # raises what only a bug can raise
                return self._ended.result()
            finally:
                asking.cancel()
                await asyncio.wait((asking,))

    async def _ask(self) -> None:
        self._draw()
        while True:
            await asyncio.sleep(self._interval_s)
            with suppress(EvaldError):  # shown below, and asked again
                await self._source.refresh()
            self._draw()

    def _draw(self) -> None:
        columns, rows = self._screen.size()
        paint = Painter(columns, self._glyphs)
        head = self._trouble(paint)
        shown = self._source.shown
        body = lines(shown, paint, rows=rows - len(head)) if shown is not None else []
        if head:  # it is old
            body = [[Span(span.text, "dim") for span in line] for line in body]
        frame = [*head, *body][:rows]
        drawn = [draw(line, columns, self._glyphs, colour=self._colour) for line in frame]
        self._guarded(lambda: self._screen.draw(drawn))

    def _trouble(self, paint: Painter) -> list[Line]:
        source = self._source
        if not source.fault:
            return []
        words = f"NO ANSWER for {duration(source.fault_s)}, below is the last one: {source.fault}"
        return [*paint.sentence(words, "red", most=3), []]

    # --- the person at the terminal --------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear keys and signals; everything is as before at the end."""
        loop = asyncio.get_running_loop()
        endings = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        handlers: dict[signal.Signals, Callable[[], None]] = {
            **{number: partial(self._end, _SIGNALLED + number) for number in endings},
            signal.SIGWINCH: self._draw,
            signal.SIGTSTP: self._suspend,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        if self._keys is not None:
            loop.add_reader(self._keys, self._on_key)
        try:
            yield
        finally:
            if self._keys is not None:
                loop.remove_reader(self._keys)
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_key(self) -> None:
        self._guarded(lambda: self._end(0) if self._screen.wants_to_quit() else None)

    def _suspend(self) -> None:
        self._guarded(self._screen.suspend)
        self._draw()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Hangup:
            self._end(_SIGNALLED + signal.SIGHUP)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)


async def watch_live(
    find: Callable[[], Door],
    output: TextIO,
    *,
    keys: int | None,
    colour: bool,
    interval_s: float,
) -> int:
    """Show the status on the terminal ``output`` until it is ended; the exit code.

    Raises EvaldError when the first look fails: then the terminal is not touched.
    """
    source = Source(find)
    await source.refresh()
    glyphs = glyphs_of(output)
    with Screen(output.fileno(), keys, encoding=output.encoding) as screen:
        watch = LiveWatch(
            source, screen, keys=keys, glyphs=glyphs, colour=colour, interval_s=interval_s
        )
        return await watch.run()
