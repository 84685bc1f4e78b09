from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.config import EvalSet
from evald.config_load import build_config
from evald.custom import GenerationError, Result
from evald.errors import ConfigError, GenerationFailed
from evald.evals.custom import messages
from evald.evals.custom.board import CALL, NOBODY, Board, at_work
from evald.evals.custom.calls import Outcome, Serve
from evald.evals.custom.client import Encoder, SampleClient
from evald.evals.custom.functions import Work
from evald.evals.custom.messages import Answered, Ask, Begin, Malformed, Raised, Returned, Setup
from evald.evals.custom.returned import returned
from evald.evals.graders import Grade, GraderFailed
from evald.evals.kinds import kind_of
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles
from evald.evals.rows import BadRow, Question
from evald.evals.sampling import base_sampling, sample_seed
from evald.evals.sets import load_set
from evald.postures.contract import Generation

FUNCTION = "my_tools:play"


def custom_set(**fields: Any) -> EvalSet:
    given = {"name": "toy", "kind": "custom", "path": "x", "function": FUNCTION, **fields}
    return msgspec.convert(given, EvalSet)


def generation(text: str, ids: list[int]) -> Generation:
    return Generation(
        output_ids=ids,
        text=text,
        finish_reason="length",
        weight_version="v",
        engine="e",
        latency_s=0.1,
    )


class FunctionAsker:
    """Runs a made-up function that asks ``turns`` times."""

    def __init__(self, result: Returned, *, turns: int = 2) -> None:
        self.sampling: list[dict[str, Any]] = []
        self._result = result
        self._turns = turns

    async def generate(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        *,
        score_from: list[int] | None = None,
    ) -> list[Generation]:
        assert score_from is None
        self.sampling += sampling
        return [generation("model", prompt) for prompt in prompts]

    async def run_function(self, work: Work, serve: Serve) -> Outcome:
        assert work.eval_set.function == FUNCTION
        last = None
        for turn in range(self._turns):
            ask = Ask(call=1, request=turn, turn=turn, ids=[turn + 1], sampling={"n": 5})
            last = await serve(ask)
        return Outcome(self._result, last)


async def ask(model: Path, asker: FunctionAsker, sample: int = 1, **fields: Any) -> tuple[Any, ...]:
    eval_set = custom_set(**fields)
    kind = kind_of(eval_set)
    question = Question(id="q", prompt="1+1?", label="2")
    encoder = PromptEncoder(TokenizerFiles.read(model), ModelLimits(320, 2048))
    encoded = kind.encode(encoder, question)
    assert kind.apart
    assert kind.width(encoded, [sample]) == 1
    return tuple(await kind.ask(asker, question, encoded, [sample]))


def result(**fields: Any) -> Returned:
    given: dict[str, Any] = {"call": 1, "text": "two", "grade": None, "values": {}}
    return Returned(**{**given, "messages": None, "in_thought": False, **fields})


async def test_a_sample_is_what_the_function_returned(make_model: Any) -> None:
    asker = FunctionAsker(result(values={"n": 2.0}, messages=["m"], in_thought=True))
    (answer,) = await ask(make_model(), asker, seed=9)
    assert answer.generation.text == "two"
    assert (answer.generation.engine, answer.generation.finish_reason) == ("e", "length")
    assert (answer.values, answer.messages, answer.in_thought) == ({"n": 2.0}, ["m"], True)
    assert answer.grade is None
    # each turn has a seed of its own, the first one's is that of an ordinary sample
    assert [one["sampling_seed"] for one in asker.sampling] == [
        sample_seed("toy", "q", 1, 9),
        sample_seed("toy", "q", 1, 9, turn=1),
    ]
    assert len({one["sampling_seed"] for one in asker.sampling}) == 2
    assert [one["n"] for one in asker.sampling] == [1, 1]


async def test_a_score_without_the_model_is_none(make_model: Any) -> None:
    graded = result(grade=Grade(1.0))
    model = make_model()
    (answer,) = await ask(model, FunctionAsker(graded))
    assert answer.grade == Grade(1.0)
    with pytest.raises(GenerationFailed, match="be of no weights"):
        await ask(model, FunctionAsker(graded, turns=0))


def test_rows_need_no_label_but_a_good_one(make_set: Any) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "label": 3}]
    loaded = load_set(make_set(rows, kind="custom", function=FUNCTION))
    assert [question.label for question in loaded.questions] == [None, 3]
    kind = kind_of(custom_set())
    with pytest.raises(BadRow, match="label"):
        kind.read({"prompt": "a", "label": {}})
    with pytest.raises(BadRow, match="the prompt is empty"):
        kind.read({"prompt": ""})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"function": None}, 'function: kind "custom" needs one'),
        ({"function_config": {"cwdd": "x"}}, "function_config.cwdd: unknown key; did you mean"),
        ({"function_config": {"processes": 0}}, "function_config.processes"),
        ({"grader": "exactly"}, "did you mean 'exact'"),
    ],
)
def test_faults_of_the_settings(fields: dict[str, Any], fault: str) -> None:
    assert fault in "\n".join(kind_of(custom_set(**fields)).check())


def test_the_function_belongs_to_the_config_digest(tmp_path: Path, make_set: Any) -> None:
    module = tmp_path / "my_tools.py"
    module.write_text("async def play(client, question): ...\n")

    def digest(**config: Any) -> str:
        settings = {"cwd": str(tmp_path), **config}
        eval_set = make_set(
            [{"prompt": "a"}], kind="custom", function=FUNCTION, function_config=settings
        )
        return load_set(eval_set).config_digest

    before = digest()
    assert digest() == before
    assert digest(processes=3, pass_env=["X"]) == before
    assert digest(config={"turns": 3}) != before
    assert digest(version="2") != before
    module.write_text("async def play(client, question): return ''\n")
    assert digest() != before


def test_the_config_finds_the_module_beside_itself(tmp_path: Path) -> None:
    def config(**fields: Any) -> EvalSet:
        raw = {
            "staging": {"root": "/dev/shm/x"},
            "results": {"dir": "results"},
            "attached": {"model": "base", "urls": ["http://h:1"]},
            "eval": [{"name": "toy", "kind": "custom", **fields}],
        }
        return build_config(raw, base=tmp_path, environ={}).eval[0]

    eval_set = config(path="toy.jsonl", function=FUNCTION)
    assert eval_set.function_config == {"cwd": str(tmp_path)}
    eval_set = config(path="toy.jsonl", function=FUNCTION, function_config={"cwd": "tools"})
    assert eval_set.function_config == {"cwd": str(tmp_path / "tools")}
    for fields, fault in (
        ({"function": FUNCTION}, r"eval\[0\]\.path: missing; it must be set"),
        ({"path": "x", "function": "play"}, 'function: must be "module:function"'),
        ({"path": "x", "kind": "generate", "function": FUNCTION}, "only kind 'custom' has one"),
    ):
        with pytest.raises(ConfigError, match=fault):
            config(**fields)


# --- in the process of the function -----------------------------------------------------------


def client_of(make_model: Any, **fields: Any) -> tuple[SampleClient, list[Any]]:
    files = TokenizerFiles.read(make_model())
    setup = Setup(
        function=FUNCTION,
        cwd=".",
        config={"a": 1},
        sampling=base_sampling(custom_set()),
        apply_chat_template=fields.pop("apply_chat_template", "auto"),
        template_kwargs={},
        opening_tag="<think>",
        tokenizer=files.content,
        template=fields.pop("template", files.template.source),
        special_tokens=files.template.special_tokens,
        vocab_size=320,
        context_len=2048,
    )
    # as it comes over the wire
    setup = msgspec.json.decode(messages.frame(setup)[messages.HEADER_BYTES :], type=Setup)
    sent: list[Any] = []

    async def send(turn: int, ids: list[int], sampling: dict[str, Any]) -> Answered:
        sent.append((turn, ids, sampling))
        return Answered(request=1, text="t", output_ids=[1], finish_reason="stop")

    return SampleClient(setup, Encoder(setup), [{"name": "hammer"}], send), sent


def text_of(ids: list[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


async def test_what_a_client_sends(make_model: Any) -> None:
    template = "{{ tools }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    client, sent = client_of(make_model, template=template)
    answer = await client.generate("abc", temperature=1, stop=["x"])
    assert (answer.text, answer.finish_reason) == ("t", "stop")
    assert text_of(answer.prompt_ids) == "abc"
    await client.generate([7, 8], max_new_tokens=3)
    chat = [{"role": "user", "content": "hi"}]
    await client.generate(chat, tools=[])
    assert await client.encode("abc") == answer.prompt_ids
    assert [turn for turn, _, _ in sent] == [0, 1, 2]
    assert sent[1][1] == [7, 8]
    assert text_of(sent[2][1]) == "None|hi"
    assert b"hammer" in bytes(33 + i for i in await client.encode(chat) if i < 94)
    assert (sent[0][2]["temperature"], sent[0][2]["stop"]) == (1, ["x"])
    assert (sent[1][2]["max_new_tokens"], sent[1][2]["temperature"]) == (3, 0.0)
    assert "n" in sent[1][2]


async def test_what_a_client_refuses(make_model: Any) -> None:
    client, sent = client_of(make_model, template=None)
    unknown: list[dict[str, Any]] = [{"n": 2}, {"sampling_seed": 1}, {"temprature": 1}]
    for sampling in unknown:
        with pytest.raises(TypeError, match="no sampling parameter"):
            await client.generate("abc", **sampling)
    for prompt in ([], [1, "a"], {"role": "user"}, None):
        with pytest.raises((TypeError, GenerationError)):
            await client.generate(prompt)  # type: ignore[arg-type] # what a user may do
    with pytest.raises(GenerationError, match="no chat template") as caught:
        await client.generate([{"role": "user", "content": "hi"}])
    assert caught.value.kind == "prompt"
    assert not sent


def test_a_result_becomes_plain() -> None:
    one = returned(1, Result("t", score=True, answer="a", reason="why"), in_thought=True)
    assert one.grade == Grade(1.0, answer="a", reason="why")
    assert one.in_thought
    assert returned(1, "t", in_thought=False).grade is None
    nothing = returned(1, Result("t", no_answer=True), in_thought=False).grade
    assert nothing is not None
    assert nothing.no_answer
    for bad in (
        Result("t", score="high"),
        Result("t", score=float("inf")),
        Result("t", values={"n": float("nan")}),
        Result("t", messages=[object()]),
        Result(7),  # type: ignore[arg-type] # what a user may do
        None,
        {"text": "t"},
    ):
        with pytest.raises((GraderFailed, TypeError)):
            returned(1, bad, in_thought=False)


@pytest.mark.parametrize(
    "name", ["stderr", "delta_prev", "my_ratio", "Turns", "a/b", "", "n\n", "x" * 65, 7]
)
def test_a_value_with_a_bad_name_is_refused_in_one_sentence(name: Any) -> None:
    with pytest.raises(GraderFailed) as caught:
        returned(1, Result("t", values={name: 1.0}), in_thought=False)
    assert repr(name)[:60] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_travel() -> None:
    whole = 10**30
    begin = Begin(
        call=1, id="q", prompt="p", label=whole, metadata={"half": "\ud83d"}, tools=[], sample=0
    )
    body = messages.frame(begin)[messages.HEADER_BYTES :]
    read = messages.read_for_process(body)
    assert isinstance(read, Begin)
    assert (read.label, read.metadata) == (whole, {"half": "\\ud83d"})
    raised = Raised(1, "error", "x")
    assert messages.read_for_daemon(json.dumps(msgspec.to_builtins(raised)).encode()) == raised
    with pytest.raises(Malformed):
        messages.read_for_daemon(b"print")
    with pytest.raises(Malformed):
        messages.read_for_daemon(body)


# --- who is at work ----------------------------------------------------------------------------


def watched(tmp_path: Path, work: Coroutine[Any, Any, None], call: int = 5) -> Path:
    path = tmp_path / "board"

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(Board(path).factory)
        token = CALL.set(call)
        task = asyncio.create_task(work)
        CALL.reset(token)
        await task

    with contextlib.suppress(SystemExit):
        asyncio.run(main())
    return path


def test_the_board_names_who_is_at_work(tmp_path: Path) -> None:
    seen: list[int] = []

    async def inner() -> None:
        seen.append(at_work(tmp_path / "board"))

    async def work() -> None:
        seen.append(at_work(tmp_path / "board"))
        await asyncio.sleep(0)
        await asyncio.create_task(inner())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        seen.append(at_work(tmp_path / "board"))

    path = watched(tmp_path, work())
    assert seen == [5, 5, 5]
    assert at_work(path) == NOBODY
    assert at_work(tmp_path / "none") == NOBODY


def test_the_board_keeps_who_has_ended_the_process(tmp_path: Path) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def work() -> None:
        await asyncio.create_task(leave())

    assert at_work(watched(tmp_path, work())) == 5
