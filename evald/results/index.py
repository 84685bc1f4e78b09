"""What the ledger says about points: kept in memory, fed with every record in order."""

from __future__ import annotations

import msgspec

from evald.point import Kind, Outcome, PointKey
from evald.results.records import Accepted, Alert, AnyRecord, PointRecord, RunEnd, SetRecord


class PointState(msgspec.Struct, kw_only=True):
    """What is known of one point; ``outcome`` is None until its terminal record is there."""

    key: PointKey
    directory: str = ""
    fingerprint: str = ""
    digest: str | None = None
    size_bytes: int = 0
    final: bool = False
    owned: bool = True
    outcome: Outcome | None = None
    #: seq of the terminal record; 0 while there is none.
    end_seq: int = 0
    #: record ids of its set records, in order.
    set_ids: list[str] = msgspec.field(default_factory=list)
    #: the sets that it was measured with, by name.
    sets: dict[str, SetSeen] = msgspec.field(default_factory=dict)


class SetSeen(msgspec.Struct, frozen=True, kw_only=True):
    """With what an eval set was measured; digests, "" where a record does not say."""

    step: int = 0
    #: of the rows.
    data: str = ""
    #: of the set's config, without data and grader.
    settings: str = ""
    grader_version: str = ""
    function_version: str = ""
    #: of all that a score depends on but the weights: also tokenizer and chat template.
    config: str = ""


class PointIndex:
    """Every point of the ledger, by key, by step and in order of acceptance.

    A record that repeats a ``record_id`` replaces what was known (readers upsert): applying a
    ledger twice gives the same index as applying it once.
    """

    def __init__(self) -> None:
        self._points: dict[PointKey, PointState] = {}
        self._by_step: dict[tuple[str, Kind, int], list[PointState]] = {}
        self._newest_step: dict[str, int] = {}
        self._newest_ended: dict[str, int] = {}
        self._ended_runs: set[str] = set()
        #: by run, then by name of the set: from the newest record that has a score.
        self._sets: dict[str, dict[str, SetSeen]] = {}

    def apply(self, record: AnyRecord) -> None:
        """Take in one record."""
        match record:
            case Accepted():
                self._accept(record)
            case SetRecord():
                state = self._state(point_key(record))
                if record.record_id not in state.set_ids:
                    state.set_ids.append(record.record_id)
            case PointRecord():
                self._end(record)
            case RunEnd():
                self._ended_runs.add(record.run)
            case Alert():
                pass

    def _accept(self, record: Accepted) -> None:
        key = point_key(record)
        if key not in self._points:
            # a run that goes on after its end (the trainer was resumed) is not over any more
            self._ended_runs.discard(key.run)
        state = self._state(key)
        state.directory = record.directory
        state.fingerprint = record.fingerprint
        state.digest = record.digest or state.digest
        state.size_bytes = record.size_bytes
        state.final = record.final
        state.owned = record.owned

    def _end(self, record: PointRecord) -> None:
        state = self._state(point_key(record))
        if not state.directory:
            self._inherit(state, record.fingerprint)
        state.directory = record.directory or state.directory
        state.fingerprint = record.fingerprint or state.fingerprint
        state.digest = record.digest or state.digest
        if record.kind is Kind.STEP:
            newest = self._newest_ended.get(record.run, record.step)
            self._newest_ended[record.run] = max(newest, record.step)
        state.outcome = record.outcome
        state.end_seq = record.seq
        if record.outcome is not Outcome.SKIPPED:
            self._see_sets(state, record)

    def _inherit(self, state: PointState, fingerprint: str) -> None:
        """Know the snapshot of a point that was graded again: it never was accepted by itself."""
        key = state.key
        for other in self._by_step[key.run, key.kind, key.step]:
            if other is not state and fingerprint and other.fingerprint == fingerprint:
                state.size_bytes, state.final = other.size_bytes, other.final
                state.owned = other.owned

    def _see_sets(self, state: PointState, record: PointRecord) -> None:
        """Remember with what the sets of a measured point were measured."""
        told = record.provenance.get("sets")
        seen = self._sets.setdefault(record.run, {})
        for name, one in told.items() if isinstance(told, dict) else ():
            # (a black box says what it wants)
            if not isinstance(one, dict) or not isinstance(one.get("config"), str):
                continue
            now, old = msgspec.convert({**one, "step": record.step}, SetSeen), seen.get(name)
            if old is not None and msgspec.structs.replace(old, step=record.step) == now:
                now = msgspec.structs.replace(old, step=record.step)  # its texts: once in memory
            state.sets[name] = now
            # grading an earlier step again does not make it the newest
            again = "regraded_from" in record.provenance
            if not again or old is None or old.step <= record.step:
                seen[name] = now

    def _state(self, key: PointKey) -> PointState:
        """Return the state of ``key``, made on first sight.

        A terminal record may come without an acceptance (a trainer-side skip).
        """
        state = self._points.get(key)
        if state is None:
            state = self._points[key] = PointState(key=key)
            siblings = self._by_step.setdefault((key.run, key.kind, key.step), [])
            siblings.append(state)
            siblings.sort(key=lambda sibling: sibling.key.revision)
            if key.kind is Kind.STEP:
                newest = self._newest_step.get(key.run, key.step)
                self._newest_step[key.run] = max(newest, key.step)
        return state

    def get(self, key: PointKey) -> PointState | None:
        """Return what is known of ``key``."""
        return self._points.get(key)

    def void_sets(self, record: PointRecord) -> list[str]:
        """Return the ids of the set records that the point does not stand for which ends so.

        Those of a skipped one; else of sets that an earlier life has measured, and that the config
        has no longer.
        """
        state = self._points.get(point_key(record))
        if state is None or record.outcome is Outcome.SKIPPED:
            return list(state.set_ids) if state else []
        told = record.provenance.get("sets")
        if not isinstance(told, dict):  # (a black box says what it wants)
            return []
        standing = {f"{record.record_id}/{name}" for name in told}
        return [one for one in state.set_ids if one not in standing]

    def revisions(self, run: str, step: int, kind: Kind = Kind.STEP) -> list[PointState]:
        """Return the points of one step, lowest revision first."""
        return list(self._by_step.get((run, kind, step), ()))

    def open_points(self) -> list[PointState]:
        """Return the points that have not ended, in order of acceptance."""
        return [state for state in self._points.values() if state.outcome is None]

    def ended_points(self) -> list[PointState]:
        """Return the points that have ended, in order of their end."""
        ended = [state for state in self._points.values() if state.outcome is not None]
        return sorted(ended, key=lambda state: state.end_seq)

    def measured(self, run: str, kind: Kind, *, below: int | None = None) -> PointState | None:
        """Return the newest point of ``run`` that has a score, of a step ``below`` this one."""
        found = [
            state
            for state in self._points.values()
            if (state.key.run, state.key.kind) == (run, kind)
            and state.outcome in {Outcome.OK, Outcome.PARTIAL}
            and (below is None or state.key.step < below)
        ]
        return max(found, key=lambda state: (state.key.step, state.key.revision), default=None)

    def set_before(self, key: PointKey, name: str) -> SetSeen | None:
        """Return with what an eval set was measured at the newest step before this point's.

        Points may end in another order than that of their steps. Without such a step: with what
        it was measured last; None: never.
        """
        found = [
            state
            for state in self._points.values()
            if state.key.run == key.run and state.key.step < key.step and name in state.sets
        ]
        if not found:
            return self._sets.get(key.run, {}).get(name)
        return max(found, key=lambda state: (state.key.step, state.key.revision)).sets[name]

    def sets_seen(self, run: str) -> dict[str, SetSeen]:
        """Return with what each eval set was measured last in ``run``, by name."""
        return dict(self._sets.get(run, {}))

    def outcome_counts(self, run: str | None = None) -> dict[str, int]:
        """Return how many points (of ``run``) ended in each outcome; every outcome is a key."""
        counts = {outcome.value: 0 for outcome in Outcome}
        for state in self._points.values():
            if state.outcome is not None and run in (None, state.key.run):
                counts[state.outcome.value] += 1
        return counts

    def newest_step(self, run: str) -> int | None:
        """Return the highest training step known of ``run``."""
        return self._newest_step.get(run)

    def lag_steps(self) -> int | None:
        """Tell by how many steps the newest ended point is behind the newest known one.

        Of runs that have not ended, the one that is furthest behind; None: no step has ended.
        """
        lags = [
            self._newest_step[run] - ended
            for run, ended in self._newest_ended.items()
            if run not in self._ended_runs
        ]
        return max(lags, default=None)

    def run_ended(self, run: str) -> bool:
        """Tell whether ``run`` has a ``run_end`` record that no newer point followed."""
        return run in self._ended_runs


def point_key(record: Accepted | SetRecord | PointRecord) -> PointKey:
    """Return the key of the point that ``record`` is about."""
    return PointKey(
        run=record.run, step=record.step, revision=record.revision, kind=Kind(record.kind)
    )
