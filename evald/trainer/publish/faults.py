"""What can be wrong with a snapshot that is to be published."""

from __future__ import annotations

from evald.errors import EvaldError


class PublishError(EvaldError):
    """The snapshot cannot be published as asked."""


class NoRoom(PublishError):
    """The staging root's budget, or its file system, has no room for the snapshot."""


class StillEvaluating(PublishError):
    """The step was published before and evald has not ended its point yet."""
