"""The alerts that evald records by itself, without any rule."""

from __future__ import annotations

import xxhash

from evald.results.records import Alert
from evald.text import one_line

#: their names.
BUILTIN = frozenset(
    {
        "best_not_kept",
        "best_not_known",
        "pin_memory_leak",
        "snapshot_closed",
        "snapshot_doubtful",
        "snapshot_misnamed",
        "snapshot_not_deletable",
        "snapshot_not_deleted",
        "staging_file_ignored",
    }
)


def builtin_alert(run: str, name: str, detail: str) -> Alert:
    """Make the record; the same sentence again is the same record."""
    # (a name in it may not be UTF-8)
    about = xxhash.xxh3_64_hexdigest(detail.encode(errors="backslashreplace"))
    record_id = f"{run}/alert/{name}/{about}"
    return Alert(run=run, step=0, record_id=record_id, name=name, detail=one_line(detail))
