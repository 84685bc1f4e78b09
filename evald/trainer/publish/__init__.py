"""Publish snapshots for evald from inside a training process: three functions, no daemon needed.

Standard library and xxhash only. Call them from one process of the job (rank 0). A snapshot is
written into a hidden directory of the same file system, renamed, and marked last, so evald never
sees half of one; a failure (also a full file system) leaves nothing behind.
"""

from evald.trainer.publish.draft import Draft, publish, sweep_leftovers
from evald.trainer.publish.faults import NoRoom, PublishError, StillEvaluating
from evald.trainer.publish.names import check_place
from evald.trainer.publish.words import end_run, skip, write_request

__all__ = [
    "Draft",
    "NoRoom",
    "PublishError",
    "StillEvaluating",
    "check_place",
    "end_run",
    "publish",
    "skip",
    "sweep_leftovers",
    "write_request",
]
