"""Graders: from a response and a reference to a grade; one file for each kind.

``boxed_<grader>`` hands the content of the last box to the grader inside. A response without an
answer is a wrong answer (``no_answer``); a grader that cannot do its work raises GraderFailed, and
that is not a wrong answer.
"""

from evald.evals.graders.choose import (
    GRADERS,
    answer_of,
    check_grader,
    grade,
    grader_of,
    grader_version,
    is_external,
    label_problem,
    sample_texts,
)
from evald.evals.graders.contract import BOXED, Grade, Grader, GraderFailed, Rules, Sample
from evald.evals.graders.references import normalise, reference_texts
from evald.evals.graders.rm_types import RM_TYPES, RmType, grader_for
from evald.evals.graders.thinking import opening_tag

__all__ = [
    "BOXED",
    "GRADERS",
    "RM_TYPES",
    "Grade",
    "Grader",
    "GraderFailed",
    "RmType",
    "Rules",
    "Sample",
    "answer_of",
    "check_grader",
    "grade",
    "grader_for",
    "grader_of",
    "grader_version",
    "is_external",
    "label_problem",
    "normalise",
    "opening_tag",
    "reference_texts",
    "sample_texts",
]
