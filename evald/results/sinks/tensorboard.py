"""Rows as TensorBoard's event files, written with tensorboard alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from evald.errors import EvaldError
from evald.results.sinks.appended import AppendedFile
from evald.results.sinks.cursor import Cursor
from evald.results.sinks.names import tag
from evald.results.sinks.rows import Row
from evald.results.sinks.tables import SampleTables, Table

#: always the same: a life that is killed before its first cursor leaves no second one behind.
_FILE_NAME = "events.out.tfevents.evald"
_FILE_VERSION = "brain.Event:2"


class _AtStep:
    """What is drawn at one step."""

    def __init__(self) -> None:
        self.time = 0.0
        self.values: dict[str, float] = {}
        #: the row that ended the point; its tables are made when they are drawn.
        self.ended: Row | None = None


class TensorBoardSink:
    """Appends the rows of a run to an event file in ``DIRECTORY/RUN/``.

    TensorBoard takes steps that go back as a training job that went back: values of the same tag at
    that step and behind it are no longer shown. A point that comes late, or again as a new
    revision, is therefore followed by what stands behind it, written once more; a restart mark
    before them keeps other readers of event files from showing both.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        events: EventFormat,
        *,
        tables: SampleTables | None = None,
    ) -> None:
        self._format = events
        self._tables = tables
        self._file = AppendedFile(
            directory / run,
            _FILE_NAME,
            cursor_name=".evald-cursor",
        )
        self.target = str(directory / run)
        self._steps: dict[int, _AtStep] = {}
        #: tag -> the highest step that has it.
        self._highest: dict[str, int] = {}
        self._is_new = True
        #: the lowest step that came late since the last flush, and the newest row.
        self._late_from: int | None = None
        self._newest: Row | None = None

    def cursor(self) -> Cursor | None:
        """See Sink."""
        found = self._file.cursor()
        self._is_new = found is None
        return found

    def known(self, row: Row) -> None:
        """Note what is drawn already, so that it can be drawn again."""
        self._draw(row)

    def forget(self) -> None:
        """Begin an event file anew."""
        self._file.forget()
        self._is_new = True
        self._steps.clear()
        self._highest.clear()

    def take(self, row: Row) -> None:
        """See Sink."""
        late = self._draw(row)
        content = b"" if not self._is_new else self._format.head(row.time)
        self._is_new = False
        if late:
            before = self._late_from
            self._late_from = row.step if before is None else min(row.step, before)
        if self._late_from is None or row.step < self._late_from:
            tags = {tag(name): value for name, value in row.metrics.items()}
            content += self._format.event(row.time, row.step, tags, self._texts(row))
        self._newest = row
        self._file.add(row, content)

    def flush(self) -> None:
        """See Sink."""
        self._add_late()
        self._file.flush()

    def close(self) -> None:
        """See Sink."""
        self._add_late()
        self._file.close()

    def _add_late(self) -> None:
        """Write what stands behind late points once for all of them: a regrade is a thousand."""
        if self._late_from is None or self._newest is None:
            return
        content = self._format.restart(self._newest.time, self._late_from)
        for step in sorted(step for step in self._steps if step >= self._late_from):
            one = self._steps[step]
            content += self._format.event(one.time, step, one.values, self._texts(one.ended))
        self._file.add(self._newest, content)
        self._late_from = None

    def _draw(self, row: Row) -> bool:
        """Note a row; tell whether one of its tags stands at this step or behind it already."""
        here = self._steps.setdefault(row.step, _AtStep())
        here.time = row.time
        if row.ended:
            here.ended = row
        late = False
        for name, value in row.metrics.items():
            at = tag(name)
            here.values[at] = value
            highest = self._highest.get(at)
            late |= highest is not None and highest >= row.step
            self._highest[at] = row.step if highest is None else max(highest, row.step)
        return late

    def _texts(self, row: Row | None) -> dict[str, str]:
        if row is None or self._tables is None:
            return {}
        return {tag(name): _markdown(table) for name, table in self._tables.of(row).items()}


class EventFormat:
    """Events as bytes of an event file; raises EvaldError without tensorboard."""

    def __init__(self) -> None:
        try:
            # the extra is asked for only where it is used
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2  # noqa: PLC0415
            from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415
        except ImportError as error:
            raise EvaldError(
                f"cannot write event files: {error}; pip install 'evald[tensorboard]'"
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._tensors: Any = tensor_pb2
        self._writer: Any = RecordWriter

    def head(self, at: float) -> bytes:
        """Return what an event file begins with."""
        return self._bytes(self._events.Event(wall_time=at, file_version=_FILE_VERSION))

    def restart(self, at: float, step: int) -> bytes:
        """Return the mark that what was drawn from ``step`` on is no longer there."""
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        return self._bytes(self._events.Event(wall_time=at, step=step, session_log=log))

    def event(self, at: float, step: int, values: dict[str, float], texts: dict[str, str]) -> bytes:
        """Return all that is drawn at a step."""
        summary = self._summaries.Summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        for name, text in texts.items():
            plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
            tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
            summary.value.add(
                tag=f"{name}/text_summary",
                tensor=tensor,
                metadata=self._summaries.SummaryMetadata(plugin_data=plugin),
            )
        return self._bytes(self._events.Event(wall_time=at, step=step, summary=summary))

    def _bytes(self, event: Any) -> bytes:
        file = io.BytesIO()
        self._writer(file).write(event.SerializeToString())
        return file.getvalue()


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"|{'|'.join(_cell(cell) for cell in line)}|" for line in lines)


def _cell(value: object) -> str:
    """Return a value as one cell: nothing in it ends the cell, the line or the page."""
    text = "" if value is None else str(value)
    for character, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(character, written)
    return "<br>".join(text.splitlines())
