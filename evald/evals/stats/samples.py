"""The samples of a set, read back from its journal: numbers only, question by question."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from evald.results.compressed import open_samples


class Sample(msgspec.Struct, frozen=True):
    """What the statistics need of a ``SampleRecord``; its texts are never held."""

    question: str
    sample: int
    digest: str
    config: str
    status: Literal["scored", "error", "grader_error", "timeout"]
    too_long: bool = False
    score: float | None = None
    no_answer: bool = False
    unfinished_thinking: bool = False
    truncated: bool = False
    repeats: bool = False
    n_tokens: int = 0
    answer: str = ""
    values: dict[str, float] = {}
    weight_version: str = ""

    @property
    def answered(self) -> bool:
        """Whether there is a response, graded or not."""
        return self.status in {"scored", "grader_error"}


#: by question, then by number of the sample.
Samples = dict[str, dict[int, Sample]]


def read_samples(path: Path, digest: str, config: str) -> Samples:
    """Read the samples of one snapshot and config; the newest of each counts.

    Lines that cannot be read (a torn one) and those of others are passed by; no file, no samples.
    Raises OSError.
    """
    samples: Samples = {}
    try:
        file = open_samples(path)
    except FileNotFoundError:
        return samples
    with file:
        for line in file:
            try:
                sample = _decoder.decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            if (sample.digest, sample.config) == (digest, config):
                samples.setdefault(sample.question, {})[sample.sample] = sample
    return samples


_decoder = msgspec.json.Decoder(Sample)
