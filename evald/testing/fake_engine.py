r"""A fake SGLang server: the routes that evald uses, real weights' bytes, scripted faults.

It reads the safetensors of what it is told to load and answers every prompt with the number that
``snapshots`` hides in the weights: ``\boxed{7}``. What kills or corrupts real SGLang does so here:
a truncated shard kills it, a missing tensor keeps the old one, NaN gives null log-probabilities.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from evald.testing import fake_weights, long_answers
from evald.testing.decode_model import Decode
from evald.testing.fake_decoding import Decoding
from evald.testing.fake_output import (
    ABORTED,
    NAN_ANSWER,
    Output,
    answer_body,
    prompt_logprob,
    stopped,
    varied,
)
from evald.testing.faults import GENERAL, STATUS, Fault, FaultScript, drop, in_pieces

__all__ = ["FakeEngine", "prompt_logprob", "varied"]

BAD_REQUEST, UNAUTHORIZED = 400, 401


class FakeEngine:
    """The application: ``app`` for aiohttp, ``on_death`` is called when it must die.

    ``model``: directory to boot on (ValueError, OSError when it cannot be read).
    ``delay_s``: how long each generation runs, but for a canary (it asks for log-probabilities).
    ``health_s``: how long a probe takes (SGLang: 1 s).
    ``response_chars``: length of a response; words stand in front of the number.
    ``vary``: the number depends on the prompt, too: see :func:`varied`.
    ``fault_file``: JSON, path -> names of faults; whichever engine sees it first takes it.
    ``decode``: decoding costs what it costs a real engine, instead of ``delay_s``, and responses
    are as long as it says, instead of ``response_chars``. An abort gives the tokens so far, and a
    prompt that ends with them is answered with the rest.
    ``load_s``: how long an update takes, once nothing runs any more.
    """

    def __init__(
        self,
        model: Path,
        *,
        weight_version: str = "default",
        api_key: str | None = None,
        delay_s: float = 0.0,
        health_s: float = 0.0,
        response_chars: int = 0,
        vary: int = 0,
        fault_file: Path | None = None,
        max_running_requests: int = 128,
        decode: Decode | None = None,
        load_s: float = 0.0,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self.delay_s = delay_s
        self.health_s = health_s
        self.response_chars = response_chars
        self.vary = vary
        #: paths in the order of the requests; generate requests count once each.
        self.requests: list[str] = []
        #: bodies of update_weights_from_disk.
        self.updates: list[dict[str, Any]] = []
        #: rids of all samples that were asked for, canaries and probes of the route included.
        self.rids: list[str] = []
        #: a prompt that kills the engine while it answers, as some have killed SGLang.
        self.poison: list[int] | None = None
        #: rids that were aborted.
        self.aborted: list[str] = []
        self.load_s = load_s
        #: how long an update takes that asks for evald's own loader; None: the plugin is not there.
        self.fast_load_s: float | None = None
        #: memory that the GPU has left after each update; the last one stays.
        self.free_bytes: list[int] = []
        self._weights = fake_weights.load(model)
        self._api_key = api_key
        self._max_running_requests = max_running_requests
        self._decoding = None if decode is None else Decoding(decode)
        self._on_death = on_death
        self._script = FaultScript(fault_file)
        self._running: dict[str, asyncio.Event] = {}
        self._idle = asyncio.Condition()
        #: not set: an update is under way, and requests wait for it.
        self._loaded = asyncio.Event()
        self._loaded.set()
        #: not set: every connection is accepted and nothing is answered, as under SIGSTOP.
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.app = web.Application(middlewares=[self._middleware], client_max_size=2**30)
        self.app.add_routes([
            web.get("/health", self._health),
            web.get("/health_generate", self._health),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
            web.get("/v1/loads", self._loads),
            web.post("/update_weights_from_disk", self._update),
            web.post("/weights_checker", self._checker),
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/detokenize", self._detokenize),
            web.post("/flush_cache", self._flush),
            web.post("/fault", self._fault),
        ])  # fmt: skip

    def script(self, path: str, *faults: Fault) -> None:
        """Make the next requests to ``path`` fail, one fault each (also: POST /fault)."""
        self._script.add(path, *faults)

    @property
    def answer(self) -> str:
        """What every prompt is answered with."""
        return self._worded(self._boxed([]))

    def usage(self) -> dict[str, Any]:
        """Tell what has been decoded since the start, as ``Decoding`` does; needs ``decode``."""
        return {} if self._decoding is None else self._decoding.usage()

    def _boxed(self, prompt: list[int]) -> str:
        hidden = fake_weights.hidden_number(self._weights)
        varies = self.vary and prompt
        number = varied(int(hidden), prompt, self.vary) if varies else f"{hidden:g}"
        return f"\\boxed{{{number}}}"

    def _worded(self, number: str) -> str:
        words = " ".join(map(str, range(self.response_chars // 5 + 1)))
        return words[: max(self.response_chars - len(number), 0)] + number

    def freeze(self) -> None:
        """Answer nothing any more, until ``thawed`` is set."""
        self.thawed.clear()

    def die(self) -> None:
        """End as a crash would."""
        self._on_death()

    # --- requests --------------------------------------------------------------------------------

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": "Unauthorized"}, status=UNAUTHORIZED)
        self.requests.append(request.path)
        await self.thawed.wait()
        self._script.read_file()
        fault = self._script.take(request.path, *GENERAL)
        if fault in (Fault.DIE, Fault.DROP):
            if fault is Fault.DIE:
                self.die()
            return drop(request)
        if fault is Fault.HANG:
            await asyncio.Event().wait()  # until the client or the server goes away
        status = STATUS.get(fault) if fault else None
        if status is not None:
            return _error(f"scripted: {fault}", status)
        answer = await handler(request)
        if fault in (Fault.TRICKLE, Fault.CUT) and isinstance(answer, web.Response):
            return await in_pieces(request, answer, cut=fault is Fault.CUT)
        return answer

    async def _fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.script(body["path"], *[Fault(name) for name in body["faults"]])
        return web.json_response({})

    async def _health(self, _request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_s)
        return web.Response()

    async def _model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({
            "model_path": str(self.model),
            "served_model_name": str(self.model),
            "weight_version": self.weight_version,
            "is_generation": True,
        })  # fmt: skip

    async def _server_info(self, _request: web.Request) -> web.Response:
        decoding = self._decoding
        slots = self._max_running_requests if decoding is None else decoding.decode.slots
        state = {"effective_max_running_requests_per_dp": slots}
        return web.json_response({"version": "fake", "internal_states": [state]})

    async def _loads(self, _request: web.Request) -> web.Response:
        running = len(self._running)
        load = {
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            # never so full that evald would send less
            "token_usage": min(running / 1024, 0.9),
        }
        if self._decoding is not None:
            load = self._decoding.load()
        return web.json_response({"version": "fake", "loads": [load], "usage": self.usage()})

    async def _flush(self, _request: web.Request) -> web.Response:
        status = BAD_REQUEST if self._running else 200
        return web.Response(text="", status=status)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.updates.append(body)
        async with self._idle:
            await self._idle.wait_for(lambda: not self._running)
        self._loaded.clear()
        try:
            fast = self.fast_load_s is not None and body.get("load_format") == "safetensors"
            await asyncio.sleep((self.fast_load_s or 0.0) if fast else self.load_s)
            return self._load(request, body, self._plugin_says(fast=fast))
        finally:
            self._loaded.set()

    def _plugin_says(self, *, fast: bool) -> str:
        """Say what evald's plugin adds to the message of an update."""
        if self.fast_load_s is None:
            return ""
        said = " evald_fast_load:" + (" 1000 bytes read;" if fast else "")
        if self.free_bytes:
            free = self.free_bytes.pop(0) if len(self.free_bytes) > 1 else self.free_bytes[0]
            said += f" {free} bytes free;"
        return said

    def _load(self, request: web.Request, body: dict[str, Any], note: str = "") -> web.Response:
        directory = Path(body["model_path"])
        if not fake_weights.shards(directory):
            message = f"Cannot find any model weights with `{directory}`"
            return web.json_response({"success": False, "message": message}, status=BAD_REQUEST)
        fault = self._script.take(
            request.path, Fault.LABEL_ONLY, Fault.WRONG_LABEL, Fault.OTHER_WEIGHTS
        )
        if fault is not Fault.LABEL_ONLY:
            try:
                # as SGLang does: what is absent keeps its old value
                self._weights = self._weights | fake_weights.load(directory)
            except (ValueError, struct.error):
                self.die()
                return drop(request)
            if fault is Fault.OTHER_WEIGHTS:
                self._weights = fake_weights.without_number(self._weights)
            self.model = directory
        if fault is not Fault.WRONG_LABEL and body.get("weight_version"):
            self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": f"Succeeded.{note}"})

    async def _checker(self, _request: web.Request) -> web.Response:
        checksum = fake_weights.checksum(self._weights)
        answer = {"success": True, "message": "Success.", "per_engine_checksum": checksum}
        return web.json_response(answer)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        prefix = body.get("rid") or ""
        for rid, aborted in self._running.items():
            # as SGLang does: by prefix
            if body.get("abort_all") or (prefix and rid.startswith(prefix)):
                self.aborted.append(rid)
                aborted.set()
                if self._decoding is not None:
                    self._decoding.abort(rid)
        return web.Response()

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        lists = tokens if tokens and isinstance(tokens[0], list) else [tokens]
        texts = [self._text_of(one) for one in lists]
        return web.json_response({"text": texts if lists is tokens else texts[0]})

    def _text_of(self, ids: list[int]) -> str:
        return bytes(ids).decode() if self._decoding is None else long_answers.text_of(ids)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompts, rids = body["input_ids"], body["rid"]
        self.rids += rids
        sampling, logprobs = body["sampling_params"], body.get("return_logprob", False)
        if not len(prompts) == len(rids) == len(sampling) or not all(prompts):
            return _error("input_ids, sampling_params and rid must be of one length", BAD_REQUEST)
        fault = self._script.take(
            request.path,
            *(Fault.WRONG_LABEL, Fault.WRONG_RID, Fault.ABORT),
            *((Fault.NAN,) if logprobs else ()),
        )
        starts = body.get("logprob_start_len") or [None] * len(prompts)
        one = [
            self._one(prompt, parameters, rid, logprobs=logprobs, start=start, fault=fault)
            for prompt, parameters, rid, start in zip(prompts, sampling, rids, starts, strict=True)
        ]
        return web.json_response(await asyncio.gather(*one))

    async def _one(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        rid: str,
        *,
        logprobs: bool,
        start: int | None,
        fault: Fault | None,
    ) -> dict[str, Any]:
        aborted = self._running[rid] = asyncio.Event()
        try:
            if prompt == self.poison:
                self.die()
            await self._loaded.wait()
            nan = fault is Fault.NAN or fake_weights.has_nan(self._weights)
            if self._decoding is not None:
                answer = None if nan else self._boxed
                output = await self._decoding.output(prompt, sampling, rid, answer=answer)
            else:
                delay_s = self.delay_s if not logprobs or start is not None else 0.0
                output = await self._spelled(prompt, sampling, aborted, delay_s, nan=nan)
            await self.thawed.wait()
        finally:
            del self._running[rid]
            async with self._idle:
                self._idle.notify_all()
        if fault is Fault.ABORT:
            output = Output(output.ids[:1], output.text[:1], ABORTED)
        version = "somebody-else" if fault is Fault.WRONG_LABEL else self.weight_version
        return answer_body(
            output,
            prompt,
            "evald-0123456789abcdef-1/1/0/" if fault is Fault.WRONG_RID else rid,
            version,
            logprobs=logprobs,
            start=start,
            nan=nan,
        )

    async def _spelled(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        aborted: asyncio.Event,
        delay_s: float,
        *,
        nan: bool,
    ) -> Output:
        """Answer after a delay."""
        if delay_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await aborted.wait()
        limit = sampling.get("max_new_tokens", 128)
        text = NAN_ANSWER * limit if nan else self._worded(self._boxed(prompt))
        if sampling.get("ignore_eos"):
            text = (text * limit)[:limit]
        reason = stopped(len(text), limit)
        text = text[:limit]
        if aborted.is_set():
            text, reason = text[:1], ABORTED
        return Output(list(text.encode()), text, reason)


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
