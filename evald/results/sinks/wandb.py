"""Rows in Weights & Biases: a run of their own, one commit for each row."""

from __future__ import annotations

import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from evald.errors import EvaldError
from evald.results.sinks.contract import SinkFault
from evald.results.sinks.cursor import Cursor, Mark
from evald.results.sinks.names import tag
from evald.results.sinks.place import Place
from evald.results.sinks.rows import Row
from evald.results.sinks.tables import SampleTables
from evald.results.sinks.wandb_values import Newest, define_metrics, values

#: the longest that the end of a run waits for uploads; what is left is on the disk.
FINISH_S = 120.0
#: the longest that W&B may take to write an offline run that is finished.
WRITTEN_S = 10.0
_LOOK_S = 0.1
_MAX_ID = 128

#: ``wandb`` itself, or what stands for it in a test.
Module = Any


class WandbOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What ``wandb.init`` gets; None: as W&B's own environment variables and settings say."""

    project: str | None = None
    entity: str | None = None
    #: default: the run id of evald, so that a trainer with ``group=RUN`` is beside it.
    group: str | None = None
    #: default: ``RUN-eval``.
    id: str | None = None
    name: str | None = None
    #: "online" or "offline".
    mode: str | None = None


class WandbSink:
    """Logs the rows of a run into a W&B run of their own, in the trainer's group.

    Every row is one commit, at its own ``eval/step``. W&B's own step counts commits and means
    nothing. History cannot be changed: a new revision is logged again with ``eval/revision``. The
    summary has the values of the highest step, whatever comes late.

    Online, the W&B run goes on (``resume="allow"``). A row is one commit, so that W&B's own counter
    tells how many rows have arrived since the cursor was stored. Offline, W&B cannot go on with a
    run: every life that has something new writes all of it into a new offline directory, with the
    same id; syncing it replaces what was synced before. W&B keeps the end of an offline run in
    memory until it is closed.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        options: WandbOptions,
        *,
        module: Module,
        tables: SampleTables | None = None,
    ) -> None:
        """``directory``: where W&B makes its ``wandb/``."""
        self._wandb = module
        self._directory = directory
        self._evald_run = run
        self._options = options
        self._tables = tables
        self._id = options.id or run_id(run)
        self._place = Place(directory / "wandb" / f"evald-{self._id}.cursor")
        self._run: Any = None
        #: a W&B run that is being finished.
        self._end: Ending | None = None
        #: of this W&B run, all of them: an offline one is written anew.
        self._rows: list[Row] = []
        #: how many of them the W&B run has been given, and how many of those the cursor covers.
        self._n_given = 0
        self._n_known = 0
        #: None: nothing that the W&B run has is of this ledger. ``size``: commits.
        self._cursor: Cursor | None = None
        self._n_commits = 0
        self._summary = Newest()
        self.target = f"W&B run {self._id}"

    def cursor(self) -> Cursor | None:
        """See Sink."""
        try:
            self._place.hold()
            self._cursor = self._place.load()
        except OSError as error:
            raise self._place.fault(error) from error
        return self._cursor

    def known(self, row: Row) -> None:
        """Keep a row: an offline run is written whole."""
        self._rows.append(row)
        self._summary.take(row)
        self._n_given = self._n_known = len(self._rows)

    def forget(self) -> None:
        """Begin again; W&B's run goes on with the other ledger's rows."""
        self._rows.clear()
        self._n_given = self._n_known = 0
        self._cursor = None
        self._summary = Newest()

    def take(self, row: Row) -> None:
        """See Sink."""
        self._rows.append(row)

    def flush(self) -> None:
        """Hand over what was taken; raises SinkFault when W&B cannot begin a run now."""
        self._finish()
        if self._n_given == len(self._rows):
            return
        try:
            if self._run is None:
                self._open()
            while self._n_given < len(self._rows):
                row = self._rows[self._n_given]
                self._log(row)
                self._summary.take(row)
                self._n_given += 1
        except ConnectionError as error:
            raise self._died(error) from error
        except OSError as error:
            raise self._place.fault(error) from error

    def close(self) -> None:
        """Finish the W&B run, and note that all has arrived; raises SinkFault while it has not."""
        try:
            self.flush()
            if self._run is not None:
                self._end, self._run = Ending(self._run), None
                self._finish()
        finally:
            self._place.release()

    def _finish(self) -> None:
        if self._end is None:
            return
        try:
            if not self._end.wait(FINISH_S):
                raise SinkFault(f"cannot finish {self.target}: W&B is still uploading")
            run, self._end = self._end.run, None
            self._check_whole(run)
            self._store(Mark.of(self._rows[self._n_given - 1]), self._n_commits)
        except ConnectionError as error:
            raise self._died(error) from error
        except OSError as error:
            raise self._place.fault(error) from error

    def _open(self) -> None:
        options = self._options
        self._place.hold()
        try:
            self._run = self._wandb.init(
                project=options.project,
                entity=options.entity,
                group=options.group or self._evald_run,
                id=self._id,
                name=options.name or self._id,
                job_type="eval",
                mode=options.mode,
                dir=str(self._directory),
                resume="allow",
                reinit="create_new",
                settings=self._wandb.Settings(
                    console="off", x_disable_stats=True, disable_git=True, disable_code=True
                ),
            )
        except (self._wandb.errors.UsageError, self._wandb.errors.AuthenticationError) as error:
            raise EvaldError(
                f"cannot begin {self.target}: {error}; `wandb login`, or --mode offline"
            ) from error
        except self._wandb.Error as error:
            raise SinkFault(f"cannot begin {self.target}: {error}") from error
        define_metrics(self._run)
        self._n_commits = self._run.starting_step
        if self._run.resumed and self._cursor is not None:
            n_arrived = max(0, self._n_commits - self._cursor.size)
            for row in self._rows[self._n_known :][:n_arrived]:
                self._summary.take(row)
            self._n_given = min(self._n_known + n_arrived, len(self._rows))
        else:
            # a new one, as each offline run is, or one that has nothing of this ledger: it gets
            # all there is; a life that is killed has said so
            self._n_given = 0
            self._summary = Newest()
            first = Mark.of(self._rows[0])
            self._store(Mark(first.seq - 1, "", 0.0), self._n_commits)
            self._n_known = 0

    def _store(self, last: Mark, n_commits: int) -> None:
        cursor = Cursor(Mark.of(self._rows[0]), last, size=n_commits)
        self._place.store(cursor)
        self._cursor = cursor
        self._n_known = self._n_given

    def _check_whole(self, run: Any) -> None:
        """Wait until an offline file is written; raises SinkFault for one that stays too small.

        W&B writes it after ``finish`` has returned, and says nothing when the disk is full. It is
        larger than the names of all values.
        """
        if not run.offline:
            return
        path = Path(run.settings.sync_file)
        n_given, self._n_given = self._n_given, 0  # a new one is begun if this is not whole
        least = sum(len(name) for row in self._rows[:n_given] for name in row.metrics)
        size, before = 0, -1
        until_s = time.monotonic() + WRITTEN_S
        while (size < least or size != before) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            size, before = path.stat().st_size, size
        if size < least:
            raise SinkFault(
                f"cannot write {path}: W&B has put {size} bytes into it; is the disk full?"
            )
        self._n_given = n_given

    def _log(self, row: Row) -> None:
        data: dict[str, Any] = dict(values(row))
        if self._tables is not None:
            for name, table in self._tables.of(row).items():
                data[tag(name)] = self._wandb.Table(
                    columns=table.columns, data=table.rows, allow_mixed_types=True
                )
        self._run.log(data)
        self._n_commits += 1
        late = self._summary.over(row)
        if late:
            self._run.summary.update(late)

    def _died(self, error: ConnectionError) -> EvaldError:
        """W&B's library cannot begin another process of its own in this life."""
        return EvaldError(
            f"cannot log to {self.target}: W&B's own process has gone ({error}); run the command "
            "again, it goes on where W&B's run has come to"
        )


class Ending:
    """The end of a W&B run, which may wait for a network, in a thread of its own."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._finish, name="wandb-finish", daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        try:
            self.run.finish()
        except Exception as error:  # noqa: BLE001  # carried over to the thread that waits
            self._fault = error

    def wait(self, limit_s: float) -> bool:
        """Tell whether it is over within the limit; raises what went wrong."""
        self._thread.join(limit_s)
        if self._fault is not None:
            raise self._fault
        return not self._thread.is_alive()


def run_id(run: str) -> str:
    """Return the id of the W&B run that shows a run of evald."""
    name = f"{run}-eval"
    if len(name) <= _MAX_ID:
        return name
    return f"{name[: _MAX_ID - 9]}-{zlib.crc32(name.encode()):08x}"


def import_wandb() -> Module:
    """Return ``wandb``; raises EvaldError."""
    try:
        import wandb  # noqa: PLC0415  # the extra is asked for only where it is used
    except ImportError as error:
        raise EvaldError(f"cannot log to W&B: {error}; pip install 'evald[wandb]'") from error
    return wandb
