"""SGLang's HTTP API: one session for each engine, explicit deadlines, four kinds of failure."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import structlog

from evald.engines.answers import Answer, read_answers
from evald.errors import EvaldError

log = structlog.get_logger(__name__)

#: seconds to reach a server on this machine.
CONNECT_TIMEOUT_S = 5.0
#: seconds for requests that a living server answers at once.
CONTROL_TIMEOUT_S = 10.0
#: the server closes idle connections after 5 s: we must be the first to close.
KEEPALIVE_S = 3.0
#: connections beside those that generate: probes, aborts, status.
CONTROL_CONNECTIONS = 8
_JSON = {"Content-Type": "application/json"}
#: how much of an error body goes into a message, characters.
ERROR_CHARS = 300
#: largest answer that is read; 128 samples of 32,768 tokens take a sixth of it.
MAX_ANSWER_BYTES = 256 << 20


class EngineError(EvaldError):
    """The engine answered with something that is no answer."""


class EngineUnreachable(EngineError):
    """No answer: connection refused or cut, or out of time; the engine may be dead.

    ``reached``: the request may have got there, and may be what killed it.
    """

    def __init__(self, detail: str, *, reached: bool = True) -> None:
        super().__init__(detail)
        self.reached = reached


class EngineBusy(EngineError):
    """429 or 503: again later."""


class EngineRejected(EngineError):
    """Another 4xx: the request is at fault, not the engine."""


class EngineAPI:
    """Calls to one SGLang server; create it inside a running event loop and ``close()`` it.

    ``base_url``: ``http://host:port``. ``limit``: requests in flight. Every method raises
    EngineUnreachable, EngineBusy, EngineRejected or EngineError.
    """

    def __init__(self, base_url: str, api_key: str | None, *, limit: int) -> None:
        self.base_url = base_url
        #: generate requests under way, with their rids.
        self._generating: dict[asyncio.Timeout, list[str]] = {}
        self._cut = ""
        self._session = aiohttp.ClientSession(
            base_url,
            connector=aiohttp.TCPConnector(
                limit=limit + CONTROL_CONNECTIONS, keepalive_timeout=KEEPALIVE_S
            ),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # none comes, and looking for some is a part of each request's cost
            cookie_jar=aiohttp.DummyCookieJar(),
            # a proxy of the environment never stands between us and a local server
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def health_generate(self, timeout_s: float) -> None:
        """Return when the server has generated a token; takes at least 1 s on SGLang."""
        await self._call("GET", "/health_generate", timeout_s)

    async def model_info(self) -> dict[str, Any]:
        """Name of the loaded model and its ``weight_version``."""
        return await self._object("GET", "/model_info")

    async def server_info(self) -> dict[str, Any]:
        """Launch arguments, ``version`` of SGLang, ``internal_states`` of its schedulers."""
        return await self._object("GET", "/server_info")

    async def loads(self) -> dict[str, Any]:
        """Count running and waiting requests and used tokens."""
        return await self._object("GET", "/v1/loads")

    async def update_weights(
        self, path: str, version: str, load_format: str, timeout_s: float
    ) -> str:
        """Load the weights of directory ``path`` under the label ``version``; the server's message.

        The server waits for its running requests first. After a failure its weights are unknown;
        after EngineUnreachable by deadline it may still load and publish them later.
        """
        body = {
            "model_path": path,
            "weight_version": version,
            "load_format": load_format,
            "abort_all_requests": False,
            "flush_cache": True,
        }
        answer = await self._object("POST", "/update_weights_from_disk", timeout_s, body)
        if answer.get("success") is not True:
            raise EngineError(
                f"update_weights_from_disk: {str(answer.get('message') or answer)[:ERROR_CHARS]}"
            )
        return str(answer.get("message", ""))

    async def weights_checksum(self, timeout_s: float) -> str:
        """Hash over all tensors of all ranks: equal weights give equal sums across engines."""
        answer = await self._object(
            "POST", "/weights_checker", timeout_s, {"action": "checksum", "selector": "target"}
        )
        checksum = answer.get("per_engine_checksum")
        if not isinstance(checksum, str) or not checksum:
            raise EngineError(
                f"weights_checker: {str(answer.get('message') or 'no checksum')[:ERROR_CHARS]}"
            )
        return checksum

    async def generate(
        self,
        input_ids: list[list[int]],
        sampling: list[dict[str, Any]],
        rids: list[str],
        *,
        timeout_s: float,
        logprobs: bool = False,
        score_from: list[int] | None = None,
    ) -> list[Answer]:
        """Answer a list of prompts, one answer for each.

        ``logprobs``: with those of the output tokens. ``score_from``: with those of each prompt's
        tokens from that one (at least 1) on.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling, "rid": rids}
        if logprobs or score_from is not None:
            body["return_logprob"] = True
        if score_from is not None:
            # the server's list begins one token early, with null: that one has no context
            body["logprob_start_len"] = [start - 1 for start in score_from]
        scope = asyncio.timeout(None)
        self._generating[scope] = rids
        try:
            async with scope:
                payload = await self._send("POST", "/generate", timeout_s, body)
        except TimeoutError as error:
            raise EngineUnreachable(f"generate: {self._cut}") from error
        finally:
            del self._generating[scope]
        try:
            return read_answers(payload, len(rids))
        except ValueError as error:
            raise EngineError(f"generate: {error}") from error

    async def detokenize(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Give the text of each list of token ids, with the server's tokenizer."""
        body = {"tokens": ids, "skip_special_tokens": skip_special_tokens}
        texts = (await self._object("POST", "/detokenize", CONTROL_TIMEOUT_S, body)).get("text")
        if not isinstance(texts, list) or len(texts) != len(ids):
            raise EngineError(f"detokenize: {len(ids)} texts expected, got {str(texts)[:80]!r}")
        return [str(text) for text in texts]

    @property
    def running_rids(self) -> list[str]:
        """Ids of all samples whose answers this client waits for."""
        return [rid for rids in self._generating.values() for rid in rids]

    def cut(self, why: str) -> list[str]:
        """End all generate requests now, with EngineUnreachable; their rids, to be aborted."""
        self._cut = why
        rids = self.running_rids
        now = asyncio.get_running_loop().time()
        for scope in self._generating:
            if not scope.expired():
                scope.reschedule(now)
        return rids

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all of them; a request that is not there is no error."""
        body = {"abort_all": True} if rid is None else {"rid": rid, "abort_all": False}
        await self._call("POST", "/abort_request", CONTROL_TIMEOUT_S, body)

    async def abort_quietly(self, rids: list[str]) -> None:
        """Abort requests that nobody waits for; a server that cannot is not asked further."""
        try:
            for rid in rids:
                await self.abort(rid)
        except EngineError as error:
            log.info("abort_failed", server=self.base_url, rids=len(rids), detail=str(error))

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Empty the prefix cache; EngineRejected when requests still run after ``wait_s``."""
        path = f"/flush_cache?timeout={wait_s:g}"
        await self._call("POST", path, CONTROL_TIMEOUT_S + wait_s)

    async def _object(
        self, method: str, path: str, timeout_s: float = CONTROL_TIMEOUT_S, body: Any = None
    ) -> dict[str, Any]:
        answer = await self._call(method, path, timeout_s, body)
        if not isinstance(answer, dict):
            raise EngineError(f"{path[1:]}: a JSON object expected, got {str(answer)[:80]!r}")
        return answer

    async def _call(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """Send one request; the JSON answer, or the text where it is none."""
        return _decode(await self._send(method, path, timeout_s, body))

    async def _send(self, method: str, path: str, timeout_s: float, body: Any) -> bytes:
        """Send one request; the body of the answer, which must be complete in ``timeout_s``."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        content = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else _JSON
        try:
            # over all of it: an answer may come byte by byte, and connections may be used up
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    path,
                    data=content,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                ) as response,
            ):
                status, payload = response.status, await _read(response, path)
        except TimeoutError as error:
            raise EngineUnreachable(f"{path[1:]}: no answer within {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            cause = str(error) or type(error).__name__
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineUnreachable(
                f"{path[1:]}: connection failed: {cause}", reached=reached
            ) from error
        if status == 200:  # noqa: PLR2004 - HTTP's own numbers say it best
            return payload
        detail = f"{path[1:]}: HTTP {status}: {_error_text(payload)}"
        if status in (429, 503):
            raise EngineBusy(detail)
        if 400 <= status < 500:  # noqa: PLR2004
            raise EngineRejected(detail)
        raise EngineError(detail)


async def _read(response: aiohttp.ClientResponse, path: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise EngineError(f"{path[1:]}: the answer is larger than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _decode(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return payload.decode(errors="replace")


def _error_text(payload: bytes) -> str:
    """Take the message out of SGLang's two shapes of an error body."""
    answer = _decode(payload)
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:ERROR_CHARS] or "empty answer"
