"""Asking a grading service: batches, tries that are counted, a deadline over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import structlog

from evald.evals.graders import Grade, GraderFailed, Sample
from evald.evals.graders.remote import RemoteSettings, read_verdicts, request
from evald.text import one_line

log = structlog.get_logger(__name__)

#: the service is busy, or not there yet.
_AGAIN = frozenset({429, 503})
_REDIRECT = 300
#: pause before the first further try, doubled for each one after it, and the longest.
_PAUSE_S = 0.25
_MAX_PAUSE_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
#: largest answer that is read.
_MAX_ANSWER_BYTES = 16 << 20
#: how much of an error's body goes into a sentence, characters.
_SHOWN_CHARS = 200
_STOPPED = "cannot grade: grading ends before the service was asked"


class _NotThrough(Exception):
    """The request may be sent again; the sentence says why."""


class _Waiting:
    """One sample that waits for its grade."""

    def __init__(self, sample: Sample, timeout_s: float) -> None:
        self.sample = sample
        self.timeout_s = timeout_s
        self.grade: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()

    def settle(self, result: Grade | Exception) -> None:
        """Hand the result over, unless nobody wants it any more."""
        if self.grade.done():
            return
        if isinstance(result, Exception):
            self.grade.set_exception(result)
        else:
            self.grade.set_result(result)


class RemoteService:
    """One grading service; create it inside a running event loop and ``close()`` it.

    ``token`` is sent with every request, and never shown.
    """

    def __init__(self, settings: RemoteSettings, *, token: str | None = None) -> None:
        self._settings = settings
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._turns = asyncio.Semaphore(settings.concurrency)
        self._sending: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.concurrency),
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    async def grade(self, sample: Sample, *, timeout_s: float) -> Grade:
        """Grade one sample, with others where batches are wanted.

        ``timeout_s`` runs from when its request has its turn. Raises GraderFailed and TimeoutError.
        """
        one = _Waiting(sample, timeout_s)
        self._waiting.append(one)
        if len(self._waiting) >= self._settings.batch:
            self._send_off()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._settings.batch_wait_s, self._send_off)
        return await one.grade

    async def close(self) -> None:
        """Give up what is under way and close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for one in self._waiting:
            one.settle(GraderFailed(_STOPPED))
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._session.close()

    def _send_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        task = asyncio.create_task(self._send(batch), name="ask grading service")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[_Waiting]) -> None:
        """Send one batch and settle all of it, whatever happens."""
        try:
            async with self._turns:
                batch = [one for one in batch if not one.grade.done()]
                if not batch:
                    return
                async with asyncio.timeout(min(one.timeout_s for one in batch)):
                    results = await self._results([one.sample for one in batch])
            for one, result in zip(batch, results, strict=True):
                one.settle(result)
        # failures, and bugs too: whoever waits hears of them, and nobody waits for ever
        except Exception as error:  # noqa: BLE001 - as above
            for one in batch:
                one.settle(error)
        except asyncio.CancelledError:
            for one in batch:
                one.settle(GraderFailed(_STOPPED))
            raise

    async def _results(self, samples: list[Sample]) -> Sequence[Grade | GraderFailed]:
        body = request(self._settings, samples)
        tries = 1 + self._settings.retries
        pause_s = _PAUSE_S
        for number in range(1, tries + 1):
            try:
                content = await self._post(body)
            except _NotThrough as trouble:
                if number == tries:
                    raise GraderFailed(
                        f"{self._settings.url} could not be asked in {tries} tries: {trouble}"
                    ) from trouble
                log.info("grading_service_again", url=self._settings.url, detail=str(trouble))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                return read_verdicts(self._settings, content, len(samples))
        raise ValueError("no tries")

    async def _post(self, body: bytes) -> bytes:
        """Ask once; raises _NotThrough and GraderFailed."""
        url = self._settings.url
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                content = await _read(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise _NotThrough(one_line(str(error) or type(error).__name__)) from error
        except aiohttp.ClientError as error:
            raise GraderFailed(f"{url}: {one_line(str(error))}") from error
        if response.ok and response.status < _REDIRECT:
            return content
        shown = one_line(" ".join(content.decode(errors="replace").split())[:_SHOWN_CHARS])
        sentence = f"HTTP {response.status}: {shown or 'no word'}"
        if response.status in _AGAIN:
            raise _NotThrough(sentence)
        raise GraderFailed(f"{url}: {sentence}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read the answer, up to a limit; raises GraderFailed."""
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            raise GraderFailed(f"{response.url} answers with more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(content)
