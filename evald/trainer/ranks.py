"""The processes of a torch.distributed job, as the SDK's collective calls need them.

The exchanges run on a gloo group of their own, on the CPU: the training's NCCL communicators are
never touched, and a peer that died is an error here, not a hang there.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from evald.trainer.contract import Alone, PeerLost, Ranks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written


class Processes:
    """All ranks of the job, over torch.distributed, which must be initialised.

    Construction is collective. ``timeout_s``: how long one exchange waits for the slowest rank,
    which may be writing its share of a snapshot. ``near``: ``"host"`` takes the ranks on rank 0's
    host that have its /dev/shm for near, ``"all"`` every rank (a shared file system).

    An exchange that failed is the last one: it closes the group, so that every other rank hears of
    it at once, and all later ones fail, too. One thread at a time: see ``separate``.

    Raises ValueError without torch.distributed, and PeerLost when the ranks cannot connect.
    """

    def __init__(self, timeout_s: float = 600.0, near: Literal["host", "all"] = "host") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "cannot exchange with other processes: torch.distributed is not initialised; call"
                " init_process_group first, or use Alone() for a job of one process"
            )
        if timeout_s <= 0:
            raise ValueError(f"cannot wait {timeout_s:g} s for other ranks: give a time above 0")
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self._timeout_s = timeout_s
        self._near_rule = near
        self._busy = threading.Lock()
        self._lost: str | None = None
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLost(
                f"cannot connect the {self.size} processes of the job with gloo:"
                f" {cause_of(error)}; set GLOO_SOCKET_IFNAME to the network interface between the"
                " hosts, and see the logs of the other ranks"
            ) from error
        places = self.exchange(_place())
        self.near: tuple[int, ...] = tuple(
            rank for rank in range(self.size) if near == "all" or places[rank] == places[0]
        )

    def exchange(self, value: Any) -> list[Any]:
        """Gather one small picklable value of each rank, in rank order, on every rank.

        Raises PeerLost when a rank died (at once), does not come within ``timeout_s``, or when an
        earlier exchange failed; ValueError when another thread is in an exchange.
        """
        if not self._busy.acquire(blocking=False):
            raise ValueError(
                "cannot exchange in two threads at once: their values would be mixed up; give each"
                " thread ranks of its own, with separate()"
            )
        try:
            if self._lost is not None:
                raise PeerLost(f"{self._lost} (in an earlier exchange)")
            values: list[Any] = [None] * self.size
            try:
                dist.all_gather_object(values, value, group=self._group)
            except RuntimeError as error:
                self._lost = (
                    "cannot exchange with the job's other processes: one of them died, or did not"
                    f" come within {self._timeout_s:g} s ({cause_of(error)}); see their logs"
                )
                self._close_group()
                raise PeerLost(self._lost) from error
            return values
        finally:
            self._busy.release()

    def separate(self) -> Processes:
        """Return equal ranks with a group of their own, for another thread; collective."""
        return Processes(self._timeout_s, self._near_rule)

    def close(self) -> None:
        """Let go of the group's connections; every later exchange, also of other ranks, fails."""
        if self._lost is None:
            self._lost = "cannot exchange with other processes: this rank has closed the exchange"
            self._close_group()

    def _close_group(self) -> None:
        # ValueError, RuntimeError: the job has closed torch.distributed, and this group with it
        with contextlib.suppress(ValueError, RuntimeError):
            dist.destroy_process_group(self._group)
        # its sockets live as long as the object: the other ranks wait until they are closed
        self._group = None


def current_ranks(timeout_s: float = 600.0) -> Ranks:
    """Return the job's ranks: Alone unless torch.distributed runs with more than one process.

    Collective. ``timeout_s`` and errors as for ``Processes``.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Processes(timeout_s)
    return Alone()


def separate(ranks: Ranks) -> Ranks:
    """Return ranks for exchanges in another thread, beside those of ``ranks``; collective.

    Each thread's exchanges must come in the same order on every rank. Ranks that are not
    ``Processes`` (Alone, a test's) have no group and are returned as they are.
    """
    return ranks.separate() if isinstance(ranks, Processes) else ranks


def near_ranks(ranks: Ranks, directory: Path) -> tuple[int, ...]:
    """Return the ranks that can write into ``directory``, which rank 0 has just made.

    The name of ``directory`` must be new and random: each rank tries to leave a file in it and
    takes it away again, and one on another host, or in another container of this one, finds no
    such directory. Truer than ``ranks.near``. Rank 0 is always among them: what it cannot write
    is an error of the export. Collective; one exchange, so PeerLost as there.
    """
    return tuple(
        rank
        for rank, writes in enumerate(ranks.exchange(_can_write(directory, ranks.rank)))
        if writes or rank == 0
    )


def cause_of(error: BaseException) -> str:
    """Return the first sentence of a torch error without the place in torch's source."""
    text = " ".join(str(error).split())
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0].rstrip(".") or type(error).__name__


def _can_write(directory: Path, rank: int) -> bool:
    probe = directory / f".near-{rank}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError:
        return False
    return True


def _place() -> tuple[str, int | None]:
    """Return what ranks of one host and one /dev/shm have in common: two containers differ."""
    try:
        host = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        host = socket.gethostname()
    try:
        device = _SHARED_MEMORY.stat().st_dev
    except OSError:
        device = None
    return host, device
