from __future__ import annotations

import time
from typing import Any

import pytest

from evald.evals.graders import (
    Grade,
    GraderFailed,
    Rules,
    Sample,
    check_grader,
    grader_version,
)
from evald.evals.graders import grade as grade_sample
from evald.evals.graders.boxed import last_boxed
from evald.evals.graders.choice import choice_letter


def grade(rules: Rules, response: str, label: Any) -> Grade:
    return grade_sample(rules, Sample(response=response, label=label))


def score(grader: str, response: str, label: Any, **rules: Any) -> float | None:
    """Give the score; None for no answer."""
    result = grade(Rules(grader, **rules), response, label)
    return None if result.no_answer else result.score


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (" 42\n", 42, 1.0),
        ("42", "42", 1.0),
        ("042", 42, 0.0),
        ("42.0", 42, 0.0),
        ("0.5", 0.5, 1.0),
        ("New   York", "New York", 1.0),
        ("new york", "New York", 0.0),
        ("cab", "abc", 0.0),
        ("b", ["a", "b"], 1.0),
        ("2", ["1", 2], 1.0),
        ("true", True, 1.0),
        ("  \n", "x", None),
    ],
)
def test_exact_ignores_white_space_and_nothing_else(
    response: str, label: Any, expected: float | None
) -> None:
    assert score("exact", response, label) == expected


@pytest.mark.parametrize(
    ("pattern", "response", "label", "expected"),
    [
        (r"answer: (\d+)", "answer: 1 ... answer: 23", 23, 1.0),
        (r"answer: (\d+)", "answer: 23 ... answer: 1", 23, 0.0),
        (r"\d+", "so 7 then 8", 8, 1.0),
        (r"A(\d)|B(\d)", "A1 B2", 2, 1.0),
        (r"answer: (\d+)", "none", 1, None),
        (r"x*", "abc", 1, None),
    ],
)
def test_regex_takes_the_last_match_and_its_first_group(
    pattern: str, response: str, label: Any, expected: float | None
) -> None:
    assert score("regex", response, label, regex=pattern) == expected


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**C**", "C"),
        ("$\\boxed{d}$", "D"),
        ("The answer is (C).", "C"),
        ("**Answer:** B", "B"),
        ("Answer: A. Wait, the answer is D", "D"),
        ("answer: \\boxed{\\text{D}}", "D"),
        ("I take \\boxed{\\mathrm{a}} here", "A"),
        ("A. because of", "A"),
        ("(A) is wrong, so I take (B) here", "B"),
        ("I pick **C.** for that", "C"),
        ("long thoughts\nD", "D"),
        ("A dog is here", None),
        ("The answer is A dog", None),
        ("The answer is Bob", None),
        ("E", None),
        ("\\boxed{7}", None),
        ("", None),
        ("  \n ", None),
    ],
)
def test_choice_finds_the_letter_or_says_that_there_is_none(
    response: str, letter: str | None
) -> None:
    assert choice_letter(response, "ABCD") == letter


def test_choice_scores_and_keeps_case_where_it_matters() -> None:
    assert score("choice", "b", "B") == 1.0
    assert score("choice", "The answer is C", ["B", "c"]) == 1.0
    assert score("choice", "A", "B") == 0.0
    assert score("choice", "I do not know", "B") is None
    assert choice_letter("b", "aAbB") == "b"
    assert choice_letter("c", "aA") is None
    assert choice_letter("(2)", "1234") == "2"


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("\\boxed{a} then \\boxed{b}", "b"),
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed {x}", "x"),
        ("\\boxed{good} \\boxed{cut of", "good"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("} \\boxed{1} {", "1"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\}", None),
        ("\\\\boxed{4}", "4"),
        ("\\boxed{}", ""),
        ("{5} boxed{5}", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(response: str, content: str | None) -> None:
    assert last_boxed(response) == content


def test_boxed_graders_hand_the_content_to_the_grader_inside() -> None:
    assert score("boxed_exact", "so \\boxed{ cab }", "cab") == 1.0
    assert score("boxed_exact", "so \\boxed{abc}", "cab") == 0.0
    assert score("boxed_exact", "cab", "cab") is None
    assert score("boxed_exact", "\\boxed{}", "cab") is None
    assert score("boxed_choice", "A. or \\boxed{(b)}", "B") == 1.0
    assert score("boxed_regex", "9 \\boxed{x=3}", 3, regex=r"\d") == 1.0
    no_box = grade(Rules("boxed_exact"), "cab", "cab")
    assert no_box == Grade(0.0, no_answer=True, reason="no \\boxed{...} in the response")


HOSTILE = [
    "\\boxed{" * 10_000,
    "{" * 60_000 + "\\boxed{1}",
    "answer" + " " * 60_000,
    "answer is " * 6_000,
    "**" * 30_000,
    "(" * 60_000,
    "\\text{" * 10_000,
    "\\text" + " " * 60_000,
    "\n" * 60_000,
]


@pytest.mark.parametrize("response", HOSTILE)
@pytest.mark.parametrize("grader", ["exact", "choice", "boxed_exact", "boxed_choice"])
def test_graders_that_run_in_the_daemon_are_linear(grader: str, response: str) -> None:
    started = time.perf_counter()
    grade(Rules(grader), response, "A")
    assert time.perf_counter() - started < 10


def test_a_grader_that_cannot_work_says_so() -> None:
    with pytest.raises(GraderFailed, match="grader 'regex' has no pattern; set regex"):
        grade(Rules("regex"), "x", "x")
    with pytest.raises(GraderFailed, match="grader 'bleu' is unknown"):
        grade(Rules("bleu"), "x", "x")
    with pytest.raises(GraderFailed, match="the reference must be text"):
        grade(Rules("exact"), "x", None)


def test_settings_are_checked_in_words(make_set: Any) -> None:
    assert check_grader(make_set("", grader="boxed_math")) == []
    assert check_grader(make_set("", grader="boxed_regex")) == [
        "regex: grader 'boxed_regex' needs a pattern; give one"
    ]
    assert "is no regular expression" in check_grader(make_set("", grader="regex", regex="("))[0]
    assert check_grader(make_set("", grader="regex", regex="x")) == []
    assert "has a letter twice" in check_grader(make_set("", grader="choice", choices="ABA"))[0]
    (unknown,) = check_grader(make_set("", grader="boxed_"))
    assert "give one of exact, contains, regex, number, choice, f1, math, remote" in unknown
    assert check_grader(make_set("", grader="choise"))[0].endswith("; did you mean 'choice'?")


def test_the_version_of_math_verify_counts_only_for_math(make_set: Any) -> None:
    assert "math-verify-" in grader_version(make_set("", grader="boxed_math"))
    assert "math" not in grader_version(make_set("", grader="exact"))
