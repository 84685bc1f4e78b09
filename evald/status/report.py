"""``evald report``: the status page's curves and tables of a ledger in one file."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from evald.errors import EvaldError
from evald.evals.sets import LoadedSet
from evald.results.sample_heads import filters, read_heads, read_samples
from evald.results.samples import SampleRecord
from evald.results.sinks.source import Source
from evald.results.sinks.stored import OpenSamples
from evald.status.assets import page_dir
from evald.status.bundle import bundle
from evald.status.page_records import Batch, PageRecord, PageRecords
from evald.text import encode_json

#: of one text of a sample; from a longer one its middle is left out.
_HEAD_CHARS = 1500
_TAIL_CHARS = 2500
#: sets of a point whose samples are taken in.
_MAX_SETS = 30


class StoredSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sample in a report."""

    question: str
    sample: int
    status: str
    score: float | None = None
    truncated: bool = False
    no_answer: bool = False
    finish_reason: str = ""
    n_tokens: int = 0
    response: str = ""
    reference: Any = None
    grader_reason: str = ""
    engine: str = ""
    weight_version: str = ""
    prompt: Any = None


class StoredSet(msgspec.Struct, kw_only=True):
    """Samples of one set of one point: the first of ``n_found`` that are wrong or have no score."""

    id: str
    set: str
    n_found: int
    samples: list[StoredSample]


class Report(msgspec.Struct, kw_only=True):
    """All that a report shows."""

    #: seconds since the epoch.
    made: float
    batch: Batch
    samples: list[StoredSet]


def make_report(
    source: Source, open_samples: OpenSamples, *, n_samples: int, sets: Iterable[LoadedSet] = ()
) -> Report:
    """Read what is stored, also while it is written to. Blocking.

    ``n_samples``: wrong samples of each set of each run's last measured point; ``sets``: whose
    prompts go with them. Raises EvaldError for a ledger that is not there, or cannot be read.
    """
    try:
        lines = [line for batch in source.batches() for line in batch]
    except OSError as error:
        raise EvaldError(f"cannot read ledger {source.name}: {error.strerror}") from error
    if source.fault:
        raise EvaldError(source.fault)
    if not lines:
        raise EvaldError(
            f"cannot report on {source.name}: it has no records; give a results directory, its "
            "results.jsonl, the config, or a daemon's http://host:port"
        )
    batch = PageRecords().batch(lines)
    prompts = {
        one.name: {question.id: question.prompt for question in one.questions} for one in sets
    }
    samples = [
        one
        for point in _last_points(batch.records)
        for one in _samples(open_samples, point, n_samples, prompts)
    ]
    return Report(made=time.time(), batch=batch, samples=samples)


def render_report(report: Report) -> str:
    """Return the file: page, data and scripts in one, which asks nobody for anything."""
    page = page_dir()
    licence = (page / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8")
    chart = (page / "vendor" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    styles = [
        (page / name).read_text(encoding="utf-8") for name in ("vendor/uPlot.min.css", "style.css")
    ]
    style = "\n".join(styles)
    scripts = [f"/*!\n{licence}*/\n{chart}", bundle(page, "app.js")]
    # "<" begins all that could end the block early, or begin another
    data = encode_json(report).decode().replace("<", "\\u003c")
    hashes = " ".join(map(_hash, scripts))
    policy = f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<title>evald</title><link rel="icon" href="data:,">',
        f"<style>{style}</style></head><body>",
        f'<script type="application/json" id="evald-report">{data}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _last_points(records: list[PageRecord]) -> list[PageRecord]:
    """Return the last measured step of each run."""
    last: dict[str, PageRecord] = {}
    for one in records:
        if one.type != "point" or one.kind != "step" or one.outcome == "skipped":
            continue
        known = last.get(one.run)
        if known is None or (one.step, one.revision) > (known.step, known.revision):
            last[one.run] = one
    return list(last.values())


def _samples(
    open_samples: OpenSamples,
    point: PageRecord,
    n_samples: int,
    prompts: dict[str, dict[str, Any]],
) -> Iterator[StoredSet]:
    for name in point.sets[:_MAX_SETS] if n_samples else ():
        try:
            passes = filters({})
            with open_samples(point.id, name) as file:
                heads = [
                    head
                    for head in read_heads(file).heads
                    if passes["wrong"](head) or passes["failed"](head)
                ]
                found = read_samples(file, heads[:n_samples])
        except (OSError, ValueError):
            continue  # pruned, or copied without: a report of the curves is worth having
        asked = prompts.get(name, {})
        yield StoredSet(
            id=point.id,
            set=name,
            n_found=len(heads),
            samples=[_stored(one, asked.get(one.question)) for one in found],
        )


def _stored(sample: SampleRecord, prompt: Any) -> StoredSample:
    return StoredSample(
        question=sample.question,
        sample=sample.sample,
        status=sample.status,
        score=sample.score,
        truncated=sample.truncated,
        no_answer=sample.no_answer,
        finish_reason=sample.finish_reason,
        n_tokens=sample.n_tokens,
        response=_cut(sample.response),
        reference=_cut_all(sample.reference),
        grader_reason=_cut(sample.grader_reason),
        engine=sample.engine,
        weight_version=sample.weight_version,
        prompt=_cut_all(prompt),
    )


def _cut(text: str) -> str:
    left_out = len(text) - _HEAD_CHARS - _TAIL_CHARS
    if left_out <= 0:
        return text
    return f"{text[:_HEAD_CHARS]}\n... ({left_out} characters) ...\n{text[-_TAIL_CHARS:]}"


def _cut_all(value: Any) -> Any:
    """Cut the texts in a value of JSON."""
    match value:
        case str():
            return _cut(value)
        case list():
            return [_cut_all(one) for one in value]
        case dict():
            return {name: _cut_all(one) for name, one in value.items()}
        case _:
            return value
