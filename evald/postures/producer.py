"""The trainer's own requests to shared engines: paused for a point, and resumed after it."""

from __future__ import annotations

import asyncio

import aiohttp
import structlog

from evald.errors import EvaldError
from evald.point import PinTarget

log = structlog.get_logger(__name__)

#: between two tries to resume.
RETRY_S = 0.5


class ProducerError(EvaldError):
    """The producer did not take in what it was told."""


class Producer:
    """POSTs to the ``pause`` and ``resume`` URLs.

    ``timeout_s``: for one pause, and for all tries of one resumption.
    """

    def __init__(self, pause: str, resume: str, *, timeout_s: float) -> None:
        self._pause = pause
        self._resume = resume
        self._timeout_s = timeout_s

    async def pause(self, target: PinTarget) -> None:
        """Return when no request of the trainer's reaches an engine any more.

        Raises ProducerError.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await _post(self._pause, {"run": target.run, "step": target.step})
        except TimeoutError as error:
            raise ProducerError(
                f"cannot pause the trainer: {self._pause} did not answer within "
                f"{self._timeout_s:g} s; nothing was measured"
            ) from error
        except (aiohttp.ClientError, OSError, ProducerError) as error:
            raise ProducerError(
                f"cannot pause the trainer: {self._pause}: {error or type(error).__name__}; "
                "nothing was measured"
            ) from error
        log.info("trainer_paused", run=target.run, step=target.step)

    async def resume(self) -> None:
        """Let the trainer go on; tries until it answers, logs an error when it never does."""
        trouble = "no answer"
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        await _post(self._resume, {})
                    except (aiohttp.ClientError, OSError, ProducerError) as error:
                        trouble = str(error) or type(error).__name__
                        await asyncio.sleep(RETRY_S)
                    else:
                        log.info("trainer_resumed")
                        return
        except TimeoutError:
            log.error(  # noqa: TRY400 (no traceback: the sentence is complete)
                "trainer_not_resumed",
                url=self._resume,
                within_s=self._timeout_s,
                detail=trouble,
                hint="the trainer may wait for ever: resume it by hand",
            )


async def _post(url: str, body: dict[str, object]) -> None:
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.post(url, json=body, allow_redirects=False) as response,
    ):
        if not response.ok:
            text = (await response.text(errors="replace"))[:200]
            raise ProducerError(f"HTTP {response.status}: {text}")
