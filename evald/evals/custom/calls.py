"""One call of a generate function, from the daemon's side, and how it can end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from evald.errors import EvaldError
from evald.evals.custom.messages import Ask, Returned
from evald.postures.contract import Generation
from evald.results.samples import Piece

#: answers one request of the function; raises GenerationFailed, and what ends the point.
Serve = Callable[[Ask], Awaitable[Generation]]


class Lost(EvaldError):
    """The process ended before the call did.

    ``is_own``: because of this call. ``is_unclear``: nobody knows whose fault it was.
    """

    def __init__(self, detail: str, *, is_own: bool, is_unclear: bool) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_own = is_own
        self.is_unclear = is_unclear


class Outcome(msgspec.Struct, frozen=True):
    """What a call has come to."""

    returned: Returned
    #: the last answer of the engines, with the tokens of all of them, and, if any was moved between
    #: engines, the pieces of all of them; None: it never asked.
    generation: Generation | None


class Call:
    """A call that is under way: its requests, and what it has come to."""

    def __init__(self, number: int, serve: Serve) -> None:
        self.number = number
        self.serve = serve
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        #: the process has heard that nobody waits for it any more.
        self.gone = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._output_ids: list[int] = []
        self._pieces: list[Piece] = []
        self._moved = False
        self._last: Generation | None = None

    def watch(self, request: asyncio.Task[None]) -> None:
        """Have a request end with the call; whatever it raises ends the call."""
        self._requests.add(request)
        request.add_done_callback(self._request_ended)

    def answered(self, generation: Generation) -> None:
        """Take in one answer of the engines."""
        self._output_ids += generation.output_ids
        self._pieces += generation.pieces or [_whole(generation)]
        self._moved = self._moved or bool(generation.pieces)
        self._last = generation

    def returned(self, returned: Returned) -> None:
        """Take in what the function returned."""
        if not self.outcome.done():
            last = self._last
            if last is not None:
                pieces = tuple(self._pieces) if self._moved else ()
                last = msgspec.structs.replace(last, output_ids=self._output_ids, pieces=pieces)
            self.outcome.set_result(Outcome(returned, last))

    def fail(self, error: BaseException) -> None:
        """End without an outcome."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def end(self) -> None:
        """Nobody waits for it any more."""
        for request in self._requests:
            request.cancel()
        if self.outcome.done():
            self.outcome.exception()  # (one that nobody has looked at is warned of)

    def _request_ended(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled() and (error := request.exception()) is not None:
            self.fail(error)


def _whole(generation: Generation) -> Piece:
    return Piece(
        engine=generation.engine,
        weight_version=generation.weight_version,
        tokens=len(generation.output_ids),
    )
