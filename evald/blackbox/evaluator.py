"""The contract of ``[blackbox] class = "module:Class"``: a directory in, results out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol


class EvalSkip(Exception):
    """The point has no score for a reason that is known: it ends ``skipped_{reason}``.

    ``reason`` becomes part of a metric's name: a word such as ``judge_down``. ``detail`` is one
    sentence for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class Point:
    """The point that is measured."""

    run: str
    step: int
    revision: int
    #: "step" or "baseline".
    kind: str
    record_id: str
    #: hash over names, sizes and content of the snapshot, in hex.
    digest: str
    #: an empty directory for whatever the evaluator wants to keep; evald deletes it some points
    #: later.
    output_dir: Path
    #: seconds until evald kills this process.
    timeout_s: float


@dataclasses.dataclass
class SetResults:
    """One eval set.

    ``metrics``: finite numbers. ``score`` is the headline, the curve ``eval/{set}``;
    ``pass@{k}``, ``truncated_ratio`` and ``none_reward_ratio`` become ``eval/{set}-...``, every
    other name ``eval/{set}/{name}``.
    """

    metrics: dict[str, float]
    #: ``n_total``, ``n_scored``, ``n_truncated``, ``n_no_answer``, ``n_error``,
    #: ``n_grader_error``, ``n_timeout``; empty: counted from ``samples``.
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    #: dicts with ``question`` (an id), ``sample``, ``score``, ``response``, ``reference``,
    #: ``truncated``, ... and whatever else is worth keeping: evald writes them to ``samples/``.
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    #: what the set took; None: the whole evaluation's time.
    seconds: float | None = None


@dataclasses.dataclass
class Results:
    """Everything that was found out about a checkpoint, by the name of the eval set."""

    sets: dict[str, SetResults]
    #: that answered, for the record.
    engines: list[str] = dataclasses.field(default_factory=list)
    #: versions that the engines read back.
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    #: versions of software, digests of data, ... for the record.
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)


class CheckpointEvaluator(Protocol):
    """A user's class; one object lives as long as its process and sees one point after another.

    It may have a method ``dispose()``, sync or async: called when the process is asked to end.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the table [blackbox.config]; models and servers may be started here."""

    async def evaluate_checkpoint(self, directory: Path, point: Point, /) -> Results:
        """Evaluate the snapshot in ``directory``.

        Raise EvalSkip for a reason that is known; any other exception is a crash of this point,
        and the next one gets a fresh process.
        """
