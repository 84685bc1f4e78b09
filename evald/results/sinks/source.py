"""The lines of a ledger, wherever it is: in a file, or behind a daemon's address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from evald.results.follow import Follower
from evald.results.locate import results_file
from evald.status.client import find_remote, is_url
from evald.status.remote_ledger import RemoteLedger


class Source(Protocol):
    """A ledger that is read from its first line; blocking, for one thread."""

    @property
    def name(self) -> str:
        """Say which ledger it is."""

    @property
    def restarts(self) -> int:
        """Count how often reading began again at the start of the ledger."""

    @property
    def fault(self) -> str:
        """Return one sentence while the ledger does not answer; else nothing."""

    def batches(self) -> Iterator[list[bytes]]:
        """Give the lines that are new, soon; raises OSError, or EvaldError for a refused token."""

    def close(self) -> None:
        """Let go of the ledger."""


class FileSource:
    """A ledger in files; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.fault = ""
        self._follower = Follower(path)

    @property
    def restarts(self) -> int:
        """See Source."""
        return self._follower.restarts

    def batches(self) -> Iterator[list[bytes]]:
        """See Source."""
        return self._follower.batches()

    def close(self) -> None:
        """See Source."""
        self._follower.close()


class RemoteSource:
    """The ledger of a daemon that is asked over HTTP."""

    def __init__(self, ledger: RemoteLedger) -> None:
        self.name = ledger.path
        self._ledger = ledger

    @property
    def restarts(self) -> int:
        """See Source."""
        return self._ledger.restarts

    @property
    def fault(self) -> str:
        """See Source."""
        return self._ledger.fault

    def batches(self) -> Iterator[list[bytes]]:
        """See Source."""
        restarts = self._ledger.restarts
        lines = self._ledger.read(wait_s=0)
        if self._ledger.restarts == restarts:
            yield lines  # else: of the ledger that is no longer there

    def close(self) -> None:
        """Nothing is held between two calls."""


def open_source(results: str, *, token_file: str | None = None) -> Source:
    """Return the ledger that ``evald tail RESULTS`` means.

    Raises ConfigError for a bad config, EvaldError for a URL or a token that cannot be used.
    """
    if is_url(results):
        return RemoteSource(RemoteLedger(find_remote(results, token_file=token_file)))
    return FileSource(results_file(results))
