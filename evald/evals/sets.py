"""Eval sets on disk: JSONL files become checked questions, or one sentence for each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.graders import grader_version
from evald.evals.kinds import Kind, kind_of
from evald.evals.rows import BadRow, Question, json_kind, take

#: faults named in one error; a file that is wrong throughout should not fill the screen.
_MAX_PROBLEMS = 20

#: what has no influence on the score of a sample that was scored.
_SCORE_NEUTRAL = frozenset(
    {
        "path",
        # (its version has what of its settings changes scores)
        "grader_config",
        "n_samples_per_eval_prompt",
        "pass_k",
        "grader_timeout_s",
        "set_deadline_s",
    }
)


class LoadedSet(msgspec.Struct, frozen=True):
    """An eval set with its questions in file order."""

    eval_set: EvalSet
    questions: list[Question]
    #: hex, xxh3-128 of the file.
    data_digest: str
    #: hex, over everything in config and data that determines a sample's score; tokenizer and
    #: template come on top of it, for each point.
    config_digest: str
    #: text that changes when the same response could get another score.
    grader_version: str = ""

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
    path = Path(eval_set.path)
    where = f"cannot read eval set {eval_set.name!r}: {path}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{where}: {error.strerror}; set path to a JSONL file"]) from error
    questions, problems = _read_rows(eval_set, kind, content, where)
    if not problems and not questions:
        problems = [f"{where}: the file has no rows; give one JSON object a line"]
    if problems:
        if len(problems) > _MAX_PROBLEMS:
            more = len(problems) - _MAX_PROBLEMS
            problems = [*problems[:_MAX_PROBLEMS], f"{where}: and {more} more faults"]
        raise ConfigError(problems)
    data_digest = xxhash.xxh3_128_hexdigest(content)
    version = grader_version(eval_set)
    digest = _config_digest(eval_set, data_digest, version)
    return LoadedSet(eval_set, questions, data_digest, digest, version)


def _config_digest(eval_set: EvalSet, data_digest: str, version: str) -> str:
    fields = {
        name: getattr(eval_set, name)
        for name in eval_set.__struct_fields__
        if name not in _SCORE_NEUTRAL
    }
    whole = [fields, data_digest, version]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(whole, order="deterministic"))


def _read_rows(
    eval_set: EvalSet, kind: Kind, content: bytes, where: str
) -> tuple[list[Question], list[str]]:
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
            question = _read_row(eval_set, kind, line, n_rows)
        except BadRow as bad:
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


def _read_row(eval_set: EvalSet, kind: Kind, line: bytes, row_number: int) -> Question:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow(f"not valid JSON ({error}); give one JSON object a line") from error
    if not isinstance(row, dict):
        raise BadRow(f"the row is {json_kind(row)}; give one JSON object a line")
    fields = kind.read(row)
    if eval_set.metadata_key:
        fields["metadata"] = take(row, eval_set.metadata_key, "metadata_key")
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
