"""All metrics of one eval set, flat and ready for a logger, from the journal of its samples.

Names are those that dashboards of existing trainers show; what is new stands beside them. Metrics
that are undefined (a standard error of one question, a mean of no response) are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from evald.evals.stats.errors import (
    mean_error,
    share_interval,
    t_interval,
    within_error,
)
from evald.evals.stats.paired import Difference, difference
from evald.evals.stats.perplexity import perplexity_difference, perplexity_metrics
from evald.evals.stats.samples import Sample, read_samples
from evald.evals.stats.table import Table
from evald.evals.stats.votes import (
    Votes,
    majority_at_k,
    majority_of_all,
    pass_at_k,
    pass_hat_k,
)

#: subsets of more samples are not counted for maj@k, but for all of them.
_MAX_COUNTED_K = 8


class Earlier(msgspec.Struct, frozen=True, array_like=True):
    """A point to compare with: "prev" or "baseline", its journal, and its snapshot's digest."""

    name: str
    journal: str
    digest: str


class StatsJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the metrics of one set of one point; the result is ``dict[str, float]``."""

    name: str
    kind: str
    #: samples of each question: the denominator, whatever has come of them.
    n_samples: int
    #: k of pass@k and the like; empty: 1, 2, 4, ... up to ``n_samples``.
    ks: list[int]
    #: ids and clusters of all questions, in order; cluster "": of its own.
    questions: list[str]
    clusters: list[str]
    journal: str
    digest: str
    config: str
    earlier: list[Earlier] = []


def set_metrics(job: StatsJob) -> dict[str, float]:
    """Compute all metrics. Blocking; reads the journals, raises OSError."""
    samples = read_samples(Path(job.journal), job.digest, job.config)
    table = Table(samples, job.questions, job.clusters, n=job.n_samples)
    key = f"eval/{job.name}"
    metrics = table.ratios(key) | _versions(key, table.answered, job.digest)
    if job.kind == "perplexity":
        metrics |= perplexity_metrics(key, table.scored, table.clusters_of_scored)
    else:
        metrics |= _scores(key, table, job.ks)
    if job.kind not in {"perplexity", "loglikelihood_choice"}:
        metrics |= _responses(key, table.answered)
    for earlier in job.earlier:
        theirs = read_samples(Path(earlier.journal), earlier.digest, job.config)
        if theirs:
            old = Table(theirs, job.questions, job.clusters, n=job.n_samples)
            metrics |= _compared(f"{key}/delta_{earlier.name}", table, old, job.kind)
    return metrics


def _scores(key: str, table: Table, ks: list[int]) -> dict[str, float]:
    """Mean over questions with its error; failed samples count 0, as existing curves have it."""
    means = [math.fsum(s.score or 0.0 for s in row) / table.n for row in table.rows]
    metrics = {key: statistics.fmean(means)} | _spread(key, means, table)
    n_all = len(table.rows) * table.n
    missing = (n_all - len(table.scored)) / n_all
    if missing and table.in_unit:
        # what has no score could have had any
        metrics |= {f"{key}/score_low": metrics[key], f"{key}/score_high": metrics[key] + missing}
    if table.scored:
        metrics[f"{key}/mean_scored"] = statistics.fmean(s.score or 0.0 for s in table.scored)
    completed = [s.score or 0.0 for s in table.scored if not s.truncated]
    if completed:
        metrics[f"{key}/mean_completed"] = statistics.fmean(completed)
    for name in sorted({name for sample in table.scored for name in sample.values}):
        metrics |= _value(f"{key}/{name}", name, table)
    if table.n > 1:
        full = [[s.score or 0.0 for s in row if s.status == "scored"] for row in table.rows]
        full = [scores for scores in full if len(scores) > 1]
        if full:
            metrics[f"{key}/stderr_within"] = within_error(full)
        metrics[f"{key}-avg@{table.n}"] = metrics[key]
        if table.is_binary:
            metrics |= _votes(key, table, ks)
    return metrics


def _spread(key: str, means: Sequence[float], table: Table) -> dict[str, float]:
    n_clusters = len(set(table.clusters))
    if n_clusters < 2:  # noqa: PLR2004 - a spread needs two
        return {}
    error = mean_error(means, table.clusters)
    if table.in_unit:
        low, high = share_interval(means, table.clusters, error)
    else:
        low, high = t_interval(statistics.fmean(means), error, n_clusters)
    return {f"{key}/stderr": error, f"{key}/ci95_low": low, f"{key}/ci95_high": high}


def _value(key: str, name: str, table: Table) -> dict[str, float]:
    """Mean of a further number of the samples, over those that have it."""
    pairs = [
        (sample.values[name], cluster)
        for row, cluster in zip(table.rows, table.clusters, strict=True)
        for sample in row
        if name in sample.values
    ]
    values, clusters = [value for value, _ in pairs], [cluster for _, cluster in pairs]
    metrics = {key: statistics.fmean(values)}
    if len(set(clusters)) > 1:
        metrics[f"{key}/stderr"] = mean_error(values, clusters)
    return metrics


def _votes(key: str, table: Table, ks: list[int]) -> dict[str, float]:
    """pass@k, pass^k and maj@k: means over questions; what failed is not correct, nor a vote."""
    metrics = {}
    n = table.n
    ks = ks or [1 << i for i in range(n.bit_length()) if 1 << i <= n]
    correct = [sum(sample.score == 1 for sample in row) for row in table.rows]
    answers = [_answers(row) for row in table.rows]
    for k in ks:
        metrics[f"{key}-pass@{k}"] = statistics.fmean(pass_at_k(n, c, k) for c in correct)
        metrics[f"{key}-pass^{k}"] = statistics.fmean(pass_hat_k(n, c, k) for c in correct)
    # graders that do not say what they compared leave nothing to vote on
    if any(answers):
        for k in [k for k in ks if k <= _MAX_COUNTED_K and k < n]:
            metrics[f"{key}-maj@{k}"] = statistics.fmean(majority_at_k(n, a, k) for a in answers)
        metrics[f"{key}-maj@{n}"] = statistics.fmean(majority_of_all(a) for a in answers)
    return metrics


def _answers(row: Iterable[Sample]) -> dict[str, Votes]:
    scores: dict[str, list[float]] = {}
    for sample in row:
        if sample.answer:
            scores.setdefault(sample.answer, []).append(sample.score or 0.0)
    return {answer: Votes(len(found), statistics.fmean(found)) for answer, found in scores.items()}


def _responses(key: str, answered: Sequence[Sample]) -> dict[str, float]:
    if not answered:
        return {}
    lengths = [sample.n_tokens for sample in answered]
    return {
        f"{key}/response_len/mean": statistics.fmean(lengths),
        f"{key}/response_len/median": float(statistics.median(lengths)),
        f"{key}/response_len/max": float(max(lengths)),
        f"{key}/response_len/min": float(min(lengths)),
        f"{key}/repetition_frac": sum(s.repeats for s in answered) / len(answered),
    }


def _versions(key: str, answered: Sequence[Sample], digest: str) -> dict[str, float]:
    """Mean of the steps in the labels, and the share of labels that name other weights.

    An engine that was pinned again to the same digest has a new nonce: that is not mixed.
    """
    if not answered:
        return {}
    metrics = {}
    labels = [sample.weight_version for sample in answered]
    steps = [step for step in map(version_step, labels) if step is not None]
    if steps:
        metrics[f"{key}/weight_version/mean"] = statistics.fmean(steps)
    other = sum(_digest_of(label) not in {None, digest[:8]} for label in labels)
    metrics[f"{key}/weight_version/mixed_version_ratio"] = other / len(labels)
    return metrics


def version_step(weight_version: str) -> int | None:
    """Step in a label ``run:step:digest8:nonce`` (or a bare number); None for anything else."""
    parts = weight_version.split(":")
    text = parts[1] if len(parts) > 1 else parts[0]
    try:
        return int(text)
    except ValueError:
        return None


def _digest_of(label: str) -> str | None:
    parts = label.split(":")
    return parts[2] if len(parts) == 4 else None  # noqa: PLR2004 - run:step:digest8:nonce


def _compared(key: str, new: Table, old: Table, kind: str) -> dict[str, float]:
    """Compare with an earlier point on the questions that have all their scores in both."""
    mine, theirs = new.complete(), old.complete()
    both = sorted(mine.keys() & theirs.keys())
    clusters = [new.clusters[position] for position in both]
    found: Difference | None
    if kind == "perplexity":
        pairs = [(new.rows[p][0], old.rows[p][0]) for p in both]
        found = perplexity_difference(pairs, clusters)
    else:
        found = difference(
            [mine[p] for p in both],
            [theirs[p] for p in both],
            clusters,
            binary=new.n == 1 and new.is_binary and old.is_binary,
        )
    if found is None:
        return {}
    numbers = {
        key: found.delta,
        f"{key}_stderr": found.stderr,
        f"{key}_p": found.p,
        f"{key}_n": float(found.n),
        f"{key}_up": float(found.up),
        f"{key}_down": float(found.down),
        f"{key}_mde": found.detectable,
    }
    return {name: number for name, number in numbers.items() if number is not None}
