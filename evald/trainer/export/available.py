"""How much host memory this process can still take: of the machine, and of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return what the kernel can give without swapping; None where it does not say.

    A container's limit counts, of version 1 and 2 of control groups. ``proc`` and ``groups``: where
    the kernel shows itself.
    """
    rooms = [_of_machine(proc / "meminfo"), *map(_of_group, _own_groups(proc, groups))]
    return min((room for room in rooms if room is not None), default=None)


def _of_machine(path: Path) -> int | None:
    kilobytes = _fields(path).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _own_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of the group that this process is in, and of those around it."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            root = groups / controllers
            own = root / path.strip("/")
            # in a container the name can be that of the host, which is not seen here
            while own != root:
                yield own
                own = own.parent
            yield root


def _of_group(folder: Path) -> int | None:
    for limit, used, total in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limits = [_number(line) for line in _lines(folder / limit)]
        usage = [_number(line) for line in _lines(folder / used)]
        if limits and usage and limits[0] is not None and usage[0] is not None:
            # cached files go as soon as memory is wanted (those in /dev/shm are not among them)
            fields = _fields(folder / "memory.stat")
            cached = sum(fields.get(f"{total}{name}_file", 0) for name in ("active", "inactive"))
            return max(limits[0] - usage[0] + cached, 0)
    return None


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    pairs = (line.split() for line in _lines(path))
    return {
        words[0]: number
        for words in pairs
        if len(words) > 1 and (number := _number(words[1])) is not None
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(text: str) -> int | None:
    """Read a number; ``max`` is none."""
    return int(text) if text.strip().isdigit() else None
