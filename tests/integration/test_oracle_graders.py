"""The same responses graded by evald, by math-verify called directly, and by sgl-eval.

Every form of a response either agrees in all of them or stands in a table with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from evald.evals.graders import Rules, Sample, grade
from evald.evals.graders.choice import choice_letter

#: forms of a response to an AIME problem; N is the answer.
NUMBER_FORMS = [
    "So the answer is \\boxed{N}.",
    "First \\boxed{9999}, no: \\boxed{N}",
    "\\boxed{N} or \\boxed{3}",
    "\\boxed{\\boxed{N}}",
    "$\\boxed{N}$",
    "\\boxed{ N }",
    "\\boxed{\nN\n}",
    "\\boxed{0N}",
    "\\boxed{N.0}",
    "\\boxed{N.}",
    "\\boxed{-N}",
    "\\boxed{1,N}",
    "\\boxed{N, 1}",
    "\\boxed{(N)}",
    "\\boxed{\\left(N\\right)}",
    "\\boxed{\\{N\\}}",
    "\\boxed{\\frac{N}{1}}",
    "\\boxed{\\dfrac{N}{1}}",
    "\\boxed{N+0}",
    "\\boxed{N \\times 10^0}",
    "\\boxed{\\sqrt{N^2}}",
    "\\boxed{x = N}",
    "\\boxed{N^\\circ}",
    "\\boxed{N\\%}",
    "\\boxed{\\text{N}}",
    "\\boxed{\\mathbf{N}}",
    "\\boxed{N\\text{ cm}}",
    "\\boxed{N \\text{ or } 3}",
    "\\fbox{N}",
    "\\boxed {N}",
    "\\boxed N",
    "\\boxed{N",
    "\\boxed{N} and \\boxed{12",
    "N \\boxed{}",
    "the answer is N",
    "the answer is $N$",
    "**N**",
]
#: where ``boxed_math`` and math-verify on the whole response differ, and why.
BOX_OR_NOT = {
    "First \\boxed{9999}, no: \\boxed{N}": "math-verify takes one of several boxes as good",
    "N \\boxed{}": "an empty box is no answer, whatever stands outside",
    "\\boxed N": "a box has braces",
    "\\boxed {N}": "math-verify knows no box with a space",
    "the answer is N": "there is no box",
    "the answer is $N$": "there is no box",
    "**N**": "there is no box",
}
#: where ``boxed_math`` and sgl-eval differ, and why.
BOX_OF_SGL = {
    "\\boxed{N.}": "sgl-eval takes a full stop off",
    "\\boxed {N}": "sgl-eval knows no box with a space",
    "\\boxed{N} and \\boxed{12": "sgl-eval gives up at a box that is not closed",
}
#: references and answers of other kinds than numbers; all of them agree but two.
EXPRESSIONS = [
    ("\\frac{3}{4}", "0.75"), ("\\frac{3}{4}", "\\frac34"), ("\\frac{3}{4}", "3/4"),
    ("\\frac{1}{3}", "0.333"), ("0.1", "\\frac{1}{10}"), ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("2\\sqrt{3}", "\\sqrt{12}"), ("\\sqrt{2}", "1.41421356"), ("\\frac{\\pi}{2}", "\\pi/2"),
    ("(1,2)", "(1, 2)"), ("(1,2)", "(2,1)"), ("1,2", "2,1"), ("\\{1,2\\}", "\\{2,1\\}"),
    ("[0,1)", "[0, 1)"), ("[0,1)", "(0,1]"), ("(-\\infty,3)", "x<3"), ("x<3", "3>x"),
    ("x^2+2x+1", "(x+1)^2"), ("x^2+1", "x^2+2"), ("y=2x+1", "y=1+2x"), ("x=5", "5"), ("5", "x=5"),
    ("10^{6}", "1000000"), ("1,000,000", "1000000"), ("2^{10}", "1024"), ("5!", "120"),
    ("\\binom{5}{2}", "10"), ("7", "7.0000001"), ("11", "011"), ("\\$18", "18"), ("18", "\\$18"),
    ("50\\%", "50"), ("50\\%", "0.5"), ("90^\\circ", "90"), ("1 \\text{ hour}", "1"),
    ("3+4i", "4i+3"), ("\\infty", "-\\infty"), ("e^{i\\pi}", "-1"), ("\\ln 2", "\\log 2"),
    ("\\text{Alice}", "Alice"), ("monday", "Monday"), ("A", "A"), ("A", "B"), ("C", "\\text{C}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
]  # fmt: skip
EXPRESSIONS_OF_SGL = {
    ("50\\%", "0.5"): "sgl-eval takes the percent sign off",
    ("monday", "Monday"): "sgl-eval compares words with their case",
}

#: forms of an answer to a question with choices; X is the letter, Y another one.
CHOICE_FORMS = [
    "\\boxed{X}", "The answer is \\boxed{X}.", "$\\boxed{X}$", "\\boxed{(X)}",
    "\\boxed{\\text{X}}", "\\boxed{\\textbf{X}}", "\\boxed{\\mathrm{X}}", "\\boxed{\\text{(X)}}",
    "\\boxed{X. because}", "\\boxed{(X) because}", "\\boxed{\\text{X. because}}",
    "\\boxed{Y} no \\boxed{X}", "A dog is \\boxed{X}", "\\boxed{X", "\\boxed{The answer is X}",
    "Answer: X", "**Answer:** X", "Answer: X.", "Answer:\nX", "Final Answer: X",
    "Answer: \\boxed{X}", "Answer: X, since Y", "Answer: Xylophone", "Answer: Y ... Answer: X",
    "The final answer is X", "The final answer is (X)", "The final answer is X.",
    "The final answer is \\boxed{X}", "nothing here", "option X is right", "<answer>X</answer>",
    "The answer is X", "the answer is (X).", "X", "(X)", "**X**", "X. because", "I pick **X**",
    "long\nX", "Answer: (X)", "Answer: **X**", "Answer: $X$", "Answer: \\text{X}",
    "Answer: X or Y", "\\boxed{X, Y}", "\\boxed{Y}\n\nAnswer: X", "The final answer is X because",
    "The final answer is the letter X",
]  # fmt: skip
_NEEDS_MARK = "sgl-eval wants a box, 'Answer: X' or 'The final answer is X'"
_NO_BRACKETS = "sgl-eval wants the bare letter behind 'Answer:'"
_TWO = "two letters are no choice"
CHOICES_OF_SGL = {
    "The answer is X": _NEEDS_MARK,
    "the answer is (X).": _NEEDS_MARK,
    "X": _NEEDS_MARK,
    "(X)": _NEEDS_MARK,
    "**X**": _NEEDS_MARK,
    "X. because": _NEEDS_MARK,
    "I pick **X**": _NEEDS_MARK,
    "long\nX": _NEEDS_MARK,
    "Answer: (X)": _NO_BRACKETS,
    "Answer: **X**": _NO_BRACKETS,
    "Answer: $X$": _NO_BRACKETS,
    "Answer: \\text{X}": _NO_BRACKETS,
    "<answer>X</answer>": _NEEDS_MARK,
    "Answer: X or Y": _TWO,
    "\\boxed{X, Y}": _TWO,
    "\\boxed{Y}\n\nAnswer: X": "sgl-eval takes a box before everything else",
    "The final answer is X because": "a letter before a small word may be a word: 'A dog'",
    "The final answer is the letter X": "sgl-eval takes the last capital that stands alone",
}


def aime() -> list[str]:
    """Answers of AIME 2025, from the data that sgl-eval's wheel carries."""
    data = resources.files("sgl_eval._vendored.nemo_skills.dataset")
    lines = data.joinpath("aime25/test.txt").read_text().splitlines()
    return [json.loads(line)["expected_answer"] for line in lines]


class Case:
    """One response with its reference, and the form that it has."""

    def __init__(self, form: Any, response: str, gold: str) -> None:
        self.form = form
        self.response = response
        self.gold = gold


def math_cases() -> list[Case]:
    cases = []
    for number, gold in enumerate(aime()[:10]):
        # every other answer is wrong
        said = gold if number % 2 else str(int(gold) + 1)
        cases += [Case(form, form.replace("N", said), gold) for form in NUMBER_FORMS]
    for pair in EXPRESSIONS:
        cases.append(Case(pair, f"so it is \\boxed{{{pair[1]}}}", pair[0]))
    return cases


def choice_cases() -> list[Case]:
    letters = zip("ABCD", "BCDA", strict=True)
    return [
        Case(form, form.replace("X", mine).replace("Y", other), mine)
        for mine, other in letters
        for form in CHOICE_FORMS
    ]


class Oracle:
    """What all of them say, in the order of the cases."""

    def __init__(self) -> None:
        self.math = math_cases()
        self.choice = choice_cases()
        jobs = {
            "math": [(case.response, case.gold) for case in self.math],
            "choice": [(case.response, case.gold) for case in self.choice],
        }
        script = Path(__file__).with_name("graders_reference.py")
        with subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reference:
            assert reference.stdin is not None
            assert reference.stdout is not None
            json.dump(jobs, reference.stdin)
            reference.stdin.close()
            self.ours = {
                grader: [score(grader, case) for case in self.math]
                for grader in ("math", "boxed_math")
            }
            self.theirs = json.load(reference.stdout)

    def different(self, grader: str, whose: str) -> set[Any]:
        """Forms in which evald's math grader and another one do not agree."""
        triples = zip(self.math, self.ours[grader], self.theirs[whose], strict=True)
        return {case.form for case, mine, their in triples if mine != their}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def score(grader: str, case: Case) -> bool:
    return grade(Rules(grader), Sample(response=case.response, label=case.gold)).score == 1.0


def test_oracle_math_is_math_verify_called_directly(oracle: Oracle) -> None:
    right = oracle.ours["math"]
    assert len(right) > 400
    assert 100 < sum(right) < len(right) - 100
    assert oracle.different("math", "math_verify") == set()


def test_oracle_boxed_math_differs_from_math_verify_where_it_says(oracle: Oracle) -> None:
    assert oracle.different("boxed_math", "math_verify") == set(BOX_OR_NOT)


def test_oracle_boxed_math_differs_from_sgl_eval_where_it_says(oracle: Oracle) -> None:
    known = set(BOX_OF_SGL) | set(EXPRESSIONS_OF_SGL)
    assert oracle.different("boxed_math", "sgl_math") == known


def test_oracle_choice_differs_from_sgl_eval_where_it_says(oracle: Oracle) -> None:
    different = {
        case.form
        for case, their in zip(oracle.choice, oracle.theirs["sgl_choice"], strict=True)
        if choice_letter(case.response, "ABCD") != their
    }
    assert len(oracle.choice) > 180
    assert different == set(CHOICES_OF_SGL)


def test_choice_finds_the_letter_where_people_do() -> None:
    none = {
        form
        for form in CHOICE_FORMS
        if not score("choice", Case(form, form.replace("X", "C").replace("Y", "D"), "C"))
    }
    assert none == {
        "\\boxed{X", "\\boxed{X, Y}", "Answer: X or Y", "Answer: Xylophone", "nothing here",
        "option X is right", "The final answer is X because", "The final answer is the letter X",
    }  # fmt: skip
