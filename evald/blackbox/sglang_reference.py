"""A worked evaluator class: it has an SGLang server of its own, or attaches to somebody's.

It loads each snapshot, reads the version back, proves the weights as evald's own fleet does, and
asks a file of questions. Take it as it is, or override ``score``. Its process needs evald's
dependencies: run it with the daemon's interpreter, and name the one that has SGLang in ``python``.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import msgspec
from tokenizers import Tokenizer

from evald.blackbox.evaluator import EvalSkip, Point, Results, SetResults
from evald.config import Fleet
from evald.engines.answers import COMPLETE
from evald.engines.api import EngineAPI, EngineError
from evald.engines.environment import engine_env
from evald.engines.gpus import known_gpus, visible_gpus
from evald.engines.launcher import Launched
from evald.engines.pin import Checksums, Loading, PinFailed, Proof, new_weight_version
from evald.engines.plan import engine_plan
from evald.engines.readiness import wait_ready
from evald.engines.sglang_launcher import SGLangLauncher
from evald.errors import EvaldError
from evald.point import PinTarget

NAME = "sglang"
#: on one snapshot, before it is blamed: each time on a server that has never seen it.
PIN_ATTEMPTS = 2
PROBE_TIMEOUT_S = 30.0
STOP_GRACE_S = 10.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [blackbox.config]; either ``model`` or ``url``."""

    #: JSONL file of questions: {"prompt": text, "label": text}; relative to [blackbox] cwd.
    data: str
    #: the eval set's name.
    name: str = "questions"
    #: launch a server on this base model, on these GPUs ("0,1", as CUDA_VISIBLE_DEVICES).
    model: str | None = None
    gpus: str | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    #: interpreter that has SGLang; None: this one.
    python: str | None = None
    #: any server argument, in its own name.
    sglang: dict[str, Any] = msgspec.field(default_factory=dict)
    #: or attach to this server, with a key from this environment variable ([blackbox] pass_env).
    url: str | None = None
    api_key_env: str | None = None
    load_format: str = "auto"
    start_timeout_s: float = 1800.0
    load_timeout_s: float = 600.0
    sample_timeout_s: float = 600.0
    max_new_tokens: int = 512
    temperature: float = 0.0
    #: questions in flight.
    concurrency: int = 32


class Question(msgspec.Struct, frozen=True):
    """One row of the data."""

    prompt: str
    label: str


class SGLangReference:
    """Exact match on a file of questions, on weights that are proven."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.settings = msgspec.convert(config, Settings)
        if (self.settings.model is None) == (self.settings.url is None):
            raise ValueError("exactly one of model and url must be set in [blackbox.config]")
        lines = Path(self.settings.data).read_bytes().splitlines()
        self.questions = [msgspec.json.decode(line, type=Question) for line in lines]
        self._loading = Loading(
            load_format=self.settings.load_format,
            timeout_s=self.settings.load_timeout_s,
            checksums=Checksums(),
        )
        # a process of its own begins here
        self._environ = dict(os.environ)
        self._api: EngineAPI | None = None
        self._launched: Launched | None = None
        self._launches = 0

    def score(self, response: str, label: str) -> float:
        """Tell what a response is worth, from 0 to 1."""
        return float(response.strip() == label.strip())

    async def evaluate_checkpoint(self, directory: Path, point: Point) -> Results:
        """Pin, ask everything, and read the version back once more."""
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        api, proof = await self._pin(directory, point)
        slots = asyncio.Semaphore(self.settings.concurrency)
        tasks = [
            asyncio.create_task(
                self._ask(api, slots, index, tokenizer.encode(question.prompt).ids, proof)
            )
            for index, question in enumerate(self.questions)
        ]
        try:
            samples = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        try:
            after = (await api.model_info()).get("weight_version")
        except EngineError as error:
            raise EvalSkip("unhealthy", f"the server is gone: {error}") from error
        if after != proof.weight_version:
            raise EvalSkip("version_changed", f"the server ended with {after!r}")
        scores = [sample["score"] or 0.0 for sample in samples]
        return Results(
            sets={
                self.settings.name: SetResults(
                    metrics={"score": sum(scores) / len(scores)}, samples=samples
                )
            },
            engines=[self.settings.url or NAME],
            weight_versions=[proof.weight_version],
            provenance={"checksum": proof.checksum},
        )

    async def dispose(self) -> None:
        """Stop the server, if it is ours; nothing of it stays."""
        api, self._api = self._api, None
        launched, self._launched = self._launched, None
        try:
            if api is not None:
                await api.close()
            if launched is not None:
                await launched.process.stop(STOP_GRACE_S)
        finally:
            if launched is not None:
                launched.process.kill()

    async def _pin(self, directory: Path, point: Point) -> tuple[EngineAPI, Proof]:
        """Load and prove the snapshot; a failed pin is the snapshot's when it fails again."""
        target = PinTarget(run=point.run, step=point.step, digest=point.digest, directory=directory)
        failures = []
        for _ in range(PIN_ATTEMPTS):
            api = await self._server()
            try:
                version = new_weight_version(target)
                await self._loading.load(api, target, version)
                # one server: its layout is always the same
                proof = await self._loading.prove(
                    api, target.digest, version, engine=NAME, layout=""
                )
            except PinFailed as failed:
                failures.append(str(failed))
                # its weights are unknown: the next attempt gets a fresh server, if it is ours
                await self.dispose()
            else:
                return api, proof
        raise EvalSkip("pin_violation", f"{PIN_ATTEMPTS} attempts failed: {'; '.join(failures)}")

    async def _server(self) -> EngineAPI:
        """Return the API of a server that is up; raises EvalSkip "unhealthy"."""
        if self._launched is not None and self._api is not None:
            try:
                await self._api.model_info()
            except EngineError:
                await self.dispose()  # it died between two points
        try:
            api = self._api or await self._connect()
            await api.model_info()
        except (EvaldError, OSError, TimeoutError) as error:
            await self.dispose()
            cause = str(error) or "it was not ready in time"
            raise EvalSkip("unhealthy", f"no server: {cause}") from error
        return api

    async def _connect(self) -> EngineAPI:
        """Attach, or launch and wait for the first token."""
        settings = self.settings
        if settings.url is not None:
            key = self._environ[settings.api_key_env] if settings.api_key_env else None
            self._api = EngineAPI(settings.url, key, limit=settings.concurrency)
            return self._api
        self._launches += 1
        launcher = await asyncio.to_thread(self._launcher)
        self._launched = await launcher.launch(self._launches)
        self._api = EngineAPI(
            self._launched.url, self._launched.api_key, limit=settings.concurrency
        )
        async with asyncio.timeout(settings.start_timeout_s):
            ready = asyncio.create_task(
                wait_ready(self._api, self._launched, PROBE_TIMEOUT_S, generate=True)
            )
            died = asyncio.create_task(self._launched.process.wait())
            try:
                await asyncio.wait((ready, died), return_when=asyncio.FIRST_COMPLETED)
                if not ready.done():
                    raise EngineError(f"it died, code {died.result()}; see {self._launched.log}")
                await ready
            finally:
                ready.cancel()
                died.cancel()
        return self._api

    def _launcher(self) -> SGLangLauncher:
        settings = self.settings
        gpus = len(settings.gpus.split(",")) if settings.gpus else 1
        fleet = Fleet(
            model=str(settings.model),
            device=settings.device,
            engines=1,
            gpus=0 if settings.device == "cpu" else gpus,
            gpus_per_engine=1 if settings.device == "cpu" else gpus,
            python=settings.python,
            sglang=settings.sglang,
            # evald finds its own by it, whatever happens
            pass_env=["EVALD_BLACKBOX"],
        )
        usable = None
        if settings.device == "cuda":
            visible = settings.gpus or self._environ.get("CUDA_VISIBLE_DEVICES")
            usable = visible_gpus(visible, known_gpus())
        plan = msgspec.structs.replace(engine_plan(fleet, gpus=usable)[0], name=NAME)
        # beside the logs of this process
        logs = Path(self._environ.get("EVALD_BLACKBOX", "."))
        return SGLangLauncher(plan, fleet, logs, env=engine_env(fleet, self._environ))

    async def _ask(
        self, api: EngineAPI, slots: asyncio.Semaphore, index: int, ids: list[int], proof: Proof
    ) -> dict[str, Any]:
        """Ask one question; every answer must be of the proven weights."""
        settings, question = self.settings, self.questions[index]
        sample: dict[str, Any] = {"question": str(index), "score": None, "engine": NAME}
        sampling = {
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
        }
        async with slots:
            try:
                (answer,) = await api.generate(
                    [ids],
                    [sampling],
                    [f"{proof.weight_version}/{index}"],
                    timeout_s=settings.sample_timeout_s,
                )
            except EngineError as error:
                return {**sample, "status": "error", "grader_reason": str(error)}
        if answer.versions != {proof.weight_version}:
            raise EvalSkip("version_changed", f"an answer came from {sorted(answer.versions)}")
        if answer.reason not in COMPLETE:  # an aborted one comes with HTTP 200
            return {**sample, "status": "error", "grader_reason": f"it ended: {answer.reason}"}
        text, reason = answer.text or "", answer.reason
        return {
            **sample,
            "score": self.score(text, question.label),
            "response": text,
            "reference": question.label,
            "n_tokens": len(answer.output_ids or []),
            "finish_reason": reason,
            "truncated": reason == "length",
            "weight_version": proof.weight_version,
        }
