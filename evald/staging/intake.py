"""Snapshots come in: what the scan finds is read, judged and offered, each state of it once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import structlog

from evald.config import Staging
from evald.errors import EvaldError, SnapshotGone
from evald.point import Kind, PointKey
from evald.pulse import Pulse
from evald.results.index import PointIndex
from evald.staging.candidate import Candidate, Reader, check_snapshot
from evald.staging.completeness import Identity
from evald.staging.consuming import Consuming
from evald.staging.failing import FailingReads, fails_for_now
from evald.staging.notices import Alerting, Notices
from evald.staging.offers import InvalidPoint, Offer, RunEnded, TrainerSkip
from evald.staging.recovery import Recovery
from evald.staging.retention import Retention
from evald.staging.revisions import Decision, Revisions, Verdict
from evald.staging.rights import deletable
from evald.staging.room import Room
from evald.staging.root_lock import RootLock
from evald.staging.scan import Found, FoundFile, FoundSnapshot, Layout, scan
from evald.staging.settling import Settling
from evald.staging.unmarked import Unmarked
from evald.staging.validate import BaseModel
from evald.staging.watch import Watch
from evald.staging.words import BrokenWord, Listener, UnreadableWord
from evald.status.view import StagingView

__all__ = ["Intake", "check_snapshot", "deletable"]

log = structlog.get_logger(__name__)

#: snapshots that are read at the same time: a slow one leaves room for others.
_READERS = 4
#: one scan of a root on a slow file system, and what follows from it.
_SCAN_S = 300.0

_NOTHING = Found(folders={}, marked=[], unmarked={}, files=[], free_bytes=0)


class Intake:
    """Watches the staging root and offers what appears in it, in the order of the markers.

    ``run``: run id of snapshots that name none. ``base``: what a valid snapshot looks like
    (None: only that it is whole).
    ``index``: the ledger's points. ``offer`` is awaited with each find and returns once it is
    durable. ``on_alert`` hears (name, sentence) of what a person should know; ``baseline_step`` is
    the step of a baseline request that names none; ``shared``: requests may ask for a step on
    engines that are the trainer's.
    """

    def __init__(
        self,
        config: Staging,
        *,
        run: str,
        base: BaseModel | None,
        index: PointIndex,
        retention: Retention,
        offer: Callable[[Offer], Awaitable[None]],
        on_alert: Alerting | None = None,
        baseline_step: int = 0,
        shared: bool = False,
    ) -> None:
        self._config = config
        self._layout = Layout(config)
        self._root = self._layout.root
        self._index = index
        self._retention = retention
        self._offer = offer
        self._notices = Notices(on_alert)
        self._reader = Reader(config, self._layout, run, base)
        self._listener = Listener(
            self._reader,
            root=self._root,
            run=run,
            base_dir=None if base is None else base.directory,
            baseline_step=baseline_step,
            shared=shared,
        )
        #: what the last scan saw and was taken care of; a directory leaves with its marker.
        self._seen: dict[Path, Identity] = {}
        self._heard: dict[Path, Identity] = {}
        self._revisions = Revisions(index, is_present=self._seen.__contains__)
        self._recovery = Recovery(
            self._root,
            reader=self._reader,
            revisions=self._revisions,
            is_present=self._seen.__contains__,
            offer=offer,
            offer_as=self._offer_as,
        )
        self._unmarked = Unmarked(
            config, run=run, index=index, revisions=self._revisions, offer=offer
        )
        self.room = Room(config)
        settles = self._layout.completeness.settles
        self._settling = Settling(config.scan_interval_s) if settles else None
        self._failing = FailingReads()
        self._waiting: list[Candidate] = []
        #: seen once: a half-written word, or a run's end that a last look has to precede.
        self._once: dict[Path, Identity] = {}
        self._consuming = Consuming(retention, index, self._heard)
        self._batches: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_READERS)
        #: set once the watch is armed and the first scan is done.
        self.armed = asyncio.Event()
        self.pulse = Pulse("staging")

    def view(self) -> StagingView:
        """Show the root as the last scan saw it."""
        return self.room.view(len(self._seen))

    def take_revision(self, run: str, step: int, kind: Kind) -> PointKey:
        """Give the next revision of a step away: no snapshot will get it."""
        return self._revisions.take(run, step, kind)

    async def run(self) -> None:
        """Take in snapshots until cancelled; raises EvaldError when there can be no root."""
        await asyncio.to_thread(self._make_root)
        hint = self._layout.completeness.hint
        watch = Watch(self._root, hint, scan_interval_s=self._config.scan_interval_s)
        lock = RootLock(self._root)
        try:
            if self._config.owned:
                await asyncio.to_thread(lock.take)
            await self._retention.sweep()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._retention.sweep_leftovers(), name="staging leftovers")
                tasks.create_task(self._retention.retry_best(), name="staging best")
                await self._serve(watch, tasks)
        finally:
            self._reader.stop.set()
            lock.close()
            await watch.close()

    async def _serve(self, watch: Watch, tasks: asyncio.TaskGroup) -> None:
        from_before = self._index.open_points()
        while True:
            self.pulse.rest("scanning", _SCAN_S)
            found = await self._scan()
            if await watch.arm(found.folders):
                found = await self._scan()
            self._unmarked.see(found)
            look_again = self._take(found, tasks)
            if not self.armed.is_set():
                first = set(self._batches)
                tasks.create_task(self._recovery.run(from_before, first), name="staging recovery")
                tasks.create_task(self._unmarked.run(), name="staging unmarked")
                self.armed.set()
            await self._consuming.run()
            if not look_again:
                self.pulse.rest("waiting for the next scan", self._config.scan_interval_s + _SCAN_S)
                await watch.wait(found.unmarked)

    def _make_root(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvaldError(
                f"cannot create staging root {self._root}: {error.strerror}; create it, or change "
                "staging.root"
            ) from error

    async def _scan(self) -> Found:
        try:
            found = await asyncio.to_thread(scan, self._layout)
            fault = "" if found.folders else "it is not there; evald goes on when it comes back"
        except OSError as error:
            found, fault = _NOTHING, f"{error.strerror}; evald goes on when it can be read"
        if fault:
            self._notices.warn_once(
                "staging_root_lost", f"cannot scan staging root {self._root}: {fault}"
            )
        else:
            self._notices.forget("staging_root_lost")
        self.room.free_bytes, self.room.total_bytes = found.free_bytes, found.total_bytes
        return found

    # --- from a scan to offers -----------------------------------------------------------------

    def _take(self, found: Found, tasks: asyncio.TaskGroup) -> bool:
        """Start the work on all that is new; True when another scan must follow at once."""
        for directory in self._retention.take_changed():
            self._forget(directory, "it changed behind its marker")
        self._consuming.look()
        marked = {snapshot.directory: snapshot.identity for snapshot in found.marked}
        files = {file.path: file.identity for file in found.files}
        for known, present in ((self._seen, marked), (self._heard, files), (self._once, files)):
            for path in [path for path in known if known[path] != present.get(path)]:
                del known[path]
        self.room.keep(marked)
        if self._settling is not None:
            self._settling.keep(marked)
        again = [one for one in self._waiting if one.request or one.directory in self._seen]
        self._waiting = []
        snapshots = [one for one in found.marked if one.directory not in self._seen]
        words = [file for file in found.files if file.path not in self._heard]
        ends = [file for file in words if file.kind == "run_end"]
        self._seen.update((snapshot.directory, snapshot.identity) for snapshot in snapshots)
        self._heard.update((file.path, file.identity) for file in words)
        news: list[FoundSnapshot | FoundFile] = [
            *snapshots,
            *(file for file in words if file not in ends),
        ]
        if news or again:
            batch = tasks.create_task(self._batch(news, again), name="staging batch")
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)
        self._notices.tell_closed([*found.closed, *found.closed_folders], tasks)
        self._notices.tell_misnamed(found.misnamed, self._config.pattern, tasks)
        self._notices.tell_doubtful(found.doubtful, tasks)
        if snapshots and self._config.owned:
            self._notices.test_rights(snapshots[0].directory, tasks)
        return self._take_ends(ends, tasks)

    def _take_ends(self, ends: Iterable[FoundFile], tasks: asyncio.TaskGroup) -> bool:
        """Offer a run's end after all that was marked before it, which takes one more scan."""
        again = False
        for file in ends:
            if file.path in self._once:
                tasks.create_task(self._end_run(file, set(self._batches)), name="staging run end")
            else:
                self._once[file.path] = self._heard.pop(file.path)
                again = True
        return again

    async def _batch(self, news: list[FoundSnapshot | FoundFile], waiting: list[Candidate]) -> None:
        """Read what one scan found side by side, offer it in the order of time."""
        ended: list[tuple[Decision, Candidate]] = []
        async with asyncio.TaskGroup() as readers:
            found = [
                readers.create_task(
                    self._read(one) if isinstance(one, FoundSnapshot) else self._hear(one),
                    name="staging reader",
                )
                for one in sorted(news, key=_time)
            ]
            for candidate in waiting:
                await self._deliver(candidate, ended)
            for task in found:
                offer = await task
                if isinstance(offer, Candidate):
                    await self._deliver(offer, ended)
                elif offer is not None:
                    if isinstance(offer, TrainerSkip):
                        self._revisions.reserve(offer.key)
                    await self._offer(offer)
        # the order of their ends is the order in the ring
        for decision, candidate in sorted(ended, key=lambda pair: pair[0].end_seq):
            await self._retire(decision, candidate)

    async def _read(self, found: FoundSnapshot) -> Candidate | None:
        async with self._slots:
            try:
                candidate = await asyncio.to_thread(self._reader.look, found)
                self._require_calm(candidate)
                await self._judge(candidate)
                self._require_calm(candidate)
            except SnapshotGone as gone:
                if fails_for_now(gone) and self._failing.is_lasting(found.directory, str(gone)):
                    self._notices.warn_once("snapshot_not_listed", str(gone), about=found.directory)
                self._forget(found.directory, str(gone))
                return None
            return candidate

    async def _hear(self, file: FoundFile) -> Candidate | TrainerSkip | RunEnded | None:
        try:
            # a word is short: it does not wait behind snapshots that are hashed
            word = await asyncio.to_thread(self._listener.hear, file)
            if isinstance(word, Candidate):
                word.request_identity = file.identity
                async with self._slots:
                    await self._judge(word)
        except BrokenWord as broken:
            # it may be half-written: it is broken if it still reads so at the next scan
            if self._once.get(file.path) == file.identity:
                await self._notices.tell_ignored(str(broken))
                if isinstance(broken, UnreadableWord):
                    self._heard.pop(file.path, None)  # the next scan tries again
            elif self._heard.pop(file.path, None) is not None:
                self._once[file.path] = file.identity
            return None
        except (FileNotFoundError, SnapshotGone):
            self._heard.pop(file.path, None)
            return None
        return word

    def _require_calm(self, candidate: Candidate) -> None:
        """Raise SnapshotGone for what has no marker of its own and does not stand still yet."""
        if self._settling is None or self._revisions.by_fingerprint(candidate) is not None:
            return
        if not self._settling.has_settled(candidate):
            raise SnapshotGone(f"{candidate.directory} has not stood still long enough yet")

    def _require_readable(self, candidate: Candidate) -> None:
        """Raise SnapshotGone while a failing file system has not had the time to work again."""
        directory, fault = candidate.directory, candidate.fault
        if not candidate.fault_may_pass:
            self._failing.forget(directory)
        elif not self._failing.is_lasting(directory, fault):
            raise SnapshotGone(fault)

    async def _judge(self, candidate: Candidate) -> None:
        if self._ended_before(candidate) is not None:
            return
        if candidate.fingerprint and self._revisions.by_fingerprint(candidate) is None:
            hashed = self._revisions.is_known_step(candidate)
            await asyncio.to_thread(self._reader.judge, candidate, hashed=hashed)
        self._require_readable(candidate)

    def _ended_before(self, candidate: Candidate) -> Decision | None:
        """Tell whether the root remembers the snapshot as ended, and the ledger does not.

        It was a point of a run, or of results, that this daemon knows nothing of.
        """
        if not candidate.owned or candidate.request is not None:
            return None
        ended = self._retention.ended_before(candidate.directory, candidate.fingerprint)
        if ended is None or self._revisions.by_fingerprint(candidate) is not None:
            return None
        return Decision(Verdict.ENDED, PointKey(ended.run, ended.step, kind=candidate.kind))

    async def _deliver(self, candidate: Candidate, ended: list[tuple[Decision, Candidate]]) -> None:
        """Offer a candidate as its point, or find that it needs none."""
        directory = candidate.directory
        if candidate.identity and self._seen.get(directory) != candidate.identity:
            log.debug("snapshot_dropped", directory=str(directory))
            return
        if candidate.identity:
            self.room.count(directory, candidate.size_bytes)
            self._unmarked.name(directory, candidate.run)
        decision = self._ended_before(candidate) or self._revisions.decide(candidate)
        while decision.verdict is Verdict.HASH:
            try:
                await asyncio.to_thread(self._reader.hash, candidate)
                self._require_readable(candidate)
            except SnapshotGone as gone:
                self._forget(directory, str(gone))
                if candidate.request is not None:
                    self._heard.pop(candidate.request, None)
                return
            decision = self._revisions.decide(candidate)
        match decision.verdict:
            case Verdict.OFFER:
                await self._offer_as(decision.key, candidate)
            case Verdict.ENDED:
                ended.append((decision, candidate))
            case Verdict.WAIT:
                self._waiting.append(candidate)
            case _:
                log.debug("snapshot_offered_before", point=str(decision.key))
        if candidate.request is not None and decision.verdict is not Verdict.WAIT:
            self._consuming.add(candidate.request, decision.key, candidate.request_identity)

    async def _offer_as(self, key: PointKey, candidate: Candidate) -> None:
        self._revisions.give(key, candidate)
        known = self._index.get(key)
        if known is not None and known.fingerprint == candidate.fingerprint:
            candidate.digest = candidate.digest or known.digest
        point = candidate.point(key)
        await self._offer(InvalidPoint(point, candidate.fault) if candidate.fault else point)

    async def _retire(self, decision: Decision, candidate: Candidate) -> None:
        directory = candidate.directory
        log.info("snapshot_answered_before", point=str(decision.key), directory=str(directory))
        await self._retention.end_again(
            decision.key, directory, candidate.fingerprint, owned=candidate.owned
        )

    def _forget(self, directory: Path, why: str) -> None:
        """Let the next scan find it again, if it is still there."""
        log.debug("snapshot_dropped", directory=str(directory), why=why)
        self._seen.pop(directory, None)

    async def _end_run(self, file: FoundFile, before: set[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        if self._settling is not None and self._settling.restless:
            self._heard.pop(file.path, None)  # the next scan asks again
            return
        end = await self._hear(file)
        if isinstance(end, RunEnded):
            await self._unmarked.end(end.run)
            await self._offer(end)


def _time(one: FoundSnapshot | FoundFile) -> tuple[int, int]:
    mtime_ns = one.marker_mtime_ns if isinstance(one, FoundSnapshot) else one.mtime_ns
    return (mtime_ns, one.step or 0)
