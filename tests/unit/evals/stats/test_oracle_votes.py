"""What k of n answers are worth, against every subset, one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from evald.evals.stats.votes import (
    Votes,
    majority_at_k,
    majority_of_all,
    pass_at_k,
    pass_hat_k,
)


def majority(chosen: tuple[str, ...], scores: dict[str, float]) -> float:
    votes = Counter(answer for answer in chosen if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(scores[answer] for answer in winners) / len(winners)


def test_oracle_brute_force_pass_at_k_and_pass_hat_k() -> None:
    draw = random.Random(0)  # noqa: S311 - a test
    for _ in range(60):
        samples = [draw.random() < 0.4 for _ in range(draw.randint(1, 8))]
        for k in range(1, len(samples) + 1):
            subsets = list(combinations(samples, k))
            any_right = sum(any(subset) for subset in subsets) / len(subsets)
            all_right = sum(all(subset) for subset in subsets) / len(subsets)
            n, correct = len(samples), sum(samples)
            assert pass_at_k(n, correct, k) == pytest.approx(any_right)
            assert pass_hat_k(n, correct, k) == pytest.approx(all_right)


def test_oracle_brute_force_majority() -> None:
    draw = random.Random(1)  # noqa: S311 - a test
    for _ in range(150):
        n = draw.randint(1, 9)
        answers = [draw.choice(["", "a", "b", "c", "d"]) for _ in range(n)]
        scores = {name: float(draw.random() < 0.4) for name in "abcd"} | {"d": draw.random()}
        votes = {name: Votes(answers.count(name), scores[name]) for name in set(answers) - {""}}
        for k in range(1, n + 1):
            subsets = list(combinations(answers, k))
            expected = sum(majority(subset, scores) for subset in subsets) / len(subsets)
            assert majority_at_k(n, votes, k) == pytest.approx(expected)
        assert majority_of_all(votes) == pytest.approx(majority(tuple(answers), scores))


def test_a_majority_of_64_samples_is_counted() -> None:
    # 20 of 64 are right, and no wrong answer comes up more than twice
    votes = {"right": Votes(20, 1.0), **{f"wrong{i}": Votes(2, 0.0) for i in range(22)}}
    assert majority_at_k(64, votes, 1) == pytest.approx(20 / 64)
    assert 20 / 64 < majority_at_k(64, votes, 4) < majority_at_k(64, votes, 8) < 1
    assert majority_of_all(votes) == 1.0


def test_nobody_votes() -> None:
    assert majority_of_all({}) == 0.0
    assert majority_at_k(4, {}, 2) == 0.0
