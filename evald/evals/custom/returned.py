"""What a generate function returned, checked and made plain."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from evald.custom import Result
from evald.evals.custom.messages import Returned
from evald.evals.graders.contract import GraderFailed
from evald.evals.graders.verdict import SCORE, verdict
from evald.evals.stats.names import is_set_metric

_VALUE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def returned(call: int, result: Any, *, in_thought: bool) -> Returned:
    """Make the message for what the function returned; raises GraderFailed, TypeError."""
    if isinstance(result, str):
        result = Result(result)
    if not isinstance(result, Result):
        raise TypeError(f"it returned {type(result).__name__}; return text or evald.custom.Result")
    if not isinstance(result.text, str):
        raise TypeError(f"the result's text is {type(result.text).__name__}; give text")
    grade = None
    if result.score is not None or result.no_answer:
        grade = verdict({
            SCORE: result.score,
            "answer": result.answer,
            "no_answer": result.no_answer,
            "reason": result.reason,
        })  # fmt: skip
    return Returned(
        call=call,
        text=result.text,
        grade=grade,
        values={_name(name): _number(name, value) for name, value in result.values.items()},
        messages=_plain(result.messages),
        in_thought=in_thought,
    )


def _name(name: object) -> str:
    if not isinstance(name, str) or not _VALUE_NAME.fullmatch(name):
        raise GraderFailed(
            f"value {name!r:.80} cannot be a metric: its name must match {_VALUE_NAME.pattern}"
        )
    if is_set_metric(name):
        raise GraderFailed(f"value {name!r} would overwrite evald's own metric; call it otherwise")
    return name


def _number(name: object, value: Any) -> float:
    # numbers of array libraries are no numbers of Python's, but have one
    value = getattr(value, "item", lambda: value)()
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise GraderFailed(f"value {name!r} must be a finite number, but is {value!r}")
    return float(value)


def _plain(messages: list[Any] | None) -> list[Any] | None:
    """Make plain JSON of a conversation; raises GraderFailed."""
    if messages is None:
        return None
    try:
        plain = json.loads(json.dumps(messages, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise GraderFailed(f"messages must be what JSON can hold: {error}") from error
    return list(plain)
