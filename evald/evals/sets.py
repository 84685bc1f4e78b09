"""Eval sets on disk: data files become checked questions, or one sentence for each fault."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.asked import asked_digest
from evald.evals.custom.settings import function_version
from evald.evals.graders import grader_version
from evald.evals.kinds import Kind, kind_of
from evald.evals.row_source import RowSource, Unreadable
from evald.evals.rows import (
    BadRow,
    KeyMissing,
    Question,
    decode_row,
    json_kind,
    row_metadata,
    row_tools,
    take,
)

#: faults named in one error; a file that is wrong throughout should not fill the screen.
_MAX_PROBLEMS = 20

#: what has no influence on the score of a sample that was scored.
_SCORE_NEUTRAL = frozenset(
    {
        "path",
        # (their versions have what of their settings changes scores)
        "grader_config",
        "function_config",
        "n_samples_per_eval_prompt",
        "min_eval_samples",
        "list_up_to_tokens",
        "pass_k",
        "grader_timeout_s",
        "set_deadline_s",
        "stragglers",
        "cut_at_share",
        "cut_after_s",
    }
)


class LoadedSet(msgspec.Struct, frozen=True):
    """An eval set with its questions in file order."""

    eval_set: EvalSet
    questions: list[Question]
    #: hex, xxh3-128 of the file, or of those of its rows that are taken.
    data_digest: str
    #: hex, over everything in config and data that determines a sample's score; tokenizer and
    #: template come on top of it, for each point.
    config_digest: str
    #: hex, over the settings alone: without data and grader.
    settings_digest: str = ""
    #: text that changes when the same response could get another score.
    grader_version: str = ""
    #: text that changes when the user's function may ask otherwise; "" without one.
    function_version: str = ""
    #: hex, over what determines the responses: without labels and grader.
    asked_digest: str = ""

    @property
    def name(self) -> str:
        """Name of the eval set."""
        return self.eval_set.name

    @property
    def n_samples(self) -> int:
        """Samples of the whole set: the denominator of its headline."""
        return len(self.questions) * self.eval_set.n_samples_per_eval_prompt


def load_set(eval_set: EvalSet) -> LoadedSet:
    """Read and check an eval set; nothing in it is skipped silently.

    Raises ConfigError with one sentence for each fault (the first 20 of a file). Blocking.
    """
    kind = kind_of(eval_set)
    if kind.single:
        eval_set = msgspec.structs.replace(eval_set, n_samples_per_eval_prompt=1)
    if problems := kind.check():
        raise ConfigError([f"eval set {eval_set.name!r}: {problem}" for problem in problems])
    where = f"cannot read eval set {eval_set.name!r}: {eval_set.path}"
    try:
        rows = RowSource(eval_set.path)
        questions, problems = _read_rows(eval_set, kind, rows, where)
    except Unreadable as error:
        raise ConfigError([f"{where}: {error}"]) from error
    if not problems:
        problems = [f"{where}: {fault}" for fault in _too_few(eval_set, len(questions))]
    if problems:
        if len(problems) > _MAX_PROBLEMS:
            more = len(problems) - _MAX_PROBLEMS
            problems = [*problems[:_MAX_PROBLEMS], f"{where}: and {more} more faults"]
        raise ConfigError(problems)
    version, function = grader_version(eval_set), function_version(eval_set)
    fields = {
        name: getattr(eval_set, name)
        for name in eval_set.__struct_fields__
        if name not in _SCORE_NEUTRAL
    }
    return LoadedSet(
        eval_set,
        questions,
        rows.digest,
        _digest([fields, rows.digest, version, function]),
        _digest(fields),
        version,
        function,
        asked_digest(fields, questions, function),
    )


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value, order="deterministic"))


def _too_few(eval_set: EvalSet, n_questions: int) -> list[str]:
    n_samples = n_questions * eval_set.n_samples_per_eval_prompt
    if not n_questions and eval_set.path.endswith("]"):
        fault = "the slice takes none of its rows; give another one"
    elif not n_questions:
        fault = "the file has no rows; give one JSON object a line"
    elif n_samples < (eval_set.min_eval_samples or 0):
        fault = (
            f"{n_questions} questions make {n_samples} samples, fewer than min_eval_samples = "
            f"{eval_set.min_eval_samples}; raise n_samples_per_eval_prompt, or lower it"
        )
    else:
        return []
    return [fault]


def _read_rows(
    eval_set: EvalSet, kind: Kind, rows: RowSource, where: str
) -> tuple[list[Question], list[str]]:
    """Read all rows; return the good ones and a sentence for each bad one.

    A key that no row has is one fault, not one of each row.
    """
    questions: list[Question] = []
    problems: list[str] = []
    place_of: dict[str, str] = {}
    missing: list[KeyMissing] = []
    n_rows = 0
    for row in rows:
        n_rows += 1
        try:
            question = _read_row(eval_set, kind, row.content, row.number)
        except BadRow as bad:
            problems.append(f"{where} {row.place}: {bad}")
            if isinstance(bad, KeyMissing):
                missing.append(bad)
            continue
        first = place_of.setdefault(question.id, row.place)
        if first != row.place:
            problems.append(
                f"{where} {row.place}: key {eval_set.id_key!r} has the value "
                f"{question.id!r} of {first} again; every row needs an id of its own"
            )
        questions.append(question)
    if len(missing) == n_rows > 1 and len({one.key for one in missing}) == 1:
        problems = [f"{where}: {missing[0].of_all(n_rows)}"]
    return questions, problems


def _read_row(eval_set: EvalSet, kind: Kind, content: bytes, row_number: int) -> Question:
    row = decode_row(content)
    fields = kind.read(row)
    fields["metadata"] = row_metadata(row, eval_set.metadata_key, eval_set.metadata_overrides)
    fields["tools"] = row_tools(row, eval_set.tool_key)
    as_it_is = isinstance(fields["prompt"], str) and eval_set.apply_chat_template is not True
    if fields["tools"] and as_it_is and eval_set.kind != "custom":
        raise BadRow(
            f"key {eval_set.tool_key!r} has tools, but the prompt is text that is sent as it is; "
            "give chat messages, or set apply_chat_template = true"
        )
    if eval_set.cluster_key:
        fields["cluster"] = _name(row, eval_set.cluster_key, "cluster_key")
    question_id = str(row_number)
    if eval_set.id_key is not None:
        question_id = _name(row, eval_set.id_key, "id_key")
    return Question(id=question_id, **fields)


def _name(row: dict[str, Any], key: str, setting: str) -> str:
    value = take(row, key, setting)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow(f"key {key!r} is {json_kind(value)}; {setting} wants text or an integer")
    return str(value)
