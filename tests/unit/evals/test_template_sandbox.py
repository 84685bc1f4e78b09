from __future__ import annotations

import time

import pytest

from evald.evals.chat_template import ChatTemplate, PromptError
from evald.evals.template_sandbox import MAX_TURNS

USER = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source, {}).render(USER, {})


@pytest.mark.parametrize(
    "source",
    [
        # three loops of 100,000 turns, without a call inside
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        # without any loop: two calls on each of 100 levels
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) if loop.depth < 9 }}{% endfor %}",
    ],
)
def test_what_turns_for_ever_is_stopped(source: str) -> None:
    began = time.monotonic()
    with pytest.raises(PromptError, match=f"more than {MAX_TURNS} turns"):
        render(source)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000000 }}",
        "{{ 10 ** 30 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 2 ** 1000000 * 2 ** 1000000 }}",
    ],
)
def test_huge_results_are_refused(source: str) -> None:
    with pytest.raises(PromptError, match="is too large"):
        render(source)


def test_ordinary_arithmetic_works_and_each_rendering_counts_anew() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ '=' * 3 }}{{ 2 ** 10 }}", {})
    for _ in range(3):
        assert template.render(USER, {}) == "===1024"
    assert render("{{ 2 * 3.5 }} {{ 2 ** -1 }}") == "7.0 0.5"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ cycler().next() }}", "at least one item"),
        ("{{ raise_exception('no \\ud800 role') }}", r"no \\ud800 role"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages|tojson(indent=range) }}", "."),
    ],
)
def test_whatever_a_template_raises_is_the_prompts_fault(source: str, cause: str) -> None:
    with pytest.raises(PromptError, match=cause) as caught:
        render(source)
    str(caught.value).encode()  # a record can hold it
