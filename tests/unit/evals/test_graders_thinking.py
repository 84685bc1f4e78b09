from __future__ import annotations

from typing import Any

import pytest
from evaluator_world import FakePosture, World, rows_of

from evald.evals.graders import Grade, Rules, Sample, grade
from evald.evals.kinds import kind_of
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles
from evald.evals.rows import Question

UNFINISHED = None
#: what templates of thinking models write in front of the response.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    "{% if thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


def answer(response: str, *, in_thought: bool = False, **rules: Any) -> str | None:
    """Give the answer that is compared; None: the thinking is unfinished."""
    result = grade(
        Rules("exact", **rules), Sample(response=response, label="x", in_thought=in_thought)
    )
    assert result.unfinished_thinking <= result.no_answer
    return None if result.unfinished_thinking else result.answer


@pytest.mark.parametrize(
    ("response", "in_thought", "expected"),
    [
        ("plain", False, "plain"),
        ("<think>a</think> b", False, "b"),
        ("  <think>a</think>b", False, "b"),
        ("a</think>b", True, "b"),
        ("a</think>b", False, "b"),
        ("<think>a</think>say </think> twice", False, "say </think> twice"),
        ("<think>a", False, UNFINISHED),
        ("first <think>a", False, UNFINISHED),
        ("a", True, UNFINISHED),
        ("a</thin", True, UNFINISHED),
        ("a</think>", True, ""),
    ],
)
def test_auto_takes_what_stands_behind_the_thinking(
    response: str, in_thought: bool, expected: str | None
) -> None:
    assert answer(response, in_thought=in_thought) == expected


def test_thinking_can_be_demanded_or_left_alone() -> None:
    assert answer("plain", thinking=True) is UNFINISHED
    assert answer("a</think>b", thinking=True) == "b"
    assert answer("a</think>b", thinking=False) == "a</think>b"
    assert answer("plain", thinking=False, in_thought=True) == "plain"


def test_other_tags_have_other_openings() -> None:
    assert answer("[THINK]a[/THINK]b", thinking_end="[/THINK]") == "b"
    assert answer("[THINK]a", thinking_end="[/THINK]") is UNFINISHED
    assert answer("<think>a", thinking_end="[/THINK]") == "<think>a"
    # no slash: what opens it cannot be known
    assert answer("a<channel|>b", thinking_end="<channel|>") == "b"
    assert answer("a", thinking_end="<channel|>") == "a"


def test_a_thought_that_was_cut_is_no_answer_even_if_it_is_right() -> None:
    cut = grade(Rules("number"), Sample(response="<think>so it is 7", label=7))
    assert cut == Grade(
        0.0,
        no_answer=True,
        unfinished_thinking=True,
        reason="the response does not end its thinking: no </think> in it",
    )
    box = Sample(response="<think>\\boxed{1}</think> \\boxed{2}", label=2)
    assert grade(Rules("boxed_number"), box).score == 1.0
    inside = Sample(response="<think>\\boxed{2}</think> so 2", label=2)
    assert grade(Rules("boxed_number"), inside).reason == "no \\boxed{...} in the response"


@pytest.mark.parametrize(
    ("prompt", "kwargs", "expected"),
    [
        ([{"role": "user", "content": "hi"}], {"thinking": True}, True),
        ([{"role": "user", "content": "hi"}], {"thinking": False}, False),
        ("write <think>  \n\n", {}, True),
        ("write <think> tags", {}, False),
        ("write", {}, False),
    ],
)
def test_the_prompts_end_tells_whether_the_response_begins_in_a_thought(
    make_model: Any, make_set: Any, prompt: Any, kwargs: dict[str, bool], *, expected: bool
) -> None:
    files = TokenizerFiles.read(make_model(template=THINKING))
    kind = kind_of(make_set([], apply_chat_template_kwargs=kwargs))
    question = Question(id="1", prompt=prompt, label="x")
    assert kind.encode(PromptEncoder(files, ModelLimits()), question).in_thought is expected


async def test_unfinished_thinking_is_counted_apart(world: World, make_set: Any) -> None:
    rows = [{"prompt": f"q{i}<think>", "label": f"q{i}"} for i in range(3)]
    world.sets = [make_set([*rows, *rows_of(1, "p")])]

    def reply(text: str) -> str:
        return {"q0<think>": "hm</think>q0", "q1<think>": "q1", "q2<think>": "</think>"}.get(
            text, text
        )

    result = await world.evaluate(FakePosture(reply))
    counts = result.counts
    assert (counts.n_scored, counts.n_no_answer, counts.n_unfinished_thinking) == (4, 2, 1)
    assert result.metrics["eval/toy"] == 0.5
    samples = {sample["question"]: sample for sample in world.journal("toy")}
    assert samples["2"]["unfinished_thinking"] is True
    assert samples["2"]["in_thought"] is True
    assert samples["4"]["in_thought"] is False
