"""Samples go out as they finish, and come back when a point resumes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from evald.point import PointKey
from evald.results.follow import is_json, split_lines
from evald.results.modes import Modes

log = structlog.get_logger(__name__)

FLUSH_BYTES = 64 * 1024
FLUSH_INTERVAL_S = 1.0


#: what became of a sample.
Status = Literal["scored", "error", "grader_error", "timeout"]


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
    engine: str = ""
    weight_version: str = ""
    latency_s: float = 0.0


def point_samples_dir(results_dir: Path, key: PointKey) -> Path:
    """Return where the samples of a point lie: one ``<set>.jsonl`` for each eval set."""
    return results_dir / "samples" / key.run / f"{key.kind.value}_{key.step}.r{key.revision}"


def sample_file(results_dir: Path, key: PointKey, set_name: str) -> Path:
    """Return the journal of one eval set of a point."""
    return point_samples_dir(results_dir, key) / f"{set_name}.jsonl"


class SampleJournal:
    """The samples of one eval set of one point: appended as they finish, read back to resume.

    Lines are buffered: :meth:`append` writes them out once 64 KiB or a second have gathered, and
    whoever appends calls :meth:`flush` each second, so that no line waits for the next one.
    ``flush`` and ``close`` may run in a thread. A killed daemon loses what was not yet flushed
    (those samples are generated again), never what was.
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
        self._lock = threading.Lock()

    def load(self, digest: str, config: str) -> dict[tuple[str, int], SampleRecord]:
        """Return the scored samples of this digest and config, by question and sample number.

        They come without their texts (``response``, ``reference``, ``grader_reason``).

        Cuts a torn last line off; a line that cannot be read is passed by, its sample is
        generated again. Blocks for one read of the file; raises OSError.
        """
        try:
            lines = self._repair()
        except FileNotFoundError:
            return {}
        samples: dict[tuple[str, int], SampleRecord] = {}
        for number, line in enumerate(lines, start=1):
            try:
                record = _decoder.decode(line)
            except msgspec.DecodeError as fault:
                log.warning("sample_unreadable", path=str(self.path), line=number, error=str(fault))
                continue
            if (record.status, record.digest, record.config) == ("scored", digest, config):
                # a resume needs the numbers; all texts of a large set would fill the memory
                record.response = record.grader_reason = ""
                record.reference = None
                samples[record.question, record.sample] = record
        return samples

    def append(self, record: SampleRecord) -> None:
        """Take in one finished sample, scored or not; raises OSError when a due write fails."""
        line = _encode(record)
        with self._lock:
            now_s = time.monotonic()
            if not self._buffer:
                self._oldest_s = now_s
            self._buffer += line
            due = len(self._buffer) >= FLUSH_BYTES or now_s - self._oldest_s >= FLUSH_INTERVAL_S
        if due:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system; raises OSError, and then they stay buffered."""
        with self._lock:
            if self._buffer and self._descriptor < 0:
                self._open()
            while self._buffer:
                written = os.write(self._descriptor, self._buffer)
                del self._buffer[:written]

    def close(self) -> None:
        """Flush and close; raises OSError."""
        try:
            self.flush()
        finally:
            with self._lock:
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def _open(self) -> None:
        self._modes.make_dirs(self.path.parent)
        descriptor = self._modes.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            self._repair()  # a journal that nobody loaded may end torn, too
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _repair(self) -> list[bytes]:
        """Return the whole lines; cut off what a killed writer left behind them."""
        content = self.path.read_bytes()
        lines, torn = split_lines(content)
        if not torn and lines and not is_json(lines[-1]):
            torn = lines.pop() + b"\n"
        if torn:
            os.truncate(self.path, len(content) - len(torn))
            log.info("samples_torn_tail_cut", path=str(self.path), bytes=len(torn))
        return lines


_decoder: msgspec.json.Decoder[SampleRecord] = msgspec.json.Decoder(SampleRecord)


def _encode(record: SampleRecord) -> bytes:
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which a cut answer may end in
        readable = record.response.encode("utf-8", "backslashreplace").decode()
        return msgspec.json.encode(msgspec.structs.replace(record, response=readable)) + b"\n"
