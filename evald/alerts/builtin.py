"""Names of the alerts that evald records by itself, without any rule."""

from __future__ import annotations

BUILTIN = frozenset(
    {
        "best_not_kept",
        "best_not_known",
        "snapshot_closed",
        "snapshot_doubtful",
        "snapshot_misnamed",
        "snapshot_not_deletable",
        "snapshot_not_deleted",
        "staging_file_ignored",
    }
)
