from pathlib import Path
from typing import Any

import pytest
from staging_cases import accept, candidate, end

from evald.point import Kind, Outcome, PointKey
from evald.results.index import PointIndex
from evald.staging.candidate import Candidate, name_shared
from evald.staging.revisions import Revisions, Verdict

KEY = PointKey("r", 4)
NEXT = PointKey("r", 4, 1)


class Life:
    """An index and what one life of the daemon knows beside it."""

    def __init__(self) -> None:
        self.index = PointIndex()
        self.present: set[Path] = set()
        self.revisions = Revisions(self.index, is_present=self.present.__contains__)

    def decide(self, one: Candidate) -> tuple[Verdict, PointKey]:
        decision = self.revisions.decide(one)
        return decision.verdict, decision.key

    def give(self, key: PointKey, **arguments: Any) -> None:
        one = candidate(**arguments)
        self.revisions.give(key, one)
        accept(self.index, key, fingerprint=one.fingerprint, digest=one.digest)


@pytest.fixture
def life() -> Life:
    return Life()


def test_a_new_step_is_revision_0(life: Life) -> None:
    assert life.decide(candidate(digest=None)) == (Verdict.OFFER, KEY)
    assert not life.revisions.is_known_step(candidate())


def test_kinds_and_runs_are_apart(life: Life) -> None:
    life.give(PointKey("r", 4, 0, Kind.BASELINE))
    life.give(PointKey("other", 4))
    assert life.decide(candidate()) == (Verdict.OFFER, KEY)


def test_the_same_directory_is_offered_once_in_a_life(life: Life) -> None:
    life.revisions.give(KEY, candidate())
    assert life.decide(candidate()) == (Verdict.OFFERED, KEY)
    accept(life.index, KEY)
    assert life.decide(candidate(digest=None)) == (Verdict.OFFERED, KEY)
    assert life.revisions.is_given(KEY)
    assert life.revisions.is_known_step(candidate())


def test_an_open_point_of_an_earlier_life_keeps_its_key(life: Life) -> None:
    accept(life.index, NEXT)
    assert life.decide(candidate(digest=None)) == (Verdict.OFFER, NEXT)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_an_ended_directory_retires(life: Life, outcome: Outcome) -> None:
    accept(life.index, KEY)
    end(life.index, KEY, outcome, seq=7)
    decision = life.revisions.decide(candidate(digest=None))
    assert (decision.verdict, decision.key, decision.end_seq) == (Verdict.ENDED, KEY, 7)


def test_other_bytes_are_the_next_revision(life: Life) -> None:
    life.give(KEY)
    assert life.decide(candidate(fingerprint="g", digest=None)) == (Verdict.HASH, NEXT)
    assert life.decide(candidate(fingerprint="g", digest="e")) == (Verdict.OFFER, NEXT)


def test_a_faulty_one_needs_no_digest(life: Life) -> None:
    life.give(KEY)
    one = candidate(fingerprint="g", digest=None, fault="bad")
    assert life.decide(one) == (Verdict.OFFER, NEXT)


def test_revisions_go_on_after_the_highest(life: Life) -> None:
    accept(life.index, PointKey("r", 4, 3), fingerprint="x", digest="x")
    life.revisions.give(PointKey("r", 4, 5), candidate(fingerprint="y", digest="y"))
    assert life.decide(candidate()) == (Verdict.OFFER, PointKey("r", 4, 6))


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.PARTIAL])
def test_equal_bytes_are_answered(life: Life, outcome: Outcome) -> None:
    life.give(KEY)
    end(life.index, KEY, outcome)
    assert life.decide(candidate(fingerprint="g")) == (Verdict.ENDED, KEY)


def test_a_skip_is_no_answer_for_equal_bytes(life: Life) -> None:
    life.give(KEY)
    end(life.index, KEY, Outcome.SKIPPED)
    assert life.decide(candidate(fingerprint="g")) == (Verdict.OFFER, NEXT)


def test_an_older_answer_beats_a_newer_open_point(life: Life) -> None:
    life.give(KEY)
    end(life.index, KEY)
    life.give(NEXT, fingerprint="h")
    assert life.decide(candidate(fingerprint="g")) == (Verdict.ENDED, KEY)


def test_equal_bytes_wait_for_a_point_that_runs(life: Life) -> None:
    life.revisions.give(KEY, candidate())
    assert life.decide(candidate(fingerprint="g")) == (Verdict.WAIT, KEY)
    accept(life.index, KEY, digest="d")
    assert life.decide(candidate(fingerprint="g")) == (Verdict.WAIT, KEY)
    end(life.index, KEY)
    assert life.decide(candidate(fingerprint="g")) == (Verdict.ENDED, KEY)


def test_equal_bytes_stand_in_for_a_lost_directory(life: Life) -> None:
    accept(life.index, KEY, digest="d")
    # rewritten in place while evald was down
    assert life.decide(candidate(fingerprint="g")) == (Verdict.OFFER, KEY)
    # elsewhere: only if the first place is empty
    elsewhere = candidate(Path("/staged/r/step_4"), fingerprint="g")
    assert life.decide(elsewhere) == (Verdict.OFFER, KEY)
    life.present.add(Path("/staged/step_4"))
    assert life.decide(elsewhere) == (Verdict.WAIT, KEY)


def test_a_lost_point_is_given_and_equal_to_nothing(life: Life) -> None:
    accept(life.index, KEY, digest=None)
    life.revisions.give(KEY, None)
    assert life.revisions.is_given(KEY)
    assert life.decide(candidate(fingerprint="g")) == (Verdict.OFFER, NEXT)


def test_a_skipped_step_keeps_its_key(life: Life) -> None:
    life.revisions.reserve(KEY)
    assert life.decide(candidate()) == (Verdict.OFFER, NEXT)


def test_a_known_step_is_not_reserved(life: Life) -> None:
    life.give(KEY)
    life.revisions.reserve(KEY)
    assert life.decide(candidate())[0] is Verdict.OFFERED


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [(Outcome.SKIPPED, (Verdict.OFFER, NEXT)), (Outcome.OK, (Verdict.ENDED, KEY))],
)
def test_a_trainer_may_ask_again_for_shared_weights_that_got_no_number(
    life: Life, outcome: Outcome, expected: tuple[Verdict, PointKey]
) -> None:
    asked = candidate()
    name_shared(asked, "40")
    life.revisions.give(KEY, asked)
    accept(life.index, KEY, fingerprint=asked.fingerprint, digest=asked.digest)
    end(life.index, KEY, outcome)
    assert life.decide(asked) == expected
