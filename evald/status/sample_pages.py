"""Stored samples a page at a time, filtered, and one of them with all that is known of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from evald.evals.rows import Question
from evald.results.compressed import open_samples, stored_file
from evald.results.sample_files import samples_file
from evald.results.sample_heads import Filter, SampleHeads, filters, read_heads, read_samples
from evald.results.samples import SampleRecord

MAX_SAMPLES = 200
#: of each text in a list; one sample comes whole, up to its own limit.
_EXCERPT_CHARS = 240
_TEXT_CHARS = 1_000_000

#: finds a question of an eval set as the daemon has it now: set, id.
FindQuestion = Callable[[str, str], "AskedQuestion | None"]


class AskedQuestion(msgspec.Struct, frozen=True):
    """A question, and the digest of the rows it was read from."""

    question: Question
    data_digest: str


class SampleRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sample in a list: its texts are cut short."""

    question: str
    sample: int
    status: str
    score: float | None = None
    truncated: bool = False
    no_answer: bool = False
    #: by how much its question's mean differs from the earlier point's; 0: not at all.
    moved: float = 0.0
    n_tokens: int = 0
    response: str = ""
    reference: str = ""
    grader_reason: str = ""


class SamplePage(msgspec.Struct, kw_only=True):
    """Some samples, and how many there are by filter."""

    n: dict[Filter, int]
    offset: int
    samples: list[SampleRow]


class SampleDetail(msgspec.Struct, kw_only=True):
    """One sample; ``earlier``: the same one of the point that it is compared with."""

    sample: SampleRecord
    earlier: SampleRecord | None = None
    #: text or messages, where the daemon has the question.
    prompt: Any = None
    #: digest of the rows that ``prompt`` comes from: the record says what the sample was asked of.
    data_digest: str = ""


class SamplePages:
    """Reads samples for people, who look at a few at a time. Blocking; one call at a time.

    ``against``: record id of the point that flips are told against; "": none. All methods raise
    ValueError for what is no point or set, FileNotFoundError where there are no samples, OSError.
    """

    def __init__(self, results_dir: Path, *, find_question: FindQuestion) -> None:
        self._results_dir = results_dir
        self._find_question = find_question
        self._cache = _HeadCache()
        self._lock = threading.Lock()

    def page(
        self, record_id: str, set_name: str, against: str, chosen: Filter, offset: int, limit: int
    ) -> SamplePage:
        """Return the samples that a filter lets through, from number ``offset`` on."""
        path = samples_file(self._results_dir, record_id, set_name)
        with self._lock:
            heads = self._cache.heads(path)
            moved = heads.moved(self._earlier(against, set_name))
            passes = filters(moved)
            passed = [head for head in heads.heads if passes[chosen](head)]
            taken = passed[offset : offset + min(limit, MAX_SAMPLES)]
            with open_samples(path) as file:
                samples = read_samples(file, taken)
        n = {name: sum(map(test, heads.heads)) for name, test in passes.items()}
        rows = [_row(sample, moved.get(sample.question, 0.0)) for sample in samples]
        return SamplePage(n=n, offset=offset, samples=rows)

    def one(
        self, record_id: str, set_name: str, against: str, question: str, number: int
    ) -> SampleDetail:
        """Return one sample; raises FileNotFoundError if there is no such one."""
        path = samples_file(self._results_dir, record_id, set_name)
        with self._lock:
            sample = self._sample(path, question, number)
            earlier = None
            if against:
                try:
                    file = samples_file(self._results_dir, against, set_name)
                    earlier = self._sample(file, question, number)
                except FileNotFoundError:
                    pass
        if sample is None:
            raise FileNotFoundError(question)
        asked = self._find_question(set_name, question)
        detail = SampleDetail(sample=sample, earlier=earlier)
        if asked is not None:
            detail.prompt, detail.data_digest = asked.question.prompt, asked.data_digest
        return detail

    def _sample(self, path: Path, question: str, number: int) -> SampleRecord | None:
        heads = self._cache.heads(path).heads
        found = [head for head in heads if (head.question, head.sample) == (question, number)]
        if not found:
            return None
        with open_samples(path) as file:
            return _bounded(read_samples(file, found)[0])

    def _earlier(self, against: str, set_name: str) -> SampleHeads | None:
        if not against:
            return None
        try:
            return self._cache.heads(samples_file(self._results_dir, against, set_name))
        except FileNotFoundError:
            return None


class _HeadCache:
    """Remembers the heads of the last few journals, for as long as these do not change."""

    _KEPT = 3

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], SampleHeads]] = {}

    def heads(self, path: Path) -> SampleHeads:
        """Return the heads of the journal ``path``. Blocking; raises OSError."""
        stored = stored_file(path)
        if stored is None:
            raise FileNotFoundError(path)
        status = stored.stat()
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.pop(path, None)
        if known is None or known[0] != version:
            with open_samples(path) as file:
                known = (version, read_heads(file))
        self._known[path] = known
        while len(self._known) > self._KEPT:
            del self._known[next(iter(self._known))]
        return known[1]


def _row(sample: SampleRecord, moved: float) -> SampleRow:
    reference = sample.reference
    if not isinstance(reference, str):
        reference = "" if reference is None else msgspec.json.encode(reference).decode()
    return SampleRow(
        question=sample.question,
        sample=sample.sample,
        status=sample.status,
        score=sample.score,
        truncated=sample.truncated,
        no_answer=sample.no_answer,
        moved=moved,
        n_tokens=sample.n_tokens,
        response=_excerpt(sample.response),
        reference=_excerpt(reference),
        grader_reason=_excerpt(sample.grader_reason),
    )


def _excerpt(text: str) -> str:
    """Return the end of a text: that is where the answer stands."""
    return text if len(text) <= _EXCERPT_CHARS else "..." + text[-_EXCERPT_CHARS:]


def _bounded(sample: SampleRecord) -> SampleRecord:
    if len(sample.response) <= _TEXT_CHARS:
        return sample
    cut = sample.response[:_TEXT_CHARS] + " ..."
    return msgspec.structs.replace(sample, response=cut)
