"""What users run instead of evald on a checkpoint, as whole commands over a server's HTTP API.

Goal: each as its own documentation has it, at the concurrency that suits the server, with data and
task of our own: no hub is asked for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from engine_server import Server
from minimal_client import Ask

_TIMEOUT_S = 600.0
_ATTEMPTS = 3

_TASK = """
task: bench_short
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "<|user|>{{{{problem}}}}<|end|><|assistant|>"
doc_to_target: "{{{{expected_answer}}}}"
generation_kwargs:
  until: ["<|end|>"]
  max_gen_toks: {max_tokens}
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


class Peers:
    """Commands over one data set (``{"problem": ..., "expected_answer": ...}`` a line).

    ``venv``: where ``sgl-eval`` and ``lm_eval`` are installed; None: evald's own environment.
    """

    def __init__(
        self, work: Path, data: Path, venv: Path | None, *, max_tokens: int, in_flight: int
    ) -> None:
        self._work, self._data = work, data
        self._bin = Path(sys.executable).parent if venv is None else venv / "bin"
        self._max_tokens, self._in_flight = max_tokens, in_flight
        self._questions = len(data.read_text().splitlines())
        self._runs = 0
        (work / "prompt.yaml").write_text('user: "{problem}"\n')
        tasks = work / "tasks"
        tasks.mkdir()
        (tasks / "bench_short.yaml").write_text(_TASK.format(data=data, max_tokens=max_tokens))

    def missing(self) -> dict[str, str]:
        """Say of each peer that cannot be run why."""
        programs = {"sgl-eval": "sgl-eval", "lm-eval": "lm_eval"}
        return {
            name: f"there is no {self._bin / program}: give --peers a venv with evald[bench]"
            for name, program in programs.items()
            if not (self._bin / program).exists()
        }

    def sgl_eval(self, server: Server, model: str) -> None:
        """SGLang's own: a thread for each request; graded as mathematics."""
        words = ["run", "gsm8k", "--base-url", f"{server.url}/v1", "--model", model]
        words += ["--api-key", server.api_key, "--num-threads", str(self._in_flight)]
        words += ["--n-repeats", "1", "--temperature", "0", "--max-tokens", str(self._max_tokens)]
        words += ["--from-dataset", str(self._data), "--prompt", str(self._work / "prompt.yaml")]
        out = self._fresh("sgl-eval")
        self._run("sgl-eval", [*words, "--out-dir", str(out)])
        self._check(out, "output-rs*.jsonl")

    def lm_eval(self, server: Server, model: str) -> None:
        """Run the lm-evaluation-harness: text to the completions route, over aiohttp."""
        arguments = {
            "model": model,
            "base_url": f"{server.url}/v1/completions",
            "num_concurrent": self._in_flight,
            "max_retries": 3,
            "tokenizer_backend": "none",
            "tokenized_requests": False,
        }
        joined = ",".join(f"{name}={value}" for name, value in arguments.items())
        words = ["--model", "local-completions", "--model_args", joined, "--tasks", "bench_short"]
        words += ["--include_path", str(self._work / "tasks"), "--log_samples"]
        out = self._fresh("lm-eval")
        words += ["--output_path", str(out)]
        self._run("lm_eval", words, OPENAI_API_KEY=server.api_key)
        self._check(out, "samples_*.jsonl")

    def _fresh(self, name: str) -> Path:
        self._runs += 1
        return self._work / f"{name}-{self._runs}"

    def _check(self, out: Path, pattern: str) -> None:
        """Raise PeerFailed unless every question has its line among the answers."""
        lines = [line for path in out.rglob(pattern) for line in path.read_text().splitlines()]
        if len(lines) != self._questions:
            raise PeerFailed(f"{out} has {len(lines)} answers to {self._questions} questions")

    def _run(self, program: str, words: list[str], **variables: str) -> None:
        log = self._work / f"{program}.log"
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        # (as on a node: a proxy never stands before a server on this machine)
        env = {**os.environ, **offline, "NO_PROXY": "127.0.0.1", "HF_HOME": str(self._work / "hf")}
        with log.open("wb") as file:
            done = subprocess.run(
                [str(self._bin / program), *words],
                env={**env, **variables},
                cwd=self._work,
                stdout=file,
                stderr=file,
                timeout=_TIMEOUT_S,
                check=False,
            )
        if done.returncode:
            raise PeerFailed(f"{program} ended with {done.returncode}: {log.read_text()[-2000:]}")


class PeerFailed(Exception):
    """A peer did not come to its end."""


async def httpx_loop(server: Server, asks: Sequence[Ask], in_flight: int) -> None:
    """Ask as RL frameworks do: a task for each sample, a semaphore, httpx."""
    places = asyncio.Semaphore(in_flight)
    headers = {"Authorization": f"Bearer {server.api_key}"}
    limits = httpx.Limits(max_connections=in_flight)
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, limits=limits, timeout=_TIMEOUT_S, trust_env=False
    ) as client:

        async def one(ask: Ask) -> None:
            body = {"input_ids": ask.prompt, "sampling_params": ask.sampling[0]}
            async with places:
                for _ in range(_ATTEMPTS):
                    # SGLang closes connections that were idle for 5 s, and httpx does not know
                    with contextlib.suppress(httpx.TransportError):
                        response = await client.post("/generate", json=body)
                        break
                else:
                    raise PeerFailed("httpx: the server does not answer")
            response.raise_for_status()
            json.loads(response.text)

        await asyncio.gather(*[one(ask) for ask in asks])
