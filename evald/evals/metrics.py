"""Metrics of one eval set, flat and ready for a logger, from small numbers of each sample.

Names are those that dashboards of existing trainers show; what is new stands beside them.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Status = Literal["scored", "error", "grader_error", "timeout"]

#: two-sided 95 % of the normal distribution.
_Z95 = 1.959964

#: a response is looked at for repetition when it is longer than this, and only its end is.
_REPETITION_CHARS = 10_000
_REPETITION_RATIO = 10.0


class SampleOutcome(msgspec.Struct, frozen=True):
    """What is kept of a finished sample: numbers, not its text."""

    #: position of the question in its set.
    question: int
    status: Status
    score: float = 0.0
    no_answer: bool = False
    unfinished_thinking: bool = False
    #: the answer as it was compared; empty without one.
    answer: str = ""
    values: dict[str, float] = {}
    truncated: bool = False
    #: tokens of the response; None when there is none.
    n_tokens: int | None = None
    repeats: bool = False
    weight_version: str = ""
    resumed: bool = False


def set_metrics(
    name: str,
    n_questions: int,
    n_samples: int,
    outcomes: Iterable[SampleOutcome],
    digest: str,
    ks: Sequence[int] = (),
) -> dict[str, float]:
    """Compute all metrics of set ``name``.

    ``n_samples`` is the number of samples of each question; a sample without an outcome counts
    as failed. ``digest`` is that of the point's snapshot; ``ks`` are the k of pass@k. Metrics
    that are undefined (a standard error of one question, a mean of no response) are left out.
    """
    outcomes = list(outcomes)
    scored = [outcome for outcome in outcomes if outcome.status == "scored"]
    answered = [outcome for outcome in outcomes if outcome.n_tokens is not None]
    totals = [0.0] * n_questions
    for outcome in scored:
        totals[outcome.question] += outcome.score
    means = [total / n_samples for total in totals]
    key = f"eval/{name}"
    all_samples = n_questions * n_samples
    metrics = {
        key: statistics.fmean(means),
        f"{key}-truncated_ratio": _share((o.truncated for o in outcomes), all_samples),
        f"{key}-none_reward_ratio": 1 - len(scored) / all_samples,
        f"{key}/no_answer_ratio": _share((o.no_answer for o in scored), all_samples),
    }
    if n_questions > 1:
        metrics |= _spread(key, means)
    if scored:
        metrics[f"{key}/mean_scored"] = statistics.fmean(o.score for o in scored)
    if n_samples > 1 and all(outcome.score in {0.0, 1.0} for outcome in scored):
        metrics |= _pass_at_all_k(key, [round(total) for total in totals], n_samples, ks)
    if answered:
        lengths = [outcome.n_tokens or 0 for outcome in answered]
        metrics |= {
            f"{key}/response_len/mean": statistics.fmean(lengths),
            f"{key}/response_len/median": float(statistics.median(lengths)),
            f"{key}/response_len/max": float(max(lengths)),
            f"{key}/response_len/min": float(min(lengths)),
            f"{key}/repetition_frac": _share((o.repeats for o in answered), len(answered)),
        }
        metrics |= _versions(key, [outcome.weight_version for outcome in answered], digest)
    return metrics


def standard_error(question_means: Sequence[float]) -> float:
    """Compute the standard error of the mean over questions: ``s / sqrt(n)``, ``s`` with ``n - 1``.

    Samples of one question are not independent, hence the means of the questions are what is
    counted (E. Miller, Adding Error Bars to Evals, arXiv 2411.00640, section 2). Needs n >= 2.
    """
    return statistics.stdev(question_means) / math.sqrt(len(question_means))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Compute the chance that one of ``k`` samples is correct: ``1 - C(n-c,k) / C(n,k)``.

    The unbiased estimator (Chen et al., Evaluating Large Language Models Trained on Code, arXiv
    2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def repeats(response: str) -> bool:
    """Tell whether a long response ends in repetition.

    That is so when zlib makes its last 10,000 characters more than ten times smaller.
    """
    if len(response) <= _REPETITION_CHARS:
        return False
    tail = response[-_REPETITION_CHARS:].encode("utf-8", "replace")
    return len(tail) / len(zlib.compress(tail)) > _REPETITION_RATIO


def version_step(weight_version: str) -> int | None:
    """Step in a label ``run:step:digest8:nonce`` (or a bare number); None for anything else."""
    parts = weight_version.split(":")
    text = parts[1] if len(parts) > 1 else parts[0]
    try:
        return int(text)
    except ValueError:
        return None


def _spread(key: str, means: list[float]) -> dict[str, float]:
    """Give the standard error and the normal 95 % interval ``mean +- 1.96 stderr``, not clipped."""
    mean, error = statistics.fmean(means), standard_error(means)
    return {
        f"{key}/stderr": error,
        f"{key}/ci95_low": mean - _Z95 * error,
        f"{key}/ci95_high": mean + _Z95 * error,
    }


def _pass_at_all_k(key: str, correct: list[int], n: int, ks: Sequence[int]) -> dict[str, float]:
    """pass@k for each k (default 1, 2, 4, ... up to n): the mean over questions.

    What failed is not correct.
    """
    ks = ks or [1 << power for power in range(n.bit_length()) if 1 << power <= n]
    return {f"{key}-pass@{k}": statistics.fmean(pass_at_k(n, c, k) for c in correct) for k in ks}


def _versions(key: str, labels: list[str], digest: str) -> dict[str, float]:
    """Mean of the steps in the labels, and the share of labels that name other weights.

    An engine that was pinned again to the same digest has a new nonce: that is not mixed.
    """
    metrics = {}
    steps = [step for step in map(version_step, labels) if step is not None]
    if steps:
        metrics[f"{key}/weight_version/mean"] = statistics.fmean(steps)
    other = (_digest_of(label) not in {None, digest[:8]} for label in labels)
    metrics[f"{key}/weight_version/mixed_version_ratio"] = _share(other, len(labels))
    return metrics


def _digest_of(label: str) -> str | None:
    parts = label.split(":")
    return parts[2] if len(parts) == 4 else None  # noqa: PLR2004 - run:step:digest8:nonce


def _share(flags: Iterable[bool], total: int) -> float:
    return sum(flags) / total
