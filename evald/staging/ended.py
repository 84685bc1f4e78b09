"""What has ended in a staging root, remembered in the root itself: ``.evald/ended.json``.

The ledger knows it, too, but a daemon that begins a new run, or a new results directory, on the
same root has another ledger: kept snapshots of the run before must not become points of the new.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from evald.point import PointKey
from evald.staging.files import open_file
from evald.staging.inside import own_folder
from evald.text import encode_json

log = structlog.get_logger(__name__)

_NAME = "ended.json"
#: a few hundred bytes for each kept snapshot; anything above is not evald's.
_MAX_BYTES = 16 << 20


class Ended(msgspec.Struct, frozen=True):
    """A snapshot whose point has ended."""

    fingerprint: str
    run: str
    step: int


class _File(msgspec.Struct):
    #: directory relative to the root -> what ended there.
    ended: dict[str, Ended] = {}


class EndedList:
    """The list of one owned root; its methods block. A list that cannot be read is empty."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / ".evald" / _NAME
        self._ended: dict[str, Ended] = {}
        #: what could not be written, told once.
        self._fault = ""

    def load(self) -> None:
        """Read what an earlier life has left."""
        try:
            with open_file(self._path) as file:
                content = file.read(_MAX_BYTES)
            self._ended = msgspec.json.decode(content, type=_File).ended
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("ended_list_not_read", path=str(self._path), error=str(error))

    def find(self, directory: Path, fingerprint: str) -> Ended | None:
        """Return what ended in ``directory``, if it is still as it was."""
        ended = self._ended.get(self._key(directory))
        return ended if ended is not None and ended.fingerprint == fingerprint else None

    def note(self, directory: Path, fingerprint: str, key: PointKey) -> None:
        """Remember that the snapshot in ``directory`` has ended, and forget what is gone."""
        for name in list(self._ended):
            if not os.path.isdir(self._root / name):  # noqa: PTH112 (Path.is_dir raises for some)
                del self._ended[name]
        self._ended[self._key(directory)] = Ended(fingerprint, key.run, key.step)
        self._write()

    def forget(self, directory: Path) -> None:
        """Forget what ended in ``directory``: its bytes are wanted once more."""
        if self._ended.pop(self._key(directory), None) is not None:
            self._write()

    def _key(self, directory: Path) -> str:
        return str(directory.relative_to(self._root))

    def _write(self) -> None:
        fresh = f".{_NAME}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with own_folder(self._root, ".evald") as folder:
                try:
                    with os.fdopen(os.open(fresh, flags, 0o644, dir_fd=folder), "wb") as file:
                        file.write(encode_json(_File(self._ended)) + b"\n")
                    os.rename(fresh, _NAME, src_dir_fd=folder, dst_dir_fd=folder)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(fresh, dir_fd=folder)
        except OSError as error:
            if str(error) != self._fault:  # a full disk stays full for long
                log.warning("ended_list_not_written", path=str(self._path), error=str(error))
            self._fault = str(error)
        else:
            self._fault = ""
