"""Bring finished directories, and words, from a training host to the eval node's root.

A directory travels under a hidden name that is the same for the same bytes: a push that was cut
off goes on where it stopped. Every file is hashed at the far end before the directory gets its
name, and the marker comes last.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from evald.errors import EvaldError
from evald.status.view import StatusView
from evald.trainer.contract import Link, NoSpace, PushError
from evald.trainer.push.copy import CopyFar
from evald.trainer.push.far import FarEnd, read_board, wait_until_ended
from evald.trainer.push.manifest import MarkerContent, read_marker
from evald.trainer.push.plan import Parcel, by_name, check_name, pack, shared_root
from evald.trainer.push.rsync import RsyncFar

log = structlog.get_logger(__name__)

#: for cleaning up when the deadline of the push itself is over.
_CLEAN_UP_S = 60.0
#: for a look at the daemon's status.
_LOOK_S = 60.0
_FAR = re.compile(
    r"(?P<user>[^\s/:@\[\]]+@)?(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[^\s/:@\[\]]+))"
    r":(?P<root>.*)"
)


class PushCarrier:
    """A ``Carrier``: copies from below ``root`` to a far end, where names stay as they are.

    ``timeout_s`` bounds a whole call. A directory that is there already, with equal bytes and for
    the same point, is left alone. Else it gets the new marker (equal bytes of another run or step)
    or is replaced, once evald has ended its point, for which a call waits at most
    ``busy_timeout_s``: ``link`` tells (None: the ``status.json`` at the far end).
    """

    def __init__(
        self,
        far: FarEnd,
        *,
        root: Path,
        marker: str = ".complete",
        timeout_s: float = 1800.0,
        busy_timeout_s: float = 60.0,
        link: Link | None = None,
    ) -> None:
        self._far = far
        self._root = root.absolute()
        self._marker = marker
        self._timeout_s = timeout_s
        self._busy_timeout_s = busy_timeout_s
        self._link = link

    def carry(self, path: Path) -> None:
        """Copy a published directory, or a word, and check it there; see ``Carrier``.

        Raises PushError: its ``reason`` is ``no_space`` where the far end is full, ``busy`` where
        other bytes of the step are still being measured. ValueError for a path outside the root.
        """
        name, deadline = self._name(path), time.monotonic() + self._timeout_s
        if path.is_dir():
            self._deliver(pack(path, name, marker=self._marker, deadline=deadline), deadline)
            return
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PushError(f"cannot push {path}: {error.strerror}") from error
        self._far.write(name, content, deadline)

    def deliver(self, parcel: Parcel) -> bool:
        """Copy a directory and check it there; False: it was there already.

        Raises as :meth:`carry` does.
        """
        return self._deliver(parcel, time.monotonic() + self._timeout_s)

    def pattern(self) -> str | None:
        """Return the daemon's pattern, as its status at the far end shows it; raises PushError."""
        status = read_board(self._far, time.monotonic() + min(self._timeout_s, _LOOK_S))
        return None if status is None or status.staging is None else status.staging.pattern or None

    def _deliver(self, parcel: Parcel, deadline: float) -> bool:
        try:
            state = self._far.prepare(parcel, deadline, replace=False)
            if state != "absent":
                is_equal = not self._far.differences(parcel, "final", deadline)
                if state == "marked" and not self._may_swap(parcel, deadline, is_equal=is_equal):
                    return False
                if is_equal:  # of another point, or cut off between the rename and the marker
                    marker = f"{parcel.name}/{parcel.marker}"
                    self._far.write(marker, parcel.content, deadline)
                    return True
                self._far.prepare(parcel, deadline, replace=True)
            self._far.send(parcel, parcel.files, deadline, again=False)
            self._check(parcel, deadline)
            self._far.publish(parcel, deadline)
        except NoSpace:
            self._far.release()
            self._give_back(parcel.name)
            raise
        finally:
            self._far.release()
        return True

    def _may_swap(self, parcel: Parcel, deadline: float, *, is_equal: bool) -> bool:
        """Wait until what is there may get another marker; False: it is this point already."""
        there = read_marker(self._far.read([f"{parcel.name}/{parcel.marker}"], deadline))
        if is_equal and there == parcel.said:
            return False
        self._wait_until_ended(parcel, there, deadline)
        return True

    def discard(self, path: Path) -> None:
        """Remove what is left at the far end of a push that is not going to be repeated.

        Raises PushError.
        """
        self._far.discard(self._name(path), time.monotonic() + min(self._timeout_s, _CLEAN_UP_S))

    def _name(self, path: Path) -> str:
        if not path.absolute().is_relative_to(self._root):
            raise ValueError(f"cannot push {path}: it lies outside {self._root}")
        return check_name(path.absolute().relative_to(self._root).as_posix())

    def _check(self, parcel: Parcel, deadline: float) -> None:
        """Compare hashes; what differs is sent once more, as a whole."""
        bad = self._far.differences(parcel, "temporary", deadline)
        if not bad:
            return
        log.warning("push_differs", to=str(self._far), name=parcel.name, files=sorted(bad)[:10])
        self._far.send(parcel, by_name(parcel.files, bad), deadline, again=True)
        bad = self._far.differences(parcel, "temporary", deadline)
        if bad:
            some = ", ".join(sorted(bad)[:3])
            raise PushError(
                f"cannot push {parcel.name} to {self._far}: {some} arrived with other bytes twice; "
                "look at the memory and the disks of both hosts, and whether something still "
                f"writes into {parcel.source}"
            )

    def _wait_until_ended(self, parcel: Parcel, there: MarkerContent, deadline: float) -> None:
        runs = {there.run, parcel.said.run}
        left_s = max(deadline - time.monotonic(), 0.0)
        link = self._link

        def ask() -> StatusView | None:
            status = None if link is None else link.status()
            # a link that is down must not make way for a swap under a running point
            return status or read_board(self._far, deadline)

        wait_until_ended(
            ask,
            runs=None if None in runs else runs,
            step=parcel.step,
            timeout_s=min(self._busy_timeout_s, left_s),
        )

    def _give_back(self, name: str) -> None:
        """Free what a push that found no room has taken."""
        try:
            self._far.discard(name, time.monotonic() + _CLEAN_UP_S)
        except PushError as error:
            log.warning("push_left_something", to=str(self._far), name=name, detail=str(error))


def carrier_for(
    destination: str,
    *,
    root: Path,
    marker: str = ".complete",
    streams: int = 4,
    timeout_s: float = 1800.0,
    busy_timeout_s: float = 60.0,
    ssh: Sequence[str] = ("ssh",),
    max_bytes_s: int | None = None,
    link: Link | None = None,
) -> PushCarrier:
    """Return what carries from ``root`` to ``destination``.

    ``destination``: ``host:/path`` or ``user@host:/path`` (rsync over ssh, ``streams`` at once), or
    a path of a file system that both hosts see (plain copies). ``ssh``: program and further words;
    ``max_bytes_s`` bounds what all streams of rsync take of the network.

    Raises ValueError for a destination or a number that cannot be used, EvaldError where rsync or
    ssh is missing.
    """
    if streams < 1 or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"cannot push with streams={streams}, timeout_s={timeout_s:g}: both must be numbers "
            "above 0"
        )
    if max_bytes_s is not None and max_bytes_s < 1:
        raise ValueError(f"cannot push {max_bytes_s} bytes a second: give a number above 0")
    if not ssh:
        raise ValueError('cannot push: the words of ssh are empty; give them as "ssh -p 2222"')
    if ".." in Path(marker).parts or Path(marker).is_absolute():
        raise ValueError(f"cannot push with marker {marker!r}: it must lie inside the snapshot")
    return PushCarrier(
        _far_end(destination, streams=streams, ssh=ssh, max_bytes_s=max_bytes_s),
        root=root,
        marker=marker,
        timeout_s=timeout_s,
        busy_timeout_s=busy_timeout_s,
        link=link,
    )


def _far_end(
    destination: str, *, streams: int, ssh: Sequence[str], max_bytes_s: int | None
) -> FarEnd:
    wrong = ValueError(
        f"cannot push to {destination!r}: write host:/path, user@host:/path, or the path of a file "
        "system that both hosts see"
    )
    match = _FAR.fullmatch(destination)
    if match is None or "\0" in destination:
        if not destination or "\0" in destination or ":" in destination.partition("/")[0]:
            raise wrong
        if max_bytes_s is not None:
            raise ValueError(f"cannot bound the copy to {destination}: max_bytes_s is for rsync")
        return CopyFar(shared_root(destination), streams=streams)
    user, host, far_root = match["user"] or "", match["six"] or match["host"], match["root"]
    # "scheme://" is a URL and "host::" a module of an rsync daemon
    if not far_root.startswith("/") or far_root.startswith("//") or f"{user}{host}"[0] == "-":
        raise wrong
    for program in ("rsync", ssh[0]):
        if shutil.which(program) is None:
            raise EvaldError(
                f"cannot push to {destination}: there is no {program} on this machine; install it"
            )
    return RsyncFar(
        user + host,
        far_root.rstrip("/") or "/",
        streams=streams,
        ssh=ssh,
        max_bytes_s=max_bytes_s,
    )
