"""Samples of a black box, into the same files as everybody's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evald.blackbox import lm_eval
from evald.postures.blackbox.results import BoxSet, Fault, ResultsRefused, decode_json
from evald.results.records import Counts
from evald.results.samples import SampleJournal, SampleRecord

#: a longer line of a samples file is no sample.
MAX_LINE_BYTES = 16 * 2**20


class BoxSample(SampleRecord, kw_only=True):
    """A sample with whatever else the evaluator said about it."""

    extra: dict[str, Any] = msgspec.field(default_factory=dict)


def write_samples(one: BoxSet, journal: SampleJournal, *, digest: str, config: str) -> Counts:
    """Append the samples of a set to its journal; their counts.

    Raises ResultsRefused, and OSError when the journal cannot be written. Blocks, for as long as
    the samples are many; samples that an earlier attempt at the point has left are replaced.
    """
    journal.path.unlink(missing_ok=True)
    counts = Counts()
    try:
        for number, raw in enumerate(_raw_samples(one), start=1):
            try:
                sample = _sample(raw, number, digest, config)
                journal.append(sample)
            except ValueError as error:
                raise ResultsRefused(f"set {one.name}: sample {number}: {error}") from error
            counts += _count(sample)
    finally:
        journal.close()
    return counts


def _raw_samples(one: BoxSet) -> Iterator[Any]:
    raw: Iterable[Any] = one.samples if isinstance(one.samples, list) else _lines(one)
    for sample in raw:
        if one.lm_eval_metric and isinstance(sample, dict):
            converted = lm_eval.convert_sample(sample, one.lm_eval_metric)
            if converted is not None:
                yield converted
        else:
            yield sample


def _lines(one: BoxSet) -> Iterator[Any]:
    """Read a file of JSON lines, one at a time; raises ResultsRefused."""
    path = Path(str(one.samples))
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ResultsRefused(
                        f"set {one.name}: {path}, line {number}: longer than {MAX_LINE_BYTES:,} "
                        "bytes"
                    )
                if line.strip():
                    yield decode_json(line)
    except OSError as error:
        raise ResultsRefused(f"set {one.name}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsRefused(f"set {one.name}: {path}, line {number}: {error}") from error


def _sample(raw: Any, number: int, digest: str, config: str) -> BoxSample:
    if not isinstance(raw, dict):
        raise Fault(f"an object is expected, got {type(raw).__name__}")
    known = {key: raw[key] for key in SampleRecord.__struct_fields__ if key in raw}
    extra = {key: value for key, value in raw.items() if key not in known}
    score = known.get("score")
    if isinstance(score, float) and not math.isfinite(score):
        raise Fault(f"score is {score}, but only finite numbers are recorded")
    known |= {"question": str(raw.get("question", number)), "digest": digest, "config": config}
    known.setdefault("sample", 0)
    known.setdefault("status", "error" if score is None else "scored")
    # an evaluator's True and False are 1 and 0
    known["score"] = float(score) if isinstance(score, bool) else score
    return msgspec.convert({**known, "extra": extra}, BoxSample)


def _count(sample: BoxSample) -> Counts:
    scored = sample.status == "scored"
    return Counts(
        n_total=1,
        n_scored=int(scored),
        n_truncated=int(scored and sample.truncated),
        n_no_answer=int(scored and sample.no_answer),
        n_error=int(sample.status == "error"),
        n_grader_error=int(sample.status == "grader_error"),
        n_timeout=int(sample.status == "timeout"),
    )
