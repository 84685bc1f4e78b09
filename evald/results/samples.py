"""Samples go out as they finish, and come back when a point resumes."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import structlog

from evald.point import PointKey
from evald.results.follow import is_json
from evald.results.modes import Modes

log = structlog.get_logger(__name__)

FLUSH_BYTES = 64 * 1024
FLUSH_INTERVAL_S = 1.0
#: most that ``hold`` keeps in memory: a disk that is slower than the answers must not fill it.
_HELD_BYTES = 16 << 20
#: the end of a journal is looked at in steps of this size, backwards.
_TAIL_BYTES = 1 << 16


#: what became of a sample.
Status = Literal["scored", "error", "grader_error", "timeout"]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine gave of a response that was moved between engines."""

    engine: str
    weight_version: str
    tokens: int


class SampleRecord(msgspec.Struct, kw_only=True):
    """One sample: what was asked, what came back, what it is worth."""

    #: stable id of the question within its set.
    question: str
    #: 0 ... n_samples_per_eval_prompt - 1.
    sample: int
    #: digest of the snapshot.
    digest: str
    #: digest of everything else that the score depends on.
    config: str
    status: Status
    #: it was not asked: prompt and response do not fit into the model's context.
    too_long: bool = False
    score: float | None = None
    no_answer: bool = False
    truncated: bool = False
    #: "stop" or "length"; empty when there is no answer.
    finish_reason: str = ""
    response: str = ""
    #: the response ends in repetition.
    repeats: bool = False
    n_tokens: int = 0
    reference: Any = None
    grader_reason: str = ""
    #: the answer as it was compared: samples with equal answers vote together in maj@k.
    answer: str = ""
    #: the response did not end its thinking, so that there is no answer.
    unfinished_thinking: bool = False
    #: the prompt ended inside an open thought: grading the response again needs to know.
    in_thought: bool = False
    #: further numbers of its kind of eval, by name ("nll", "acc_norm", ...).
    values: dict[str, float] = {}
    #: the conversation behind the response, where its kind of eval has one.
    messages: list[Any] | None = None
    #: the score came with the answer, not from the set's grader.
    self_graded: bool = False
    engine: str = ""
    weight_version: str = ""
    #: of a response that was moved: what each engine has given of it, in order; the last one is
    #: ``engine``.
    pieces: tuple[Piece, ...] = ()
    latency_s: float = 0.0


class Scored(msgspec.Struct, frozen=True, gc=False):
    """What a resume needs of a scored sample: a large set's texts would fill the memory."""

    score: float | None
    truncated: bool
    no_answer: bool
    unfinished_thinking: bool
    engine: str
    weight_version: str
    pieces: tuple[Piece, ...] = ()


def point_samples_dir(results_dir: Path, key: PointKey) -> Path:
    """Return where the samples of a point lie: one ``<set>.jsonl`` for each eval set."""
    return results_dir / "samples" / key.run / f"{key.kind.value}_{key.step}.r{key.revision}"


def sample_file(results_dir: Path, key: PointKey, set_name: str) -> Path:
    """Return the journal of one eval set of a point."""
    return point_samples_dir(results_dir, key) / f"{set_name}.jsonl"


class SampleJournal:
    """The samples of one eval set of one point: appended as they finish, read back to resume.

    Lines are buffered: :meth:`append` writes them out once 64 KiB or a second have gathered;
    :meth:`hold` leaves that to its caller, who calls :meth:`flush` each second, in a thread: a disk
    may take its time. A killed daemon loses what was not yet flushed (those samples are generated
    again), never what was.
    """

    def __init__(
        self,
        directory: Path,
        set_name: str,
        *,
        file_mode: int = 0o644,
        modes: Modes | None = None,
    ) -> None:
        """``modes`` (from the config) rules directories and the group too; it wins."""
        self.path = directory / f"{set_name}.jsonl"
        self._modes = modes or Modes(file_mode=file_mode)
        self._buffer = bytearray()
        self._oldest_s = 0.0
        self._descriptor = -1
        #: of the buffer, for a moment; and of the file, for as long as it takes.
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    def load(self, digest: str, config: str) -> dict[tuple[str, int], Scored]:
        """Return the scored samples of this digest and config, by question and sample number.

        Cuts a torn last line off; a line that cannot be read is passed by, its sample is
        generated again. Blocks for one read of the file; raises OSError.
        """
        samples: dict[tuple[str, int], Scored] = {}
        try:
            self._repair()
            file = self.path.open("rb")
        except FileNotFoundError:
            return samples
        with file:
            for number, line in enumerate(file, start=1):
                try:
                    one = line_decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as fault:
                    log.warning(
                        "sample_unreadable", path=str(self.path), line=number, error=str(fault)
                    )
                    continue
                if (one.status, one.digest, one.config) == ("scored", digest, config):
                    # one text for all that have it, not one for each
                    samples[sys.intern(one.question), one.sample] = Scored(
                        one.score,
                        one.truncated,
                        one.no_answer,
                        one.unfinished_thinking,
                        sys.intern(one.engine),
                        sys.intern(one.weight_version),
                        one.pieces,
                    )
        return samples

    def append(self, record: SampleRecord) -> None:
        """Take in one finished sample, scored or not; raises OSError when a due write fails."""
        size = self._take_in(record)
        if size >= FLUSH_BYTES or time.monotonic() - self._oldest_s >= FLUSH_INTERVAL_S:
            self.flush()

    def hold(self, record: SampleRecord) -> None:
        """Take in one finished sample until the next ``flush``.

        Writes, and raises OSError when that fails, only where far too much waits.
        """
        if self._take_in(record) >= _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system; raises OSError, and then they stay buffered."""
        with self._writing:
            with self._lock:
                lines, self._buffer = self._buffer, bytearray()
            try:
                if lines and self._descriptor < 0:
                    self._open()
                while lines:
                    written = os.write(self._descriptor, lines)
                    del lines[:written]
            finally:
                if lines:
                    with self._lock:
                        self._buffer[:0] = lines

    def close(self) -> None:
        """Flush and close; raises OSError."""
        try:
            self.flush()
        finally:
            with self._writing:
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def _take_in(self, record: SampleRecord) -> int:
        """Buffer the record's line; how many bytes wait."""
        line = _encode(record)
        with self._lock:
            if not self._buffer:
                self._oldest_s = time.monotonic()
            self._buffer += line
            return len(self._buffer)

    def _open(self) -> None:
        self._modes.make_dirs(self.path.parent)
        descriptor = self._modes.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            self._repair()  # a journal that nobody loaded may end torn, too
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _repair(self) -> None:
        """Cut off what a killed writer left behind the last whole line. Reads only the end."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = _after_newline(file, size)
            if end == size > 0:
                start = _after_newline(file, size - 1)
                file.seek(start)
                if not is_json(file.read(size - start)):
                    end = start
        if end < size:
            os.truncate(self.path, end)
            log.info("samples_torn_tail_cut", path=str(self.path), bytes=size - end)


def _after_newline(file: BinaryIO, before: int) -> int:
    """Return the offset behind the last newline that stands before an offset; 0 without one."""
    end = before
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class SampleLine(msgspec.Struct):
    """The part of a ``SampleRecord`` that says whether it counts, and for what."""

    question: str
    sample: int
    digest: str
    config: str
    status: Status
    score: float | None = None
    truncated: bool = False
    no_answer: bool = False
    unfinished_thinking: bool = False
    engine: str = ""
    weight_version: str = ""
    pieces: tuple[Piece, ...] = ()


line_decoder: msgspec.json.Decoder[SampleLine] = msgspec.json.Decoder(SampleLine)


def _encode(record: SampleRecord) -> bytes:
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which a cut answer may end in
        readable = record.response.encode("utf-8", "backslashreplace").decode()
        return msgspec.json.encode(msgspec.structs.replace(record, response=readable)) + b"\n"
