"""What k of n answers to a question are worth: any right, all right, the majority right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec


class Votes(msgspec.Struct, frozen=True):
    """How often an answer was given, and what it is worth (0 to 1)."""

    count: int
    score: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the chance that one of ``k`` of the n samples is correct: ``1 - C(n-c,k) / C(n,k)``.

    The unbiased estimator (Chen et al., arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_hat_k(n: int, correct: int, k: int) -> float:
    """Return the chance that all ``k`` of the n samples are correct: ``C(c,k) / C(n,k)``.

    pass^k, unbiased (Yao et al., tau-bench, arXiv 2406.12045, section 4).
    """
    return math.comb(correct, k) / math.comb(n, k)


def majority_at_k(n: int, answers: Mapping[str, Votes], k: int) -> float:
    """Return the expected score of the most frequent answer among ``k`` of the n samples.

    The mean over all ``C(n,k)`` subsets, counted and not drawn (self-consistency: Wang et al.,
    arXiv 2203.11171). Answers with equally many votes share: the score is the mean of theirs.
    Samples without an answer (those of ``n`` that are not in ``answers``) do not vote; if nobody
    votes the score is 0.

    For each answer a and number of votes m the subsets are counted in which a has m votes, t
    others have m too, and nobody more; answers with equal counts have equally many. Time grows
    with ``k^3``: see ``set_metrics`` for which k.
    """
    silent = n - sum(votes.count for votes in answers.values())
    counts = Counter(votes.count for votes in answers.values())
    total = 0.0
    scores: dict[int, float] = {}
    for votes in answers.values():
        scores[votes.count] = scores.get(votes.count, 0.0) + votes.score
    for count, score in scores.items():
        if score == 0:
            continue
        others = counts.copy()
        others[count] -= 1
        for m in range(1, min(count, k) + 1):
            ways = _ways(others, silent, m, k - m)
            shares = math.fsum(number / (ties + 1) for ties, number in enumerate(ways))
            total += score * math.comb(count, m) * shares
    return total / math.comb(n, k)


def _ways(others: Counter[int], silent: int, m: int, size: int) -> list[int]:
    """Count the ways to take ``size`` samples of others, none with more than m votes, by ties."""
    # table[used][ties]: ways to have taken `used` samples with `ties` answers at m votes
    table = [[0] * (size // m + 1) for _ in range(size + 1)]
    for used in range(min(silent, size) + 1):
        table[used][0] = math.comb(silent, used)
    for count, answers in others.items():
        for _ in range(answers):
            fresh = [row[:] for row in table]
            for taken in range(1, min(count, m) + 1):
                ways, tie = math.comb(count, taken), int(taken == m)
                for used in range(size - taken + 1):
                    for ties, number in enumerate(table[used][: len(table[used]) - tie]):
                        if number:
                            fresh[used + taken][ties + tie] += number * ways
            table = fresh
    return table[size]


def majority_of_all(answers: Mapping[str, Votes]) -> float:
    """Return the score of the most frequent answer of all; equally frequent ones share."""
    most = max((votes.count for votes in answers.values()), default=0)
    winners = [votes.score for votes in answers.values() if votes.count == most]
    return math.fsum(winners) / len(winners) if winners else 0.0
