"""The samples of one eval set of a point, without their texts: what filters look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Literal, get_args

import msgspec

from evald.results.samples import SampleLine, SampleRecord, Status, line_decoder

Filter = Literal["all", "wrong", "truncated", "no_answer", "failed", "flipped"]
#: their names, as a URL has them.
FILTERS: tuple[Filter, ...] = get_args(Filter)


class Head(msgspec.Struct, frozen=True, gc=False):
    """One sample; ``offset``: where its line begins, in what was compressed."""

    offset: int
    question: str
    sample: int
    status: Status
    score: float | None
    truncated: bool
    no_answer: bool


class SampleHeads:
    """All samples in a journal that belong together; the newest of each counts.

    Of one snapshot and config, those of the newest line: what an earlier start has measured
    otherwise is not the point's. Made by :func:`read_heads`.
    """

    def __init__(self, config: str, heads: list[Head]) -> None:
        self.config = config
        #: in the file's order.
        self.heads = heads

    def means(self) -> dict[str, float]:
        """Return the mean score of each question whose samples all have one."""
        scores: dict[str, list[float | None]] = {}
        for head in self.heads:
            scores.setdefault(head.question, []).append(head.score)
        means = {}
        for question, found in scores.items():
            numbers = [score for score in found if score is not None]
            if len(numbers) == len(found):
                means[question] = sum(numbers) / len(numbers)
        return means

    def moved(self, earlier: SampleHeads | None) -> dict[str, float]:
        """Return by how much the mean of each question that rose or fell has changed."""
        if earlier is None or earlier.config != self.config:
            return {}
        mine, theirs = self.means(), earlier.means()
        both = mine.keys() & theirs.keys()
        return {q: mine[q] - theirs[q] for q in both if mine[q] != theirs[q]}


def filters(moved: dict[str, float]) -> dict[Filter, Callable[[Head], bool]]:
    """Return what each filter lets through; ``moved``: what questions have changed by."""
    return {
        "all": lambda _: True,
        # as pass@k has it: right is a score of 1
        "wrong": lambda head: head.score is not None and head.score < 1,
        "truncated": lambda head: head.truncated,
        "no_answer": lambda head: head.no_answer,
        "failed": lambda head: head.status != "scored",
        "flipped": lambda head: head.question in moved,
    }


def read_heads(file: BinaryIO) -> SampleHeads:
    """Read an open journal from its start. Blocking; raises OSError.

    Lines that cannot be read (a torn one) are passed by.
    """
    newest: dict[tuple[str, int], tuple[SampleLine, int]] = {}
    last: SampleLine | None = None
    offset = 0
    for line in file:
        try:
            last = line_decoder.decode(line)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            newest[last.question, last.sample] = last, offset
        offset += len(line)
    if last is None:
        return SampleHeads("", [])
    heads = [
        Head(at, one.question, one.sample, one.status, one.score, one.truncated, one.no_answer)
        for one, at in newest.values()
        if (one.digest, one.config) == (last.digest, last.config)
    ]
    return SampleHeads(last.config, sorted(heads, key=lambda head: head.offset))


def read_samples(file: BinaryIO, heads: list[Head]) -> list[SampleRecord]:
    """Read some samples of an open journal with their texts, in the order of ``heads``.

    Blocking; raises OSError.
    """
    found: dict[int, SampleRecord] = {}
    for offset in sorted({head.offset for head in heads}):
        file.seek(offset)  # (forwards: going back is dear in a compressed file)
        try:
            found[offset] = _records.decode(file.readline())
        except (msgspec.DecodeError, RecursionError) as error:
            raise OSError(f"a stored sample is damaged at byte {offset}: {error}") from error
    return [found[head.offset] for head in heads]


_records: msgspec.json.Decoder[SampleRecord] = msgspec.json.Decoder(SampleRecord)
