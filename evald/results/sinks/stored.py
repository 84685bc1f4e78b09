"""Where the samples behind a row are read: beside the ledger, or from its daemon."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import BinaryIO

from evald.errors import EvaldError
from evald.results.compressed import open_samples
from evald.results.locate import results_file
from evald.results.sample_files import samples_file
from evald.status.client import NoAnswer, NotRunning, Remote, fetch_samples, find_remote, is_url

#: opens the samples of a set of the point with a record id; raises FileNotFoundError, OSError.
OpenSamples = Callable[[str, str], AbstractContextManager[BinaryIO]]

#: a point's and those of the point before, each read more than once.
_KEPT = 2


def open_stored(results: str, *, token_file: str | None = None) -> OpenSamples:
    """Return what opens the samples of the points of ``results``, as ``evald tail`` names them."""
    if is_url(results):
        return _Remote(find_remote(results, token_file=token_file)).open
    directory = results_file(results).parent

    def open_local(record_id: str, name: str) -> BinaryIO:
        return open_samples(samples_file(directory, record_id, name))

    return open_local


class _Remote:
    """Asks a daemon for samples; keeps the last answers."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._answers: dict[tuple[str, str], bytes] = {}

    def open(self, record_id: str, name: str) -> BinaryIO:
        key = (record_id, name)
        if key not in self._answers:
            try:
                body = asyncio.run(fetch_samples(self._remote, record_id, name))
            except (NotRunning, NoAnswer):
                raise
            except EvaldError as error:  # the daemon has none
                raise FileNotFoundError(str(error)) from error
            while len(self._answers) >= _KEPT:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = body
        return io.BytesIO(self._answers[key])
