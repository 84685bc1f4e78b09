"""What a black box has written, read with suspicion: JSON -> checked sets, or one sentence.

``results.json``: ``{"sets": {NAME: {"metrics": {...}, "counts": {...}, "samples": [...] or a file
of JSON lines, "seconds": ...}}, "engines": [...], "weight_versions": [...], "provenance": {...}}``
or ``{"skip": REASON, "detail": ...}``. Without it, what the lm-evaluation-harness writes.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from evald.blackbox import lm_eval
from evald.errors import EvaldError
from evald.results.records import Counts, is_own_metric

RESULTS_NAME = "results.json"
#: a larger file would keep the daemon's interpreter busy: samples belong into files of their own.
MAX_RESULTS_BYTES = 32 * 2**20
#: it becomes part of the point's line in the ledger.
MAX_PROVENANCE_BYTES = 64 * 2**10
#: metrics that dashboards show as ``eval/{set}-{metric}``.
_DASHED = re.compile(r"pass@\d+|truncated_ratio|none_reward_ratio")
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
_METRIC_NAME = re.compile(r"[\w@.,:+=() %-][\w@.,:+=() %/-]{0,127}")
_MAX_REASON_CHARS = 64
_MAX_DETAIL_CHARS = 500


class ResultsRefused(EvaldError):
    """What the black box wrote is no result."""


class Fault(ValueError):
    """What is wrong, in a few words; the file's name is added where it is known."""


class Skipped(msgspec.Struct, frozen=True):
    """The black box gave no score, and said why."""

    reason: str
    detail: str


class BoxSet(msgspec.Struct, frozen=True, kw_only=True):
    """One eval set."""

    name: str
    #: flat, under their full names.
    metrics: dict[str, float]
    #: None: to be counted from the samples.
    counts: Counts | None
    seconds: float | None
    #: themselves, or the file of JSON lines that they are in.
    samples: list[Any] | Path
    #: headline of an lm_eval task; empty: the samples are in evald's form.
    lm_eval_metric: str = ""


class BoxResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that a black box found out about a point."""

    sets: list[BoxSet]
    engines: list[str]
    weight_versions: list[str]
    provenance: dict[str, Any]


def read_results(output_dir: Path) -> BoxResults | Skipped:
    """Read what was written below ``output_dir``; raises ResultsRefused. Blocks."""
    path = output_dir / RESULTS_NAME
    try:
        if path.exists():
            return _read(path, _decode_file(path))
        files = lm_eval.find_results(output_dir)
        if not files:
            raise ResultsRefused(
                f"it wrote no results: neither {RESULTS_NAME} nor results_*.json (lm_eval) is in "
                f"{output_dir}"
            )
        merged: dict[str, Any] = {"sets": {}, "provenance": {}}
        for path in files:
            converted = lm_eval.convert(_decode_file(path), path)
            merged["sets"] |= converted["sets"]
            merged["provenance"] |= converted["provenance"]
        return _read(path, merged)
    except OSError as error:
        raise ResultsRefused(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsRefused(f"cannot use {path}: {error}") from error


def read_skip(output_dir: Path) -> Skipped | None:
    """Return the reason that a process which gave up has written; None when there is none."""
    try:
        found = read_results(output_dir)
    except ResultsRefused:
        return None
    return found if isinstance(found, Skipped) else None


def skipped(reason: str, detail: str) -> Skipped:
    """Make a reason fit for a metric's name; what does not fit goes into the detail."""
    word = re.sub(r"[^A-Za-z0-9]+", "_", reason).strip("_").lower()[:_MAX_REASON_CHARS]
    if word != reason:
        detail = f"{reason}: {detail}" if detail else reason
    return Skipped(word or "unnamed", " ".join(detail.split())[:_MAX_DETAIL_CHARS])


def decode_json(content: bytes) -> Any:
    """Decode JSON that any program may have written; raises Fault with the cause.

    Python's own NaN and Infinity are read as such, and halves of surrogate pairs become "?".
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        pass  # perhaps one of the two, which only the standard library reads
    try:
        lenient = json.loads(content.decode("utf-8", "replace"))
        clean = json.dumps(lenient, ensure_ascii=False).encode("utf-8", "replace")
        return json.loads(clean)
    except RecursionError as error:
        raise Fault("its JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Fault(f"it is not JSON: {error}") from error


def _decode_file(path: Path) -> Any:
    if not path.is_file():  # a pipe or a device may never end
        raise Fault("it is no regular file")
    size = path.stat().st_size
    if size > MAX_RESULTS_BYTES:
        raise Fault(
            f"it has {size:,} bytes, allowed are {MAX_RESULTS_BYTES:,}; write samples into a file "
            'of JSON lines and name it: "samples": "gsm8k.jsonl"'
        )
    return decode_json(path.read_bytes())


def _read(path: Path, content: Any) -> BoxResults | Skipped:
    if not isinstance(content, dict):
        raise Fault(f"a JSON object is expected, got {_show(content)}")
    if "skip" in content:
        if not isinstance(content["skip"], str):
            raise Fault(f'"skip" must be a reason, got {_show(content["skip"])}')
        return skipped(content["skip"], str(content.get("detail") or ""))
    sets = content.get("sets")
    if not isinstance(sets, dict) or not sets:
        raise Fault(f'"sets" must be a table of at least one eval set, got {_show(sets)}')
    provenance = content.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise Fault(f'"provenance" must be a table, got {_show(provenance)}')
    if len(msgspec.json.encode(provenance)) > MAX_PROVENANCE_BYTES:
        raise Fault(f'"provenance" has more than {MAX_PROVENANCE_BYTES:,} bytes')
    return BoxResults(
        sets=[_read_set(path, name, row) for name, row in sets.items()],
        engines=_texts(content, "engines"),
        weight_versions=_texts(content, "weight_versions"),
        provenance=provenance,
    )


def _read_set(path: Path, name: str, row: Any) -> BoxSet:
    if not _SET_NAME.fullmatch(name):
        raise Fault(
            f"set {name!r}: a name has letters, digits and . _ @ + - only, at most 128 of them"
        )
    if is_own_metric(name):
        raise Fault(f"set {name!r}: eval/{name} is a metric of evald's own; choose another name")
    if isinstance(row, int | float):  # the headline alone
        row = {"metrics": {"score": row}}
    metrics = row.get("metrics") if isinstance(row, dict) else None
    if not isinstance(metrics, dict) or not metrics:
        raise Fault(f'set {name}: "metrics" must be a table of numbers, got {_show(metrics)}')
    seconds = row.get("seconds")
    return BoxSet(
        name=name,
        metrics={
            _full_name(name, metric): _number(f"set {name}: metric {metric}", value)
            for metric, value in metrics.items()
        },
        counts=_counts(name, row["counts"]) if row.get("counts") else None,
        seconds=None if seconds is None else _number(f"set {name}: seconds", seconds),
        samples=_samples(path, name, row.get("samples") or []),
        lm_eval_metric=str(row.get("lm_eval_metric") or ""),
    )


def _full_name(name: str, metric: str) -> str:
    if not _METRIC_NAME.fullmatch(metric):
        raise Fault(f"set {name}: {metric!r} is no name for a metric")
    if metric == "score":
        return f"eval/{name}"
    return f"eval/{name}-{metric}" if _DASHED.fullmatch(metric) else f"eval/{name}/{metric}"


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Fault(f"{what} must be a number, got {_show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Fault(f"{what} is {number}, but only finite numbers are recorded")
    return number


def _counts(name: str, table: Any) -> Counts:
    """Take counts that add up; a missing total, or number of scored ones, follows from the rest."""
    try:
        given = msgspec.convert(table, dict[str, int])
    except msgspec.ValidationError as error:
        raise Fault(f"set {name}: counts {_show(table)}: {error}") from error
    unknown = given.keys() - set(Counts.__struct_fields__)
    if unknown:
        raise Fault(f"set {name}: counts {_show(table)}: unknown are {', '.join(sorted(unknown))}")
    failed = sum(given.get(key, 0) for key in ("n_error", "n_grader_error", "n_timeout"))
    given.setdefault("n_scored", given.get("n_total", failed) - failed)
    given.setdefault("n_total", given["n_scored"] + failed)
    if min(given.values()) < 0 or given["n_total"] != given["n_scored"] + failed:
        raise Fault(
            f"set {name}: counts {_show(table)}: none may be negative, and n_total must be "
            "n_scored + n_error + n_grader_error + n_timeout"
        )
    return Counts(**given)


def _samples(path: Path, name: str, samples: Any) -> list[Any] | Path:
    if isinstance(samples, list):
        return samples
    if not isinstance(samples, str):
        raise Fault(f'set {name}: "samples" must be a list or a file\'s name, got {_show(samples)}')
    file = path.parent / samples
    if not file.is_file():
        raise Fault(f"set {name}: there is no file of samples {file}")
    return file


def _texts(content: dict[str, Any], key: str) -> list[str]:
    value = content.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Fault(f'"{key}" must be a list of texts, got {_show(value)}')
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 (one line)
