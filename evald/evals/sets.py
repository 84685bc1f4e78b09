"""Eval sets on disk: JSONL files become checked questions, or one sentence for each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.graders import check_grader, grader_version, label_problem
from evald.evals.sampling import check_stop

#: a prompt is chat messages or text.
Prompt = str | list[dict[str, Any]]

#: faults named in one error; a file that is wrong throughout should not fill the screen.
_MAX_PROBLEMS = 20

#: what has no influence on the score of a sample that was scored.
_SCORE_NEUTRAL = frozenset(
    {
        "path",
        "metadata_key",
        "n_samples_per_eval_prompt",
        "pass_k",
        "grader_timeout_s",
        "set_deadline_s",
    }
)


class Question(msgspec.Struct, frozen=True):
    """One row of an eval set."""

    id: str
    prompt: Prompt
    #: reference of the grader: text, a number, true/false, or a list of them (any of).
    label: Any
    metadata: Any = None


class LoadedSet(msgspec.Struct, frozen=True):
    """An eval set with its questions in file order."""

    eval_set: EvalSet
    questions: list[Question]
    #: hex, xxh3-128 of the file.
    data_digest: str
    #: hex, over everything in config and data that determines a sample's score; tokenizer and
    #: template come on top of it, for each point.
    config_digest: str

    @property
    def name(self) -> str:
        """Name of the eval set."""
        return self.eval_set.name

    @property
    def n_samples(self) -> int:
        """Samples of the whole set: the denominator of its headline."""
        return len(self.questions) * self.eval_set.n_samples_per_eval_prompt


class _BadRow(Exception):
    """One fault of one row, without the place."""


def load_set(eval_set: EvalSet) -> LoadedSet:
    """Read and check an eval set; nothing in it is skipped silently.

    Raises ConfigError with one sentence for each fault (the first 20 of a file). Blocking.
    """
    if problems := check_grader(eval_set) + check_stop(eval_set):
        raise ConfigError([f"eval set {eval_set.name!r}: {problem}" for problem in problems])
    path = Path(eval_set.path)
    where = f"cannot read eval set {eval_set.name!r}: {path}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{where}: {error.strerror}; set path to a JSONL file"]) from error
    questions, problems = _read_rows(eval_set, content, where)
    if not problems and not questions:
        problems = [f"{where}: the file has no rows; give one JSON object a line"]
    if problems:
        if len(problems) > _MAX_PROBLEMS:
            more = len(problems) - _MAX_PROBLEMS
            problems = [*problems[:_MAX_PROBLEMS], f"{where}: and {more} more faults"]
        raise ConfigError(problems)
    data_digest = xxhash.xxh3_128_hexdigest(content)
    return LoadedSet(eval_set, questions, data_digest, _config_digest(eval_set, data_digest))


def _config_digest(eval_set: EvalSet, data_digest: str) -> str:
    fields = {
        name: getattr(eval_set, name)
        for name in eval_set.__struct_fields__
        if name not in _SCORE_NEUTRAL
    }
    whole = [fields, data_digest, grader_version(eval_set.grader)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(whole, order="deterministic"))


def _read_rows(eval_set: EvalSet, content: bytes, where: str) -> tuple[list[Question], list[str]]:
    """Read all rows; return the good ones and a sentence for each bad one."""
    questions: list[Question] = []
    problems: list[str] = []
    line_of: dict[str, int] = {}
    # some editors write a byte order mark, which no JSON parser takes
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    n_rows = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        n_rows += 1
        try:
            question = _read_row(eval_set, line, n_rows)
        except _BadRow as bad:
            problems.append(f"{where} line {number}: {bad}")
            continue
        first = line_of.setdefault(question.id, number)
        if first != number:
            problems.append(
                f"{where} line {number}: key {eval_set.id_key!r} has the value "
                f"{question.id!r} of line {first} again; every row needs an id of its own"
            )
        questions.append(question)
    return questions, problems


def _read_row(eval_set: EvalSet, line: bytes, row_number: int) -> Question:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BadRow(f"not valid JSON ({error}); give one JSON object a line") from error
    if not isinstance(row, dict):
        raise _BadRow(f"the row is {_json_kind(row)}; give one JSON object a line")
    prompt = _take(row, eval_set.input_key, "input_key")
    if fault := _prompt_fault(prompt):
        raise _BadRow(f"key {eval_set.input_key!r}: {fault}")
    if isinstance(prompt, list) and eval_set.apply_chat_template is False:
        raise _BadRow(
            f"key {eval_set.input_key!r} is a list of chat messages, but apply_chat_template is "
            'false; set it to "auto", or give text'
        )
    label = _take(row, eval_set.label_key, "label_key")
    if fault := label_problem(eval_set, label):
        raise _BadRow(f"key {eval_set.label_key!r}: {fault}")
    metadata = _take(row, eval_set.metadata_key, "metadata_key") if eval_set.metadata_key else None
    if eval_set.id_key is None:
        return Question(str(row_number), prompt, label, metadata)
    question_id = _take(row, eval_set.id_key, "id_key")
    if isinstance(question_id, bool) or not isinstance(question_id, str | int) or question_id == "":
        raise _BadRow(
            f"key {eval_set.id_key!r} is {_json_kind(question_id)}; an id is text or an integer"
        )
    return Question(str(question_id), prompt, label, metadata)


def _take(row: dict[str, Any], key: str, setting: str) -> Any:
    if key not in row:
        has = ", ".join(row) or "nothing"
        raise _BadRow(f"key {key!r} is missing (the row has {has}); set {setting} to the right one")
    return row[key]


def _prompt_fault(prompt: Any) -> str | None:
    fault = None
    if isinstance(prompt, list):
        faults = (_message_fault(n, message) for n, message in enumerate(prompt, start=1))
        fault = next(filter(None, faults), None) if prompt else "the list of messages is empty"
    elif not isinstance(prompt, str):
        fault = f"the prompt is {_json_kind(prompt)}"
    elif not prompt:
        fault = "the prompt is empty"
    if fault is None:
        return None
    return f'{fault}; give text or a list of chat messages {{"role": ..., "content": ...}}'


def _message_fault(number: int, message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"message {number} is {_json_kind(message)}"
    if not isinstance(message.get("role"), str):
        return f"message {number} has no text 'role'"
    if not _is_content(message):
        return f"message {number} has no 'content' of text (images are not supported)"
    return None


def _is_content(message: dict[str, Any]) -> bool:
    """Text, a list of text parts, or nothing beside tool calls."""
    content = message.get("content")
    if content is None:
        return bool(message.get("tool_calls"))
    if isinstance(content, list):
        return bool(content) and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        )
    return isinstance(content, str)


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    return kinds.get(type(value), "a number")
