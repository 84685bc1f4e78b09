"""Curve breaks: an eval set that is not what earlier points of its run were measured with.

Its scores before and after are those of two different sets. They are never compared (samples of
another config digest do not count); a person should know, or not get such a point at all.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import structlog

from evald.errors import EvalSkip
from evald.evals.preparation import PreparedPoint, PreparedSet
from evald.evals.sets import LoadedSet
from evald.point import PointKey, SkipReason
from evald.results.index import PointIndex, SetSeen

log = structlog.get_logger(__name__)

#: what a person can do about it.
CHANGED_REMEDY = (
    'restore it, give the run another name, or set dispatch.on_set_change = "record" and let the '
    "curve break"
)


class CurveWatch:
    """Compares the sets of points with what the ledger says of earlier ones of the same run."""

    def __init__(self, index: PointIndex, on_change: Literal["record", "refuse"]) -> None:
        self._index = index
        self._refuses = on_change == "refuse"

    def admit(self, prepared: PreparedPoint) -> None:
        """Raise EvalSkip "set_changed" for a set that has changed, if the config refuses it.

        A set that uses the tokenizer and template of each snapshot may see others.
        """
        if not self._refuses:
            return
        for one in prepared.sets:
            seen, found = self._change(prepared.point.key, one)
            if found and not (found == _TOKENS and one.loaded.eval_set.tokenizer == "snapshot"):
                sentence = _sentence(prepared.point.key.run, one.loaded, seen, found)
                raise EvalSkip(f"{sentence}; {CHANGED_REMEDY}", reason=SkipReason.SET_CHANGED)

    def breaks(self, prepared: PreparedPoint, one: PreparedSet) -> bool:
        """Whether the curve of a set breaks at this point."""
        key = prepared.point.key
        seen, found = self._change(key, one)
        if found:
            log.warning("curve_break", detail=_sentence(key.run, one.loaded, seen, found))
        return bool(found)

    def changed(self, run: str, sets: list[LoadedSet]) -> list[str]:
        """One sentence for each set that has changed, as far as its files and config tell."""
        sentences = []
        for loaded in sets:
            seen = self._index.sets_seen(run).get(loaded.name)
            found = _difference(seen, _now(loaded))
            if found:
                sentences.append(_sentence(run, loaded, seen, found))
        return sentences

    def _change(self, key: PointKey, one: PreparedSet) -> tuple[SetSeen | None, str]:
        """Return what the set was before this point, and what of it is not the same."""
        seen = self._index.set_before(key, one.loaded.name)
        now = msgspec.structs.replace(_now(one.loaded), config=one.config_digest)
        return seen, _difference(seen, now)


def _sentence(run: str, loaded: LoadedSet, seen: SetSeen | None, found: str) -> str:
    step = 0 if seen is None else seen.step
    return (
        f"eval set {loaded.name!r} is not what run {run!r} was measured with until step "
        f"{step}: other {found}"
    )


_TOKENS = "tokenizer or chat template"


def difference(old: LoadedSet, new: LoadedSet) -> str:
    """Name what scores depend on and what is not the same in both; empty if all is."""
    return _difference(_now(old), _now(new))


def _now(loaded: LoadedSet) -> SetSeen:
    return SetSeen(
        data=loaded.data_digest,
        settings=loaded.settings_digest,
        grader_version=loaded.grader_version,
        function_version=loaded.function_version,
    )


def _difference(seen: SetSeen | None, now: SetSeen) -> str:
    """Name what is not the same; what is not known on both sides is."""
    if seen is None:
        return ""
    pairs = {
        "data": (seen.data, now.data),
        "settings": (seen.settings, now.settings),
        "grader": (seen.grader_version, now.grader_version),
        "generate function": (seen.function_version, now.function_version),
    }
    names = [name for name, (old, new) in pairs.items() if old and new and old != new]
    if not names and seen.config and now.config and seen.config != now.config:
        names = [_TOKENS]
    return " and ".join(names)
