"""Push over ssh: rsync carries the bytes, small scripts do the rest."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from evald.trainer.contract import NoSpace, PushError
from evald.trainer.publish.budget import over_budget
from evald.trainer.push import scripts
from evald.trainer.push.far import (
    State,
    Where,
    check_room,
    late,
    linked,
    no_root,
    read_board,
    taken,
)
from evald.trainer.push.hold import Holder
from evald.trainer.push.manifest import SourceFile
from evald.trainer.push.plan import Parcel, by_name, share_out, temporary_prefix
from evald.trainer.push.process import Command, Done, failed, run_all

#: of each ssh connection; what the caller's own ``ssh`` words say wins.
_SSH_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
}
_IO_TIMEOUT_S = 60
#: a disk reads and hashes at least that fast while nothing is heard of it.
_SLOWEST_BYTES_S = 50 << 20
_FULL = ("No space left on device", "Disk quota exceeded")
_DF = re.compile(r"\s(\d+)\s+(\d+)\s+(-?\d+)\s+\d+%")
_SSH_FAILED = 255


class RsyncFar:
    """A root on another host. ``host``: as ssh takes it, ``name`` or ``user@name``.

    ``ssh``: the program and further words for it. ``max_bytes_s`` bounds the bytes each second of
    all ``streams`` together. The far side needs rsync, and a POSIX shell for the user.
    """

    def __init__(
        self,
        host: str,
        root: str,
        *,
        streams: int,
        ssh: Sequence[str] = ("ssh",),
        max_bytes_s: int | None = None,
    ) -> None:
        self._host = host
        self._root = root
        self._streams = streams
        options = [word for key, value in _SSH_OPTIONS.items() for word in ("-o", f"{key}={value}")]
        self._ssh = [*ssh, *options]
        self._max_bytes_s = max_bytes_s
        #: holds the room of the push under way.
        self._holder: Holder | None = None

    def __str__(self) -> str:
        """Show it as it was given."""
        return f"{self._host}:{self._root}"

    def read(self, names: Sequence[str], deadline: float) -> bytes:
        """Return the first of some small files, named from the root; empty where there is none."""
        said = self._script(scripts.READ, names, deadline)
        return said.partition(scripts.CONTENT)[2].encode(errors="surrogateescape")

    def prepare(self, parcel: Parcel, deadline: float, *, replace: bool) -> State:
        """Make the hidden directory, or tell what is there already; see ``FarEnd``."""
        words = [parcel.name, parcel.marker, parcel.temporary, temporary_prefix(parcel.name)]
        said = self._script(scripts.PREPARE, [*words, "yes" if replace else "no"], deadline)
        # a login shell may say something of its own first
        *lines, state = said.split("\n")[:-1] or [""]
        match state:
            case "unmarked" | "marked":
                return state
            case "absent":
                self._check_room(parcel, lines)
                self._reserve(parcel, deadline)
                return state
        raise PushError(f"cannot push to {self}: its shell answers {said[-200:]!r}")

    def _check_room(self, parcel: Parcel, lines: list[str]) -> None:
        """Look into the answers of df and du; unusual ones tell nothing: then the transfer does."""
        room = _DF.search(" ".join(lines[-2:-1]))
        used = re.match(r"\d+", lines[-1]) if lines else None
        if room is not None and used is not None:
            free_bytes, there_bytes = int(room[3]) << 10, int(used[0]) << 10
            check_room(parcel, self, there_bytes=there_bytes, free_bytes=free_bytes)

    def _reserve(self, parcel: Parcel, deadline: float) -> None:
        """Reserve room in the staging root's budget, where it has one; see ``publish/budget.py``.

        Where it cannot be counted (no flock there, another user's root) the daemon judges later.
        """
        self.release()
        board = read_board(self, deadline)
        staging = None if board is None else board.staging
        if staging is None or staging.max_bytes is None:
            return
        final = "yes" if parcel.said.final else "no"
        words = [parcel.temporary, str(parcel.size_bytes), f"push.{os.urandom(8).hex()}"]
        self._holder = Holder(
            self._words(scripts.RESERVE, [*words, str(staging.max_bytes), final]),
            (scripts.PROMISED, scripts.FULL, scripts.LOCKED, scripts.UNKNOWN),
            deadline,
        )
        match self._holder.said.split():
            case [scripts.FULL, used]:
                refusal = over_budget(
                    parcel.size_bytes, int(used), staging.max_bytes, final=parcel.said.final
                )
                raise NoSpace(f"cannot push {parcel.name} to {self}: {refusal}")
            case [scripts.LOCKED]:
                raise PushError(
                    f"cannot push {parcel.name} to {self}: another process counts what lies there, "
                    "and does not come to an end; look for it on that host"
                )

    def send(
        self, parcel: Parcel, files: Sequence[SourceFile], deadline: float, *, again: bool
    ) -> None:
        """Copy files into the hidden directory, in several streams at once."""
        # What an interrupted push has left is a beginning of the same bytes: it is added to. A file
        # that was found to differ is sent as a whole.
        how = ["--inplace", "--whole-file", "--ignore-times"] if again else ["--append-verify"]
        shares = share_out(files, self._streams)
        if self._max_bytes_s is not None:
            how.append(f"--bwlimit={max(self._max_bytes_s // len(shares) // 1024, 1)}")
        # Not the source's modes (a trainer may write 0600), and no bits taken away: under a default
        # ACL the group bits are its mask. Publishing adds what is missing.
        how += ["--times", "--omit-dir-times", "--no-perms", "--chmod=ugo=rwX"]
        self._rsync(how, parcel, shares, parcel.temporary, deadline)

    def differences(self, parcel: Parcel, where: Where, deadline: float) -> set[str]:
        """Let rsync hash both sides, and return the names that it would send."""
        target = parcel.temporary if where == "temporary" else parcel.name
        shares = share_out(parcel.files, self._streams)
        how = ["--checksum", "--dry-run", "--out-format=%i %n", "-8"]
        done = self._rsync(how, parcel, shares, target, deadline)
        names = set()
        for line in "".join(one.out for one in done).splitlines():
            change, _, name = line.partition(" ")
            if change[1:2] != "d":  # a folder that lacks only because its files do
                names.add(name)
        return {file.name for file in by_name(parcel.files, names)} if names else set()

    def publish(self, parcel: Parcel, deadline: float) -> None:
        """Open the hidden directory up, rename it, write the marker."""
        self._write(
            scripts.PUBLISH,
            f"{parcel.name}/{parcel.marker}",
            parcel.content,
            [parcel.name, parcel.temporary],
            deadline,
        )

    def write(self, name: str, content: bytes, deadline: float) -> None:
        """Write a small file below the root: nobody ever sees half of it."""
        self._write(scripts.WRITE, name, content, [], deadline)

    def discard(self, name: str, deadline: float) -> None:
        """Remove the hidden directories of a name."""
        self._script(scripts.DISCARD, [temporary_prefix(name)], deadline)

    def release(self) -> None:
        """End the promise of room; who calls rsync writes the same bytes into the same places."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.end()

    def _write(
        self, script: str, name: str, content: bytes, more: Sequence[str], deadline: float
    ) -> None:
        hidden = f"{temporary_prefix(name)}{os.urandom(8).hex()}"
        self._script(script, [name, hidden, str(len(content)), *more], deadline, content)

    def _script(
        self, script: str, arguments: Sequence[str], deadline: float, stdin: bytes = b""
    ) -> str:
        command = Command(self._words(script, arguments), stdin)
        return self._run([command], deadline)[0].out

    def _words(self, script: str, arguments: Sequence[str]) -> list[str]:
        words = ["sh", "-c", script, "sh", self._root, *arguments]
        return [*self._ssh, self._host, shlex.join(words)]

    def _rsync(
        self,
        how: Sequence[str],
        parcel: Parcel,
        shares: Sequence[Sequence[SourceFile]],
        target: str,
        deadline: float,
    ) -> list[Done]:
        largest = max(file.size_bytes for share in shares for file in share)
        user, at, host = self._host.rpartition("@")
        host = f"[{host}]" if ":" in host else host
        words = [
            "rsync",
            f"--rsh={shlex.join(self._ssh)}",
            f"--timeout={_IO_TIMEOUT_S + largest // _SLOWEST_BYTES_S}",
            "-s",
            "--copy-links",
            "--files-from=-",
            "--from0",
            *how,
            f"{parcel.source}/",
            f"{user}{at}{host}:{self._root}/{target}/",
        ]
        return self._run(
            [
                # "./": rsync takes a line that begins with # or ; for a comment
                Command(words, b"".join(b"./" + os.fsencode(file.name) + b"\0" for file in share))
                for share in shares
            ],
            deadline,
        )

    def _run(self, commands: Sequence[Command], deadline: float) -> list[Done]:
        try:
            done = run_all(commands, deadline)
        except TimeoutError as error:
            raise late(self) from error
        except OSError as error:
            raise PushError(f"cannot push to {self}: {error.strerror or error}") from error
        if (bad := failed(done)) is not None:
            raise self._fault(bad)
        return done

    def _fault(self, bad: Done) -> PushError | NoSpace:
        lines = [line.strip() for line in bad.err.splitlines() if line.strip()]
        full = next((line for line in lines if any(word in line for word in _FULL)), None)
        if full is not None:
            return NoSpace(f"cannot push to {self}: {full}")
        # rsync's first lines tell the cause, its last ones what became of it
        said = "; ".join(dict.fromkeys(lines[:2])) or f"exit code {bad.code}"
        match bad.code:
            case scripts.NO_ROOT:
                return no_root(self)
            case scripts.TAKEN:
                return taken(self)
            case scripts.LINKED:
                return linked(self, "the hidden directory of this push")
            case scripts.CUT_SHORT:
                said = "the connection broke off"
            case code if code == _SSH_FAILED:
                said = f"ssh failed: {said}"
        return PushError(f"cannot push to {self}: {said}")
