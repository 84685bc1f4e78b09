"""The records of ``results.jsonl``: one JSON object a line, tagged by ``type``.

Every record carries ``schema``, ``seq`` (contiguous, goes on across restarts), ``time`` (seconds
since the epoch), ``type``, ``run``, ``step``, ``revision`` and ``record_id`` (stable: a replay
repeats it, so readers upsert). ``seq`` and ``time`` are filled in by the ledger.
"""

from __future__ import annotations

from typing import Any

import msgspec

from evald.point import Kind, Outcome, Timings

SCHEMA = 1
#: metrics ``eval/NAME`` of points themselves, beside ``eval/skipped_REASON``.
_OWN_METRICS = frozenset(
    {"step", "revision", "lag_steps", "duration_seconds", "export_time_seconds"}
)


def is_own_metric(name: str) -> bool:
    """Tell whether ``eval/{name}`` is evald's own, so that no eval set can be called so."""
    return name in _OWN_METRICS or name.startswith("skipped_")


class Record(msgspec.Struct, kw_only=True, tag_field="type", omit_defaults=False):
    """What all records share."""

    schema: int = SCHEMA
    seq: int = 0
    time: float = 0.0
    run: str
    step: int
    revision: int = 0
    record_id: str


class Accepted(Record, kw_only=True, tag="accepted"):
    """A point is known: what a reboot may lose is named here."""

    kind: Kind = Kind.STEP
    directory: str
    size_bytes: int
    fingerprint: str
    #: null while a large snapshot's content has not been read yet; the terminal record has it.
    digest: str | None = None
    final: bool = False
    owned: bool = True


class SetRecord(Record, kw_only=True, tag="set"):
    """One eval set of a point is done; it stands unless the terminal record says otherwise."""

    kind: Kind = Kind.STEP
    set: str
    counts: Counts
    seconds: float
    metrics: dict[str, float]


class Counts(msgspec.Struct, kw_only=True):
    """Samples by what became of them: each is in one of four counts, the others are shares of them.

    ``n_total = n_scored + n_error + n_grader_error + n_timeout``.
    """

    n_total: int = 0
    n_scored: int = 0
    #: of the scored ones: answers that hit the length limit.
    n_truncated: int = 0
    #: of the scored ones: graders that found no answer in the response.
    n_no_answer: int = 0
    #: of those without an answer: the model began to think and never came to an end.
    n_unfinished_thinking: int = 0
    #: the request failed, or the question could not be asked.
    n_error: int = 0
    #: of those: prompt and response do not fit into the model's context.
    n_too_long: int = 0
    #: the grader failed or ran out of time: not a wrong answer.
    n_grader_error: int = 0
    #: cut by a sample's, set's or point's deadline, or as stragglers.
    n_timeout: int = 0
    #: of those: not done when their set was ended; the others, ``n_total - n_cut``, are done.
    n_cut: int = 0
    #: of the scored ones: taken from the sample journal, where an earlier attempt had put them.
    n_resumed: int = 0
    #: of the scored ones: responses that were moved between engines of the snapshot.
    n_moved: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Add field by field."""
        names = self.__struct_fields__
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})


class PointRecord(Record, kw_only=True, tag="point"):
    """The terminal record of a point: exactly one for each (run, kind, step, revision)."""

    kind: Kind = Kind.STEP
    outcome: Outcome
    #: skip reason; empty unless ``outcome`` is "skipped".
    reason: str = ""
    #: one sentence for people.
    detail: str = ""
    counts: Counts = msgspec.field(default_factory=Counts)
    timings: Timings = msgspec.field(default_factory=Timings)
    #: engines that answered samples of the point.
    engines: list[str] = []
    weight_versions: list[str] = []
    #: digests of config, data, grader, chat template and snapshot; SGLang version; sampling. Of
    #: samples that were graded again also "regraded_from", the record id of those before.
    provenance: dict[str, Any] = {}
    #: flat and ready for a logger.
    metrics: dict[str, float] = {}
    #: sets that are not what earlier points of the run were measured with: their curves break.
    curve_breaks: list[str] = []
    #: record ids of set records that no longer stand.
    void_sets: list[str] = []
    directory: str = ""
    fingerprint: str = ""
    digest: str | None = None


class Alert(Record, kw_only=True, tag="alert"):
    """Something that a person should know."""

    name: str
    detail: str
    #: of an alert that an [[alert]] rule gave: what it is about, such as a metric or an engine.
    subject: str = ""
    #: the condition holds no longer; such a record follows the one that it is about.
    cleared: bool = False


class RunEnd(Record, kw_only=True, tag="run_end"):
    """The trainer said that the run is over, and every point of it has ended."""

    points: dict[str, int]


AnyRecord = Accepted | SetRecord | PointRecord | Alert | RunEnd

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


def decode(line: bytes) -> AnyRecord:
    """Decode one line of the ledger; raises ``msgspec.DecodeError`` on anything else."""
    try:
        return _decoder.decode(line)
    except RecursionError as error:
        raise msgspec.DecodeError(f"it is nested too deep: {error}") from error


class Newer(msgspec.Struct, kw_only=True):
    """A record of the same schema whose type this version does not know: readers pass it by."""

    schema: int
    seq: int
    type: str


_KNOWN = frozenset({"accepted", "set", "point", "alert", "run_end"})
_newer_decoder: msgspec.json.Decoder[Newer] = msgspec.json.Decoder(Newer)


def decode_any(line: bytes) -> AnyRecord | Newer:
    """Decode one line that a newer minor version may have written.

    Unknown fields are dropped. Raises ``msgspec.DecodeError``, and its subclass
    ``msgspec.ValidationError`` for what is JSON but no record of this ``schema``.
    """
    try:
        head = _newer_decoder.decode(line)
    except RecursionError as error:
        raise msgspec.DecodeError(f"it is nested too deep: {error}") from error
    if head.schema != SCHEMA:
        raise msgspec.ValidationError(f"it has schema {head.schema}, this evald reads {SCHEMA}")
    return decode(line) if head.type in _KNOWN else head
