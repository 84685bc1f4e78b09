"""Ask the daemon by files alone: its notice board and its ledger, on a file system both see."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from evald.results.compressed import SUFFIX, places, unpack
from evald.results.follow import Follower
from evald.status.view import StatusView
from evald.trainer.publish.names import read_small

_LEDGER = "results.jsonl"
_BOARD = Path(".evald", "status.json")


class FileLink:
    """Reads ``status.json`` in the staging root and ``results.jsonl``; writes nothing.

    ``root``: the staging root, or a run's folder in it. ``results``: the ledger or its directory;
    None: where the status says that it is, which is right on one host.
    """

    def __init__(
        self, root: str | os.PathLike[str], results: str | os.PathLike[str] | None = None
    ) -> None:
        self._root = Path(root)
        self._ledger = None if results is None else _ledger(Path(results))
        self._told: Path | None = None
        self._follower: Follower | None = None
        #: the follower stands behind this ``seq``.
        self._read_to = 0
        #: how often another ledger has taken the place of the one that was read.
        self.restarts = 0

    @property
    def ledger(self) -> Path | None:
        """The ledger; None while nobody has said where it is."""
        return self._ledger or self._told

    @property
    def where(self) -> str:
        """Where a status is looked for."""
        return " or ".join(map(str, self._boards()))

    def status(self) -> StatusView | None:
        """Return the newest status that was written; None when there is none, or another's."""
        newest: StatusView | None = None
        for path in self._boards():
            try:
                status = msgspec.json.decode(read_small(path), type=StatusView)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # nobody has served here, or an evald that speaks another schema
            # (a root that evald has owned once has an old one)
            if newest is None or status.time > newest.time:
                newest = status
        if newest is not None:
            self._told = Path(newest.results)
        return newest

    def records(self, after: int) -> list[dict[str, Any]]:
        """Return the next records with ``seq`` above ``after``: some megabytes at a time.

        Who asks for what follows the newest record gets it without the rest being read again.
        """
        ledger = self.ledger
        if ledger is None:
            return []
        follower = self._follower
        if follower is None or follower.path != ledger or after < self._read_to:
            if follower is not None and follower.path != ledger:
                self.restarts += 1
            self.close()
            follower = self._follower = Follower(ledger, after=after)
        restarts = follower.restarts
        try:
            return self._next(follower, after)
        except OSError:
            self.close()  # what takes the place of a pipe or a directory is opened anew
            return []
        finally:
            self.restarts += follower.restarts - restarts

    def _next(self, follower: Follower, after: int) -> list[dict[str, Any]]:
        self._read_to = after
        for lines in follower.batches():
            found = [record for record in map(_record, lines) if record and record["seq"] > after]
            if found:
                self._read_to = found[-1]["seq"]
                return found
        return []

    def samples(self, record_id: str, set_name: str) -> list[dict[str, Any]] | None:
        """Return the samples of one eval set of the point with this terminal ``record_id``."""
        ledger, parts = self.ledger, record_id.split("/")
        if ledger is None or len(parts) != 4:  # noqa: PLR2004 - run, kind, step, revision
            return None
        run, kind, step, revision = parts
        if not all(map(_is_component, (*parts, set_name))):
            return None
        folder = ledger.parent / "samples" / run / f"{kind}_{step}.{revision}"
        try:
            content = _stored(folder / f"{set_name}.jsonl")
            if content is None:
                return None
            return [msgspec.json.decode(line) for line in content.splitlines() if line]
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def close(self) -> None:
        """Close the ledger; a later call opens it again."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def _boards(self) -> list[Path]:
        boards = [self._root / _BOARD, self._root.parent / _BOARD]
        if self._ledger is not None:  # where the daemon does not own the root
            boards.append(self._ledger.parent / _BOARD.name)
        return boards


def _ledger(path: Path) -> Path:
    return path if path.suffix == ".jsonl" or path.is_file() else path / _LEDGER


def _stored(journal: Path) -> bytes | None:
    """Read the samples of a journal, compressed or not; None: there are none. Raises OSError."""
    for path in places(journal):
        with suppress(FileNotFoundError):
            content = read_small(path)
            return unpack(content) if path.suffix == SUFFIX else content
    return None


def _record(line: bytes) -> dict[str, Any] | None:
    """Return a line as a record; None for what is none."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("seq"), int):
        return None
    return record


def _is_component(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in {".", ".."}
