"""Many fake engines in one process, so cheap that a bench measures the daemon and not them.

``python bench/fake_farm.py --engines N --model DIR`` listens on N ports, writes their URLs as one
line of JSON, and ends at the end of its standard input. Every prompt gets the same answer, which is
built once; what is left to do for a request is to find its ids. (``evald.testing.FakeEngine`` loads
weights and fails on demand, and takes ten times the processor's time.)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


class _Sampling(msgspec.Struct):
    max_new_tokens: int = 0


class _Request(msgspec.Struct):
    """What matters of a request's body."""

    rid: list[str] = []
    sampling_params: list[_Sampling] = []
    return_logprob: bool = False
    weight_version: str = ""


_requests: msgspec.json.Decoder[_Request] = msgspec.json.Decoder(_Request)


class CheapEngine:
    """What one fake engine knows: its label, and what it says to every prompt."""

    def __init__(self, model: Path, *, delay_s: float, tokens: int, max_running: int) -> None:
        self.delay_s = delay_s
        self.version = "default"
        text = ("word " * tokens)[: 4 * tokens - len("\\boxed{7}")] + "\\boxed{7}"
        self._content = (
            f'{{"text":{json.dumps(text)},"output_ids":{list(range(300, 300 + tokens))},'
        ).encode()
        self._tokens = tokens
        info = {"model_path": str(model), "is_generation": True}
        state = {"effective_max_running_requests_per_dp": max_running}
        load = {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.5}
        self._constant: dict[bytes, dict[str, Any]] = {
            b"/model_info": info,
            b"/server_info": {"version": "fake", "internal_states": [state]},
            b"/v1/loads": {"version": "fake", "loads": [load]},
            b"/weights_checker": {"success": True, "per_engine_checksum": "0" * 64},
        }

    def control(self, path: bytes, body: bytes) -> bytes:
        """Answer anything but a generate request."""
        if path == b"/update_weights_from_disk":
            self.version = _requests.decode(body).weight_version
            return b'{"success":true,"message":"Succeeded."}'
        answer = dict(self._constant.get(path, {}))
        if path == b"/model_info":
            answer["weight_version"] = self.version
        return msgspec.json.encode(answer)

    def generate(self, request: _Request) -> bytes:
        """Answer a list of prompts."""
        # log-probabilities are for a canary: it wants one for each of its tokens, up to its length
        ended, scored = "stop", ""
        if request.return_logprob:
            wanted = request.sampling_params[0].max_new_tokens
            logprobs = json.dumps([[-0.5, 300, None]] * wanted)
            ended, scored = "length", f',"output_token_logprobs":{logprobs}'
        answers = []
        for rid in request.rid:
            meta = (
                f'"meta_info":{{"id":"{rid}","finish_reason":{{"type":"{ended}","matched":2}},'
                f'"prompt_tokens":250,"weight_version":"{self.version}","total_retractions":0,'
                f'"completion_tokens":{self._tokens},"cached_tokens":0,"e2e_latency":1.0,'
                f'"weight_versions":[{{"version":"{self.version}","start":0,'
                f'"end":{self._tokens}}}]{scored}}}}}'
            )
            answers.append(self._content + meta.encode())
        return b"[" + b",".join(answers) + b"]"


class _Connection(asyncio.Protocol):
    """HTTP as evald speaks it: one request after another, bodies with their length."""

    def __init__(self, engine: CheapEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # (uvloop's own transports are no subclass of it)
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(_HEAD_END)) >= 0:
            head = self._buffer[:end]
            at = head.lower().find(_LENGTH)
            length = int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            begin = end + len(_HEAD_END)
            if len(self._buffer) < begin + length:
                return
            body = self._buffer[begin : begin + length]
            self._buffer = self._buffer[begin + length :]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        engine = self._engine
        if path != b"/generate":
            self._send(engine.control(path, body))
            return
        request = _requests.decode(body)
        delay_s = 0.0 if request.return_logprob else engine.delay_s * random.uniform(0.5, 1.5)  # noqa: S311
        asyncio.get_running_loop().call_later(delay_s, lambda: self._send(engine.generate(request)))

    def _send(self, body: bytes) -> None:
        if self._transport is not None:
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            self._transport.write(head % len(body) + body)


@contextmanager
def farm(
    model: Path, *, engines: int, delay_s: float, tokens: int, max_running: int = 4096
) -> Iterator[list[str]]:
    """Run a farm; the URLs of its engines."""
    options = {
        "--model": model,
        "--engines": engines,
        "--delay-s": delay_s,
        "--tokens": tokens,
        "--max-running": max_running,
    }
    words = [str(word) for option in options.items() for word in option]
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        line = process.stdout.readline() if process.stdout is not None else b""
        if not line:
            raise SystemExit("the fake engines do not start")
        yield json.loads(line)
    finally:
        process.kill()
        process.wait()


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    servers = []
    for _ in range(arguments.engines):
        engine = CheapEngine(
            arguments.model,
            delay_s=arguments.delay_s,
            tokens=arguments.tokens,
            max_running=arguments.max_running,
        )
        make = functools.partial(_Connection, engine)
        servers.append(await loop.create_server(make, "127.0.0.1", 0, backlog=4096))
    urls = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers]
    print(json.dumps(urls), flush=True)
    # whoever has started this may be killed: then its end of the pipe closes
    await loop.run_in_executor(None, sys.stdin.buffer.read)


def main() -> None:
    """Serve until nobody is there any more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument(
        "--delay-s", type=float, default=0.0, help="of an answer, half as much more or less"
    )
    parser.add_argument("--tokens", type=int, default=16, help="of every answer")
    parser.add_argument("--max-running", type=int, default=4096)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
