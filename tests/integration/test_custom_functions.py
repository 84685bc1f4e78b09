"""Generate functions in their own processes: what they get, and what their faults cost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import function_cases
import msgspec
import pytest

from evald.config import EvalSet
from evald.engines.guard import descendants
from evald.errors import GenerationFailed, Unhealthy
from evald.evals.chat_template import ChatTemplate
from evald.evals.custom import process as process_module
from evald.evals.custom.calls import Outcome
from evald.evals.custom.functions import Functions, Tokens, Work
from evald.evals.custom.messages import Ask
from evald.evals.custom.settings import function_version
from evald.evals.prompts import ModelLimits, TokenizerFiles
from evald.evals.rows import Question
from evald.evals.user_code import unready_functions
from evald.postures.contract import Generation

HERE = Path(function_cases.__file__).parent


def tokenizer() -> bytes:
    vocab = {chr(33 + i): i for i in range(94)}
    return json.dumps({
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }).encode()  # fmt: skip


TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TOKENS = Tokens(
    files=TokenizerFiles(tokenizer(), ChatTemplate(TEMPLATE, {})),
    limits=ModelLimits(vocab_size=94, context_len=2000),
)


class Engines:
    """Answers everything with "7", and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.error: Exception | None = None

    async def __call__(self, ask: Ask) -> Generation:
        self.asked.append(ask)
        if self.error is not None:
            raise self.error
        return Generation(
            output_ids=[22],
            text="7",
            finish_reason="stop",
            weight_version="v",
            engine="e",
            latency_s=0.1,
        )

    def texts(self) -> list[str]:
        return ["".join(chr(33 + i) for i in ask.ids) for ask in self.asked]


class Stage:
    """One set's function, and the engines that it asks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines = Engines()
        self.functions = Functions(directory, environ={}, tokens={}, versions={})
        self.eval_set = EvalSet(name="toy")

    def use(self, name: str, cwd: Path = HERE, **config: Any) -> None:
        self.eval_set = EvalSet(
            name="toy",
            kind="custom",
            path="toy.jsonl",
            function=f"function_cases:{name}",
            function_config={"cwd": str(cwd), **config},
            max_response_len=16,
        )
        versions = {"toy": function_version(self.eval_set)}
        self.functions = Functions(
            self.directory, environ=dict(os.environ), tokens={"toy": TOKENS}, versions=versions
        )

    async def call(
        self, metadata: Any = None, *, timeout_s: float = 60.0, question: str = "q"
    ) -> Outcome:
        work = Work(
            eval_set=self.eval_set,
            question=Question(id=question, prompt="1+1?", label="2", metadata=metadata),
            sample=3,
        )
        return await self.functions.call(work, self.engines, timeout_s=timeout_s)

    async def failure(self, metadata: Any, *, timeout_s: float = 60.0) -> GenerationFailed:
        with pytest.raises(GenerationFailed) as caught:
            await self.call(metadata, timeout_s=timeout_s)
        return caught.value

    async def text(self, metadata: Any = None) -> str:
        return (await self.call(metadata)).returned.text

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.rglob("*.log")))

    def left_behind(self) -> list[Path]:
        return [path for end in ("board", "pid") for path in self.directory.rglob(f"*.{end}")]

    def starts(self) -> int:
        return len(list(self.directory.rglob("*.log")))


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(process_module, "END_GRACE_S", 1.0)
    before = set(descendants(os.getpid()))
    stage = Stage(tmp_path / "functions")
    yield stage
    await stage.functions.close()
    assert set(descendants(os.getpid())) <= before
    assert stage.left_behind() == []


async def test_turns_tools_and_settings(stage: Stage) -> None:
    stage.use("talk", config={"add": 3})
    outcome = await stage.call()
    assert stage.engines.texts() == [
        "user:1+1?;",
        "user:1+1?;assistant:7;tool:5;",
        "user:1+1?;assistant:7;tool:5;7",
    ]
    assert [ask.turn for ask in stage.engines.asked] == [0, 1, 2]
    first, second, third = (ask.sampling for ask in stage.engines.asked)
    assert (first["max_new_tokens"], second["max_new_tokens"]) == (8, 16)
    assert (first["stop"], third["stop"]) == ([], ["."])
    assert outcome.returned.values == {"turns": 3.0, "same": 1.0}
    assert outcome.returned.messages is not None
    assert [m["role"] for m in outcome.returned.messages] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert outcome.generation is not None
    assert outcome.generation.output_ids == [22, 22, 22]


async def test_one_process_serves_many_samples_at_a_time(stage: Stage) -> None:
    stage.use("misbehave")
    began = asyncio.get_running_loop().time()
    texts = await asyncio.gather(*(stage.text("wait") for _ in range(20)))
    assert texts == ["7"] * 20
    assert asyncio.get_running_loop().time() - began < 15
    assert stage.starts() == 1


async def test_two_processes_share_the_samples(stage: Stage) -> None:
    stage.use("misbehave", processes=2)
    await asyncio.gather(*(stage.text("wait") for _ in range(4)))
    assert stage.starts() == 2


async def test_what_a_function_returns(stage: Stage) -> None:
    stage.use("misbehave")
    own = (await stage.call("own number")).returned
    assert own.grade is not None
    assert (own.grade.score, own.grade.answer, own.values) == (1.0, "seven", {"calls": 1.0})
    half = (await stage.call("half")).returned
    assert (half.text, half.messages) == ("half a pair \\ud83d", ["\\ud83d"])
    assert (await stage.text("too long")).startswith("too_long: the prompt has 3000 tokens")
    assert "score must be finite, but is nan" in (await stage.failure("nothing")).detail
    assert "it returned int; return text" in (await stage.failure("no text")).detail
    assert "token id that the model does not have" in (await stage.failure("bad ids")).detail
    assert "did you mean temperature?" in (await stage.failure("bad sampling")).detail
    assert stage.starts() == 1


async def test_a_function_that_raises_fails_one_sample(stage: Stage) -> None:
    stage.use("misbehave")
    failed = await stage.failure("raise")
    assert failed.kind == "error"
    assert "misbehave raised ValueError: no such tool: hammer; see " in failed.detail
    assert 'raise ValueError("no such tool' in stage.logs()
    assert "raised SystemExit: 3" in (await stage.failure("exit")).detail
    assert await stage.text() == "7"
    assert stage.starts() == 1


async def test_what_the_engines_cannot_do(stage: Stage) -> None:
    stage.use("echo")
    stage.engines.error = GenerationFailed("rejected", "400: no")
    failed = await stage.failure(None)
    assert (failed.kind, failed.detail.partition(";")[0]) == ("error", "400: no")
    stage.engines.error = GenerationFailed("timeout", "too slow")
    assert (await stage.failure(None)).kind == "timeout"
    # what ends the point is nothing that a function may catch
    stage.engines.error = Unhealthy("no engine")
    with pytest.raises(Unhealthy):
        await stage.call()


async def test_a_function_that_hangs_times_out_alone(stage: Stage) -> None:
    stage.use("misbehave")
    await stage.text()
    for how in ("hang", "deaf"):
        results = await asyncio.gather(stage.failure(how, timeout_s=1.0), stage.text("wait"))
        assert results[0].kind == "timeout"
        assert "took longer than 1 s" in results[0].detail
        assert results[1] == "7"
    assert stage.starts() == 1


@pytest.mark.parametrize("how", ["kill", "exit in a task"])
async def test_a_function_that_kills_its_process_costs_itself(stage: Stage, how: str) -> None:
    stage.use("misbehave")
    await stage.text()
    waiting = [asyncio.create_task(stage.text("wait")) for _ in range(5)]
    failed = await stage.failure(how)
    assert failed.kind == "error"
    assert "its process is gone: it " in failed.detail
    assert how != "kill" or "last words" in failed.detail
    # the others were in the same process, and were asked again
    assert await asyncio.gather(*waiting) == ["7"] * 5
    assert stage.starts() == 2


async def test_nobody_to_blame_nobody_else_suffers(stage: Stage) -> None:
    stage.use("misbehave")
    await stage.text()
    waiting = [asyncio.create_task(stage.text("wait")) for _ in range(2)]
    failed = await stage.failure("exit in a thread")
    assert "it ended with exit code 4" in failed.detail
    assert await asyncio.gather(*waiting) == ["7"] * 2
    # one with all of them, and those in which each was alone until that one died again
    assert stage.starts() in {2, 3}


async def test_a_function_that_blocks_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "ALIVE_TIMEOUT_S", 0.5)
    stage.use("misbehave")
    await stage.text()
    waiting = [asyncio.create_task(stage.call("wait", timeout_s=4.0)) for _ in range(3)]
    failed = await stage.failure("block", timeout_s=2.0)
    assert failed.kind == "timeout"
    outcomes = await asyncio.gather(*waiting)
    assert [outcome.returned.text for outcome in outcomes] == ["7"] * 3
    assert stage.starts() == 2


async def test_one_that_blocks_is_to_blame_for_those_that_time_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "ALIVE_TIMEOUT_S", 0.5)
    stage.use("misbehave")
    await stage.text()
    late = asyncio.create_task(stage.call("wait", timeout_s=2.0))
    failed = await stage.failure("block", timeout_s=30.0)
    assert failed.kind == "error"
    assert "use asyncio.to_thread" in failed.detail
    assert (await late).returned.text == "7"


async def test_cancelled_samples_leave_the_process_free(stage: Stage) -> None:
    stage.use("misbehave")
    await stage.text()
    task = asyncio.create_task(stage.call("hang"))
    while len(stage.engines.asked) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await stage.text() == "7"
    assert stage.starts() == 1


async def test_a_function_that_always_dies_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evald.evals.custom.functions.MAX_BARREN", 2)
    stage.use("misbehave")
    details = [(await stage.failure("kill")).detail for _ in range(4)]
    assert "its process is gone" in details[1]
    assert "died before they had finished a single sample" in details[2]
    assert details[3] == details[2]
    assert stage.starts() == 2


async def test_a_changed_file_is_refused(stage: Stage, tmp_path: Path) -> None:
    shutil.copy(HERE / "function_cases.py", tmp_path)
    stage.use("echo", cwd=tmp_path)
    path = tmp_path / "function_cases.py"
    path.write_text(path.read_text() + "\nmore = 1\n")
    failed = await stage.failure(None)
    assert "its file has changed since evald started; restart evald" in failed.detail
    # a function that is broken does not start a process for every sample
    details = {(await stage.failure(None)).detail for _ in range(20)}
    assert len(details) == 1
    assert stage.starts() == 0


@pytest.mark.parametrize(
    ("function", "cwd", "fault"),
    [
        ("function_cases:echo", HERE, None),
        ("no_such_module:f", HERE, "cannot import no_such_module:f: ModuleNotFoundError"),
        ("function_cases:no", HERE, "has no attribute 'no'"),
        ("function_cases:sync", HERE, "it is not async; write async def"),
        ("function_cases:one_argument", HERE, "it must take (client, question)"),
        ("function_cases:not_callable", HERE, "it is no function"),
        ("function_cases:echo", HERE / "nowhere", "cannot enter cwd"),
    ],
)
def test_functions_are_tried_before_anything_starts(
    function: str, cwd: Path, fault: str | None
) -> None:
    eval_set = msgspec.convert(
        {
            "name": "toy",
            "kind": "custom",
            "path": "x",
            "function": function,
            "function_config": {"cwd": str(cwd)},
        },
        EvalSet,
    )
    problems = unready_functions([eval_set, eval_set], dict(os.environ))
    assert len(problems) == (0 if fault is None else 2)
    assert all(fault in one for one in problems if fault is not None)
