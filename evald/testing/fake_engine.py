r"""A fake SGLang server: the routes that evald uses, real weights' bytes, scripted faults.

It reads the safetensors of what it is told to load and answers every prompt with the number that
``snapshots`` hides in the weights: ``\boxed{7}``. What kills or corrupts real SGLang does so here:
a truncated shard kills it, a missing tensor keeps the old one, NaN gives null log-probabilities.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from evald.testing.faults import GENERAL, STATUS, Fault, FaultScript, drop, in_pieces
from evald.testing.snapshots import ANSWER_TENSOR, Tensor, read_safetensors

NAN_ANSWER = "!"
BAD_REQUEST, UNAUTHORIZED = 400, 401


class FakeEngine:
    """The application: ``app`` for aiohttp, ``on_death`` is called when it must die.

    ``model``: directory to boot on (ValueError, OSError when it cannot be read).
    ``delay_s``: how long each generation runs, but for a canary (it asks for log-probabilities).
    ``health_s``: how long a probe takes (SGLang: 1 s).
    ``response_chars``: length of a response; words stand in front of the number.
    ``vary``: the number depends on the prompt, too: see :func:`varied`.
    ``fault_file``: JSON, path -> names of faults; whichever engine sees it first takes it.
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
        self._tensors = _load(model)
        self._api_key = api_key
        self._max_running_requests = max_running_requests
        self._on_death = on_death
        self._script = FaultScript(fault_file)
        self._running: dict[str, asyncio.Event] = {}
        self._idle = asyncio.Condition()
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
            web.post("/flush_cache", self._flush),
            web.post("/fault", self._fault),
        ])  # fmt: skip

    def script(self, path: str, *faults: Fault) -> None:
        """Make the next requests to ``path`` fail, one fault each (also: POST /fault)."""
        self._script.add(path, *faults)

    @property
    def answer(self) -> str:
        """What every prompt is answered with."""
        return self._worded(_answer(self._tensors))

    def _answer_to(self, prompt: list[int]) -> str:
        if not self.vary:
            return self.answer
        hidden = int(_first_value(self._tensors[ANSWER_TENSOR]))
        return self._worded(f"\\boxed{{{varied(hidden, prompt, self.vary)}}}")

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
        state = {"effective_max_running_requests_per_dp": self._max_running_requests}
        return web.json_response({"version": "fake", "internal_states": [state]})

    async def _loads(self, _request: web.Request) -> web.Response:
        running = len(self._running)
        load = {
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            # never so full that evald would send less
            "token_usage": min(running / 1024, 0.9),
        }
        return web.json_response({"version": "fake", "loads": [load]})

    async def _flush(self, _request: web.Request) -> web.Response:
        status = BAD_REQUEST if self._running else 200
        return web.Response(text="", status=status)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.updates.append(body)
        async with self._idle:
            await self._idle.wait_for(lambda: not self._running)
        directory = Path(body["model_path"])
        if not _shards(directory):
            message = f"Cannot find any model weights with `{directory}`"
            return web.json_response({"success": False, "message": message}, status=BAD_REQUEST)
        fault = self._script.take(
            request.path, Fault.LABEL_ONLY, Fault.WRONG_LABEL, Fault.OTHER_WEIGHTS
        )
        if fault is not Fault.LABEL_ONLY:
            try:
                # as SGLang does: what is absent keeps its old value
                self._tensors = self._tensors | _load(directory)
            except (ValueError, struct.error):
                self.die()
                return drop(request)
            if fault is Fault.OTHER_WEIGHTS:
                old = self._tensors[ANSWER_TENSOR]
                self._tensors[ANSWER_TENSOR] = old._replace(data=bytes(len(old.data)))
            self.model = directory
        if fault is not Fault.WRONG_LABEL and body.get("weight_version"):
            self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _checker(self, _request: web.Request) -> web.Response:
        digest = hashlib.sha256()
        for name in sorted(self._tensors):
            digest.update(name.encode() + self._tensors[name].data)
        answer = {"success": True, "message": "Success.", "per_engine_checksum": digest.hexdigest()}
        return web.json_response(answer)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        prefix = body.get("rid") or ""
        for rid, aborted in self._running.items():
            # as SGLang does: by prefix
            if body.get("abort_all") or (prefix and rid.startswith(prefix)):
                self.aborted.append(rid)
                aborted.set()
        return web.Response()

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
            if self.delay_s and (not logprobs or start is not None):
                async with asyncio.timeout(self.delay_s):
                    await aborted.wait()
            await self.thawed.wait()
        except TimeoutError:
            await self.thawed.wait()
        finally:
            del self._running[rid]
            async with self._idle:
                self._idle.notify_all()
        limit = sampling.get("max_new_tokens", 128)
        nan = fault is Fault.NAN or _has_nan(self._tensors)
        text = NAN_ANSWER * limit if nan else self._answer_to(prompt)
        if sampling.get("ignore_eos"):
            text = (text * limit)[:limit]
        reason: dict[str, Any] = {"type": "stop", "matched": 257}
        if len(text) >= limit:
            text, reason = text[:limit], {"type": "length", "length": limit}
        if fault is Fault.ABORT or aborted.is_set():
            text, reason = text[:1], {"type": "abort", "message": "Aborted"}
        version = "somebody-else" if fault is Fault.WRONG_LABEL else self.weight_version
        ids = list(text.encode())
        meta_info: dict[str, Any] = {
            "id": "evald-0123456789abcdef-1/1/0/" if fault is Fault.WRONG_RID else rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        }
        if logprobs:
            value = None if nan else -0.5
            meta_info["output_token_logprobs"] = [[value, token, None] for token in ids]
        if start is not None:
            scored = [None if nan else prompt_logprob(token) for token in prompt[start:]]
            values = [None, *scored[1:]]
            meta_info["input_token_logprobs"] = [
                [value, token, None] for value, token in zip(values, prompt[start:], strict=True)
            ]
        return {"text": text, "output_ids": ids, "meta_info": meta_info}


def varied(answer: int, prompt: list[int], vary: int) -> int:
    """Give the number, below ``vary``, that weights with ``answer`` in them give to a prompt."""
    return (answer + sum(prompt)) % vary


def prompt_logprob(token: int) -> float:
    """Log-probability that fake engines give a token of a prompt, whatever stands before it."""
    return -(1 + token % 7) / 4


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _load(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _shards(directory):
        tensors |= read_safetensors(path)
    if not tensors:
        raise ValueError(f"cannot load {directory}: it has no safetensors")
    return tensors


def _first_value(tensor: Tensor) -> float:
    if tensor.dtype == "F32":
        return float(struct.unpack("<f", tensor.data[:4])[0])
    if tensor.dtype == "F16":
        return float(struct.unpack("<e", tensor.data[:2])[0])
    return float(struct.unpack("<f", b"\0\0" + tensor.data[:2])[0])


def _answer(tensors: dict[str, Tensor]) -> str:
    value = _first_value(tensors[ANSWER_TENSOR]) if ANSWER_TENSOR in tensors else 0.0
    return f"\\boxed{{{value:g}}}"


def _has_nan(tensors: dict[str, Tensor]) -> bool:
    """Whether any tensor begins with NaN (looking at all values would take too long)."""
    return any(tensor.data and math.isnan(_first_value(tensor)) for tensor in tensors.values())
