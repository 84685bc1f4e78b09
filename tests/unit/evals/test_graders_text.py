from __future__ import annotations

import time
from typing import Any

import pytest

from evald.evals.graders import Rules, Sample, check_grader, grade, label_problem, reference_texts
from evald.evals.graders.f1 import f1, words


def score(grader: str, response: str, label: Any, **config: Any) -> float | None:
    """Give the score; None for no answer."""
    result = grade(Rules(grader, config=config), Sample(response=response, label=label))
    return None if result.no_answer else result.score


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("It is New  York, I think", "New York", 1.0),
        ("It is new york", "New York", 0.0),
        ("yorkshire", "york", 1.0),
        ("Paris", ["Rome", "Paris"], 1.0),
        ("\n", "x", None),
    ],
)
def test_contains_finds_a_reference_anywhere(
    response: str, label: Any, expected: float | None
) -> None:
    assert score("contains", response, label) == expected


@pytest.mark.parametrize("grader", ["exact", "contains", "boxed_exact", "f1"])
def test_a_whole_number_is_written_without_a_point(grader: str) -> None:
    response = "\\boxed{204}" if grader.startswith("boxed_") else "204"
    assert score(grader, response, 204.0) == 1.0
    assert score(grader, response, [7.5, 204.0]) == 1.0


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (-0.0, "0"),
        (-3.0, "-3"),
        (0.5, "0.5"),
        (1e15, "1" + "0" * 15),
        (1e16, "1e+16"),
        ("2.0", "2.0"),
    ],
)
def test_references_are_written_as_a_person_would(label: Any, text: str) -> None:
    assert reference_texts(label) == [text]


def test_case_counts_unless_it_is_told_not_to() -> None:
    assert score("exact", "STRASSE", "straße", ignore_case=True) == 1.0
    assert score("exact", "paris", "Paris") == 0.0
    assert score("contains", "it is PARIS", "paris", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("I have 3 apples, so 1,234 in all.", 1234, 1.0),
        ("1,234, and no more", "1234", 1.0),
        ("1{,}234", 1234, 1.0),
        ("12\\,000", 12000, 1.0),
        ("the pairs 1,2,3", 3, 1.0),
        ("0.50", 0.5, 1.0),
        ("0.5000001", 0.5, 0.0),
        ("-$5.00.", -5, 1.0),
        ("\u22125", -5, 1.0),
        ("3-5", 5, 1.0),
        ("3-5", -5, 0.0),
        ("1.5e-3", "0.0015", 1.0),
        ("1.5 \\times 10^{-3}", "0.0015", 1.0),
        ("3/4", 0.75, 1.0),
        ("1/3", "2/6", 1.0),
        ("1/0", 1, 1.0),
        ("on 1/2/2020", 2020, 1.0),
        ("wait...5", 5, 1.0),
        ("50%", 0.5, 1.0),
        ("50%", 50, 1.0),
        ("50%", "0.5%", 0.0),
        ("0.5", "50 \\%", 1.0),
        ("7 or 8", ["7", "8"], 1.0),
        ("7 or 8", ["6", "7"], 0.0),
        ("H2O and x2", 2, None),
        ("version 3.14.15", 15, 0.0),
        ("none", 1, None),
    ],
)
def test_the_last_number_counts(response: str, label: Any, expected: float | None) -> None:
    assert score("number", response, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("so 3 + 4\n#### 7", 7, 1.0),
        ("#### $1,234.00\nThat was it, all 3 of them", 1234, 1.0),
        ("#### **42**", 42, 1.0),
        ("#### 1. First\nso it is 9", 9, 1.0),
        ("#### 5 apples\nor 6", 6, 1.0),
        ("#### none\nor 6", 6, 1.0),
    ],
)
def test_a_line_of_gsm8k_counts_before_all_others(
    response: str, label: Any, expected: float
) -> None:
    assert score("number", response, label) == expected


def test_numbers_may_be_off_by_a_tolerance() -> None:
    assert score("number", "3.14", 3.14159, abs_tol=0.01) == 1.0
    assert score("number", "3.12", 3.14159, abs_tol=0.01) == 0.0
    assert score("number", "1010", 1000, rel_tol=0.01) == 1.0
    assert score("number", "1011", 1000, rel_tol=0.01) == 0.0
    assert score("number", "-1010", -1000, rel_tol=0.01) == 1.0
    assert score("number", "10", 0, rel_tol=0.5) == 0.0
    assert score("number", "1e999999", "1e999998", abs_tol=1.0) == 0.0
    assert score("number", "9" * 30, "9" * 29 + "8") == 0.0


@pytest.mark.parametrize("text", ["18", "18.0", "1.8e1", "36/2", "018"])
def test_equal_numbers_vote_together(text: str) -> None:
    assert grade(Rules("number"), Sample(response=text, label=1)).answer == "18"


def test_a_reference_must_have_a_number(make_set: Any) -> None:
    numbers = make_set("", grader="number")
    assert label_problem(numbers, ["7", 8.5]) is None
    assert label_problem(numbers, ["7", "seven"]) == "the reference 'seven' has no number in it"
    assert label_problem(numbers, None) is not None


def test_f1_is_that_of_squad() -> None:
    # worked by hand from the definition: precision 2/3, recall 2/2
    assert score("f1", "the Eiffel Tower, Paris", "Eiffel tower") == pytest.approx(0.8)
    assert score("f1", "An apple!", "apple") == 1.0
    assert score("f1", "pear", "apple") == 0.0
    assert score("f1", "apple", ["pear", "apple pie"]) == pytest.approx(2 / 3)
    assert score("f1", "  ", "apple") is None
    assert score("f1", "The!", "a") == 1.0
    assert score("f1", "The!", "b") == 0.0
    assert words("A man's best; THE  theatre") == ["mans", "best", "theatre"]
    assert f1(["a", "a", "b"], ["a", "c"]) == pytest.approx(0.4)
    assert f1(["a", "a", "b"], ["a", "a"]) == pytest.approx(0.8)


def test_yes_and_no_are_right_or_wrong_as_a_whole_in_hotpotqa() -> None:
    assert score("f1", "yes it is", "yes") == pytest.approx(0.5)
    assert score("f1", "yes it is", "yes", yes_no=True) == 0.0
    assert score("f1", "Yes.", "yes", yes_no=True) == 1.0
    assert score("f1", "no", "no doubt", yes_no=True) == 0.0


def test_long_answers_vote_with_their_beginning_and_a_hash() -> None:
    one = grade(Rules("exact"), Sample(response="x" * 5000 + "1", label="x")).answer
    two = grade(Rules("exact"), Sample(response="x" * 5000 + "2", label="x")).answer
    assert len(one) < 200
    assert one != two


@pytest.mark.parametrize(
    "response",
    ["1", "1,", "111,", "1/", "1e", "1.", "1 %", "#", "-", "$", " "],
)
def test_numbers_are_found_in_linear_time(response: str) -> None:
    started = time.perf_counter()
    score("number", response * (500_000 // len(response)), 1)
    assert time.perf_counter() - started < 5.0


@pytest.mark.parametrize(
    ("grader", "config", "fault"),
    [
        ("number", {"abs_tol": 0.1, "rel_tol": 1}, None),
        (
            "number",
            {"abs_tols": 0.1},
            "grader_config.abs_tols: unknown key; did you mean 'abs_tol'?",
        ),
        ("number", {"abs_tol": -1}, "grader_config.abs_tol: expected float >= 0"),
        ("math", {"answer_pattern": "("}, "grader_config.answer_pattern: '(' is no regular"),
        ("choice", {"x": 1}, "grader_config: grader 'choice' has no settings; remove it"),
        ("boxed_f1", {"yes_no": "y"}, "grader_config.yes_no: expected bool, got 'y'"),
    ],
)
def test_settings_are_checked_like_every_table(
    make_set: Any, grader: str, config: dict[str, Any], fault: str | None
) -> None:
    faults = check_grader(make_set("", grader=grader, grader_config=config))
    assert len(faults) == (fault is not None)
    if fault is not None:
        assert faults[0].startswith(fault)
