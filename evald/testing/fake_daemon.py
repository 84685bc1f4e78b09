"""A fake evald for tests of a training job: the files of the real one, and scripted outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from evald.point import Kind, Outcome, PointKey
from evald.results.follow import read_records
from evald.results.index import PointIndex
from evald.results.records import Accepted, AnyRecord, Counts, PointRecord, RunEnd, SetRecord
from evald.staging.digest import content_digest
from evald.status.view import PointView, StagingView, StatusView


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a point is to end."""

    outcome: Outcome = Outcome.OK
    reason: str = ""
    metrics: dict[str, float] = {}


class FakeDaemon:
    """Takes in what appears in ``root``, and ends points when told to; it looks at no weights.

    By hand: :meth:`scan` accepts, :meth:`end` ends the oldest point, :meth:`beat` writes a status,
    :meth:`turn` does all three. Or :meth:`start` lets a thread take turns until :meth:`stop`.
    ``endings`` are scripted by step, used up in order; without one a point ends ``ok``. A second
    instance on the same directories is the daemon after a restart.
    """

    def __init__(
        self,
        root: Path,
        results_dir: Path,
        *,
        run: str = "r",
        cap: int = 2,
        pattern: str = "step_{step}",
        marker: str = ".complete",
        base_dir: Path | None = None,
    ) -> None:
        self.root = root
        self.run = run
        self.cap = cap
        self.pattern = pattern
        self.marker = marker
        self.ledger = results_dir / "results.jsonl"
        self.endings: dict[int, deque[Ending]] = {}
        #: how the status describes the root's file system.
        self.free_bytes = 1 << 50
        self.used_bytes = 0
        self.max_bytes: int | None = None
        self._name = re.compile(re.escape(pattern).replace(r"\{step\}", r"(\d+)"))
        self._skip = re.compile(re.escape(pattern).replace(r"\{step\}", r"(\d+)") + r"\.skip")
        self._base_dir = base_dir
        self._beat = 0
        self._open: dict[PointKey, Path | None] = {}
        self._index = PointIndex()
        self._seq = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        root.mkdir(parents=True, exist_ok=True)
        results_dir.mkdir(parents=True, exist_ok=True)
        for record in read_records(self.ledger):
            self._index.apply(record)
            self._seq = record.seq
        for state in self._index.open_points():
            self._open[state.key] = Path(state.directory)

    # --- what a test looks at ------------------------------------------------------------------

    @property
    def open(self) -> list[PointKey]:
        """Points that were accepted and have not ended, oldest first."""
        return list(self._open)

    def records(self) -> list[AnyRecord]:
        """All records of the ledger."""
        return read_records(self.ledger)

    def points(self) -> list[PointRecord]:
        """All terminal records."""
        return [record for record in self.records() if isinstance(record, PointRecord)]

    def script(self, step: int, *endings: Ending) -> None:
        """Let the next points of ``step`` end so."""
        self.endings.setdefault(step, deque()).extend(endings)

    # --- what a daemon does --------------------------------------------------------------------

    def turn(self) -> None:
        """Look at the root, end one point, write the status."""
        self.scan()
        self.end()
        self.beat()

    def beat(self) -> None:
        """Write the status, with the beat gone on."""
        self._beat += 1
        board = self.root / ".evald"
        board.mkdir(parents=True, exist_ok=True)
        fresh = board / "status.new"
        fresh.write_bytes(msgspec.json.encode(self._view()))
        fresh.replace(board / "status.json")

    def scan(self) -> None:
        """Accept what is new in the root, in the order of time, and consume the words."""
        found = []
        for path in self.root.iterdir():
            seen = path / self.marker if path.is_dir() else path
            with contextlib.suppress(FileNotFoundError):  # unfinished
                if not path.name.startswith("."):
                    found.append((seen.stat().st_mtime_ns, path))
        for _, path in sorted(found):
            with contextlib.suppress(FileNotFoundError):  # taken back meanwhile
                self._take(path)

    def end(self, key: PointKey | None = None) -> PointRecord | None:
        """End a point (None: the oldest) as scripted; its own snapshot is deleted."""
        key = key or next(iter(self._open), None)
        if key is None:
            return None
        directory = self._open.pop(key)
        script = self.endings.get(key.step)
        ending = script.popleft() if script else Ending()
        state = self._index.get(key)
        if ending.outcome is not Outcome.SKIPPED:
            self._append(
                SetRecord(
                    **_named(key),
                    record_id=f"{key.record_id}/set/a",
                    set="a",
                    counts=Counts(),
                    seconds=0.1,
                    metrics=ending.metrics,
                )
            )
        record = self._end_as(
            key, ending, directory=str(directory or ""), digest=state.digest if state else None
        )
        if directory is not None and directory.parent == self.root:
            shutil.rmtree(directory, ignore_errors=True)
        return record

    def start(self, interval_s: float = 0.02) -> None:
        """Take turns in a thread."""
        self._stopped.clear()
        self._thread = threading.Thread(
            target=self._serve, args=(interval_s,), name="fake evald", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, as a killed daemon would: nothing is tidied up."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _serve(self, interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            self.turn()

    # -------------------------------------------------------------------------------------------

    def _take(self, path: Path) -> None:
        if match := self._name.fullmatch(path.name):
            manifest = json.loads((path / self.marker).read_bytes() or b"{}")
            self._accept(int(match[1]), Kind.STEP, path, manifest)
        elif match := self._skip.fullmatch(path.name):
            self._take_skip(int(match[1]), path)
        elif path.suffix == ".request":
            self._take_request(path)
        elif path.name == "run.end":
            self._end_run(path)

    def _accept(self, step: int, kind: Kind, directory: Path, said: dict[str, Any]) -> None:
        run = said.get("run", self.run)
        # (a directory that is not there has a digest, too)
        digest = content_digest(directory, self.marker) if directory.is_dir() else ""
        known = self._index.revisions(run, step, kind)
        if any(state.digest == digest and state.outcome != Outcome.SKIPPED for state in known):
            return  # under way, or answered already
        key = PointKey(run, step, max((one.key.revision for one in known), default=-1) + 1, kind)
        self._append(
            Accepted(
                **_named(key),
                record_id=f"{key.record_id}/accepted",
                directory=str(directory),
                size_bytes=0,
                fingerprint=digest,
                digest=digest,
                final=said.get("final", False),
            )
        )
        self._open[key] = directory

    def _take_skip(self, step: int, path: Path) -> None:
        said = json.loads(path.read_bytes())
        run = said.get("run", self.run)
        if not self._index.revisions(run, step):
            ending = Ending(outcome=Outcome.SKIPPED, reason=said["reason"])
            self._end_as(PointKey(run, step), ending, detail=said["detail"])
        path.unlink()

    def _take_request(self, path: Path) -> None:
        said = json.loads(path.read_bytes())
        kind = Kind.BASELINE if said["kind"] == "baseline" else Kind.STEP
        directory = Path(said["path"]) if "path" in said else self._base_dir
        if directory is None:
            raise ValueError(f"cannot take {path}: it names no path, and there is no base_dir")
        self._accept(said["step"], kind, directory, said)
        path.unlink()

    def _end_run(self, path: Path) -> None:
        said = json.loads(path.read_bytes())
        run = said.get("run", self.run)
        if any(key.run == run for key in self._open):
            return
        self._append(
            RunEnd(
                run=run,
                step=said["last_step"],
                record_id=f"{run}/run_end",
                points=self._index.outcome_counts(run),
            )
        )
        path.unlink()

    def _end_as(self, key: PointKey, ending: Ending, **fields: Any) -> PointRecord:
        skipped = {f"eval/skipped_{ending.reason}": 1.0} if ending.reason else {}
        record = PointRecord(
            **_named(key),
            record_id=key.record_id,
            outcome=ending.outcome,
            reason=ending.reason,
            metrics={"eval/step": float(key.step), **skipped, **ending.metrics},
            **fields,
        )
        self._append(record)
        return record

    def _append(self, record: AnyRecord) -> None:
        self._seq += 1
        record.seq, record.time = self._seq, time.time()
        with self.ledger.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        self._index.apply(record)

    def _view(self) -> StatusView:
        points = [
            PointView(
                **_named(key),
                state="queued",
                since_s=0.0,
            )
            for key in self._open
        ]
        return StatusView(
            version="fake",
            pid=os.getpid(),
            beat=self._beat,
            time=time.time(),
            uptime_s=0.0,
            state="serving",
            run=self.run,
            results=str(self.ledger),
            cap=self.cap,
            queued=points,
            ended=self._index.outcome_counts(),
            staging=StagingView(
                root=str(self.root),
                used_bytes=self.used_bytes,
                free_bytes=self.free_bytes,
                snapshots=len(points),
                max_bytes=self.max_bytes,
                pattern=self.pattern,
                marker=self.marker,
            ),
            last_seq=self._seq,
        )


def _named(key: PointKey) -> dict[str, Any]:
    """Return the fields that say what a record is about."""
    return {"run": key.run, "step": key.step, "revision": key.revision, "kind": key.kind}
