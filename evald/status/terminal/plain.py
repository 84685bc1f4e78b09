"""The status as plain text: once, or whenever something has happened."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Hashable
from typing import NoReturn, TextIO

from evald.errors import EvaldError
from evald.status.client import Door
from evald.status.terminal.layout import lines
from evald.status.terminal.source import Shown, Source
from evald.status.terminal.text import Painter, draw, glyphs_of
from evald.status.view import StatusView


def as_text(shown: Shown, paint: Painter) -> str:
    """Return the whole status as plain text, without a line end behind it."""
    rows = [draw(line, paint.columns, paint.glyphs, colour=False) for line in lines(shown, paint)]
    return "\n".join(rows)


async def watch_plain(find: Callable[[], Door], output: TextIO, *, interval_s: float) -> NoReturn:
    """Write the status whenever something has happened, looking every ``interval_s``.

    Ends by cancellation, or BrokenPipeError when nobody reads any more. Raises EvaldError when the
    first look fails.
    """
    source, paint = Source(find), Painter(glyphs=glyphs_of(output))
    await source.refresh()
    told: Hashable = None
    while True:
        shown = source.shown
        now: Hashable = source.fault or (shown and what_happened(shown.view))
        if now != told and shown is not None:
            told = now
            text = source.fault and f"evald: {source.fault}"
            output.write(f"{text or as_text(shown, paint)}\n\n")
            output.flush()
        await asyncio.sleep(interval_s)
        _insist_on_reader(output)
        try:
            await source.refresh()
        except EvaldError:
            continue  # it is told above, and asked again


def what_happened(view: StatusView) -> Hashable:
    """Return what makes a status another one: not the clocks, nor rates that always change."""
    return (
        (view.pid, view.state, view.not_written, view.config_fault, view.last_seq),
        tuple((e.name, e.state, e.weight_version, e.restarts, e.detail) for e in view.engines),
        tuple((p.run, p.step, p.revision, p.kind, p.state) for p in view.running + view.queued),
        tuple((s.name, s.done) for p in view.running for s in p.sets),
        tuple((r.ticket, r.state, r.points_done, r.samples_done) for r in view.regrades),
    )


def _insist_on_reader(output: TextIO) -> None:
    """Raise BrokenPipeError when a pipe's reader is gone: a write may be far away."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise BrokenPipeError
