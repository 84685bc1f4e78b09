"""The samples of a point that has ended, read back with their texts: a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from evald.results.compressed import open_samples
from evald.results.samples import SampleRecord

#: what one batch holds at most: this many samples, or about this many bytes.
_BATCH_SAMPLES = 64
_BATCH_BYTES = 1 << 20


class StoredSamples:
    """The samples of one snapshot and config in a journal; the newest of each counts.

    ``n_samples``: of each question; what has a higher number is not the point's. Lines that cannot
    be read (a torn one) and those of others are passed by. Blocking; both methods read the file
    once, and raise OSError.
    """

    def __init__(self, path: Path, digest: str, config: str, *, n_samples: int) -> None:
        self._path = path
        self._n_samples = n_samples
        self._mine = (digest, config)
        #: where the lines begin that count.
        self._offsets: set[int] = set()

    def count(self) -> int:
        """Find the samples, and count them."""
        newest: dict[tuple[str, int], int] = {}
        for offset, line in self._lines():
            try:
                one = _records.decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            if (one.digest, one.config) == self._mine and one.sample < self._n_samples:
                newest[one.question, one.sample] = offset
        self._offsets = set(newest.values())
        return len(self._offsets)

    def batches(self) -> Iterator[list[SampleRecord]]:
        """Give the samples that ``count`` has found, in the file's order."""
        batch: list[SampleRecord] = []
        n_bytes = 0
        for offset, line in self._lines():
            if offset not in self._offsets:
                continue
            batch.append(_records.decode(line))
            n_bytes += len(line)
            if len(batch) >= _BATCH_SAMPLES or n_bytes >= _BATCH_BYTES:
                yield batch
                batch, n_bytes = [], 0
        if batch:
            yield batch

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        with open_samples(self._path) as file:
            for line in file:
                yield offset, line
                offset += len(line)


_records: msgspec.json.Decoder[SampleRecord] = msgspec.json.Decoder(SampleRecord)
