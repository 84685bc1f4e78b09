from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.config import Aggregate
from evald.evals.repetition import repeats
from evald.evals.stats.aggregate import aggregate_metrics
from evald.evals.stats.errors import wilson
from evald.evals.stats.set_metrics import Earlier, StatsJob, set_metrics, version_step
from evald.results.samples import SampleRecord

DIGEST = "89abcdef01234567"
LABEL = "run:40:89abcdef:beef"


def sample(question: int, score: float | None, number: int = 0, **fields: Any) -> SampleRecord:
    values: dict[str, Any] = {
        "question": str(question),
        "sample": number,
        "digest": DIGEST,
        "config": "c",
        "status": "error" if score is None else "scored",
        "score": score,
        "n_tokens": 10,
        "weight_version": LABEL,
    }
    return SampleRecord(**{**values, **fields})


class Journals:
    """Writes samples to files, and asks for the metrics."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, samples: list[SampleRecord], name: str = "now") -> Path:
        path = self.directory / f"{name}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in samples))
        return path

    def metrics(
        self, samples: list[SampleRecord], n_questions: int, n_samples: int = 1, **fields: Any
    ) -> dict[str, float]:
        job = StatsJob(
            **{
                "name": "s",
                "kind": "generate",
                "n_samples": n_samples,
                "ks": [],
                "questions": [str(q) for q in range(n_questions)],
                "clusters": [""] * n_questions,
                "journal": str(self.write(samples)),
                "digest": DIGEST,
                "config": "c",
                **fields,
            }
        )
        return set_metrics(job)


@pytest.fixture
def journals(tmp_path: Path) -> Journals:
    return Journals(tmp_path)


def test_the_headline_keeps_the_full_denominator(journals: Journals) -> None:
    metrics = journals.metrics([sample(0, 1.0), sample(1, 1.0), sample(2, None)], 4)
    assert metrics["eval/s"] == 0.5
    assert metrics["eval/s/mean_scored"] == 1.0
    assert metrics["eval/s-none_reward_ratio"] == 0.5
    assert metrics["eval/s/error_ratio"] == 0.25
    assert metrics["eval/s/timeout_ratio"] == 0.25  # it has no record: cut by a deadline


def test_spread_is_over_questions_not_samples(journals: Journals) -> None:
    rows = [(0, 1, 1), (1, 1, 0), (2, 0, 0)]
    samples = [sample(q, float(s), i) for q, *scores in rows for i, s in enumerate(scores)]
    metrics = journals.metrics(samples, 3, 2)
    # means 1, 0.5, 0: sample standard deviation 0.5; 4.303 is t of 2 degrees of freedom
    assert metrics["eval/s"] == metrics["eval/s-avg@2"] == 0.5
    assert metrics["eval/s/stderr"] == pytest.approx(0.5 / 3**0.5)
    assert (metrics["eval/s/ci95_low"], metrics["eval/s/ci95_high"]) == (0.0, 1.0)
    # variances 0, 0.5, 0 of two samples each
    assert metrics["eval/s/stderr_within"] == pytest.approx(0.25**0.5 / 3)


@pytest.mark.parametrize("n", [1, 3, 7, 10, 100, 250])
def test_wilsons_interval_is_exact_at_its_ends(n: int) -> None:
    assert wilson(0, n)[0] == 0.0
    assert wilson(n, n)[1] == 1.0


def test_right_or_wrong_questions_have_wilsons_interval(journals: Journals) -> None:
    metrics = journals.metrics([sample(q, float(q > 0)) for q in range(8)], 8)
    expected = wilson(7, 8)
    assert (metrics["eval/s/ci95_low"], metrics["eval/s/ci95_high"]) == pytest.approx(expected)


def test_clusters_widen_the_error(journals: Journals) -> None:
    samples = [sample(q, float(q < 6)) for q in range(12)]
    apart = journals.metrics(samples, 12)
    together = journals.metrics(samples, 12, clusters=[f"doc{q // 3}" for q in range(12)])
    assert together["eval/s/stderr"] > 1.5 * apart["eval/s/stderr"]


def test_one_question_or_one_cluster_has_no_standard_error(journals: Journals) -> None:
    one = journals.metrics([sample(0, 1.0)], 1)
    same = journals.metrics([sample(0, 1.0), sample(1, 0.0)], 2, clusters=["a", "a"])
    assert not [name for name in [*one, *same] if "stderr" in name or "ci95" in name]


def test_no_sample_at_all_leaves_out_what_is_undefined(journals: Journals) -> None:
    metrics = journals.metrics([], 2, 2)
    assert metrics["eval/s"] == 0.0
    assert metrics["eval/s-none_reward_ratio"] == 1.0
    assert not [name for name in metrics if "response_len" in name or "mean_scored" in name]


def test_ratios_lengths_and_versions(journals: Journals) -> None:
    samples = [
        sample(0, 1.0, truncated=True),
        sample(1, 0.0, n_tokens=30, no_answer=True, repeats=True, unfinished_thinking=True),
        sample(2, None, status="grader_error", n_tokens=20),
        sample(3, None, status="timeout", weight_version="", n_tokens=0),
    ]
    metrics = journals.metrics(samples, 4)
    for name, expected in {
        "-truncated_ratio": 0.25,
        "/no_answer_ratio": 0.25,
        "/unfinished_thinking_ratio": 0.25,
        "/grader_error_ratio": 0.25,
        "/timeout_ratio": 0.25,
        "/mean_completed": 0.0,
        "/response_len/mean": 20.0,
        "/response_len/median": 20.0,
        "/response_len/max": 30.0,
        "/response_len/min": 10.0,
        "/repetition_frac": 1 / 3,
        "/weight_version/mean": 40.0,
        "/weight_version/mixed_version_ratio": 0.0,
    }.items():
        assert metrics[f"eval/s{name}"] == pytest.approx(expected), name


def test_mixed_means_other_weights_not_another_pin_of_the_same(journals: Journals) -> None:
    labels = [LABEL, "run:40:89abcdef:other", "run:30:01234567:beef", "default"]
    samples = [sample(q, 1.0, weight_version=label) for q, label in enumerate(labels)]
    metrics = journals.metrics(samples, 4)
    assert metrics["eval/s/weight_version/mixed_version_ratio"] == 0.25
    assert metrics["eval/s/weight_version/mean"] == pytest.approx((40 + 40 + 30) / 3)
    bare = journals.metrics([sample(0, 1.0, weight_version="default")], 1)
    assert "eval/s/weight_version/mean" not in bare


def test_samples_of_other_weights_or_settings_and_torn_lines_do_not_count(
    journals: Journals,
) -> None:
    others = [sample(0, 1.0, digest="other"), sample(1, 1.0, config="other"), sample(2, None)]
    path = journals.write([*others, sample(2, 1.0)])
    path.write_bytes(path.read_bytes() + b'{"question": "1", "sam')
    lines = path.read_bytes()
    metrics = journals.metrics([], 3)
    path.write_bytes(lines)
    job = {"journal": str(path)}
    metrics = set_metrics(
        StatsJob("s", "generate", 1, [], ["0", "1", "2"], [""] * 3, job["journal"], DIGEST, "c")
    )
    assert metrics["eval/s-none_reward_ratio"] == pytest.approx(2 / 3)
    assert metrics["eval/s/mean_scored"] == 1.0  # the newest record of a sample counts


def test_votes_need_several_samples_of_zero_or_one(journals: Journals) -> None:
    rows = {0: "aab", 1: "abb", 2: "cde"}
    samples = [
        sample(q, float(letter == "a"), i, answer=letter)
        for q, letters in rows.items()
        for i, letter in enumerate(letters)
    ]
    metrics = journals.metrics(samples, 3, 3)
    assert metrics["eval/s-pass@1"] == pytest.approx(metrics["eval/s"])
    assert metrics["eval/s-pass@2"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert metrics["eval/s-pass^2"] == pytest.approx((1 / 3 + 0 + 0) / 3)
    assert metrics["eval/s-maj@1"] == pytest.approx(metrics["eval/s"])
    assert metrics["eval/s-maj@3"] == pytest.approx((1 + 0 + 0) / 3)
    assert "eval/s-pass@4" not in metrics
    assert "eval/s-pass@3" in journals.metrics(samples, 3, 3, ks=[3])
    shades = journals.metrics([sample(0, 0.5), sample(0, 1.0, 1)], 1, 2)
    mute = journals.metrics([sample(0, 1.0), sample(0, 0.0, 1)], 1, 2)
    assert not [name for name in shades if "pass" in name or "maj" in name]
    assert not [name for name in mute if "maj" in name]


def test_a_point_is_compared_on_the_questions_that_both_scored(journals: Journals) -> None:
    before = [0, 0, 0, 0, 1, 1, 1, None]
    now = [1, 1, 1, 0, 1, 1, 0, 1]
    old = journals.write(
        [sample(q, None if s is None else float(s), digest="old") for q, s in enumerate(before)],
        "old",
    )
    metrics = journals.metrics(
        [sample(q, float(s)) for q, s in enumerate(now)],
        8,
        earlier=[
            Earlier("prev", str(old), "old"),
            Earlier("baseline", str(old.with_name("gone")), "x"),
        ],
    )
    assert metrics["eval/s/delta_prev"] == pytest.approx(2 / 7)
    assert metrics["eval/s/delta_prev_n"] == 7
    assert (metrics["eval/s/delta_prev_up"], metrics["eval/s/delta_prev_down"]) == (3, 1)
    # three heads, one tail of a fair coin, twice the tail: 2 * (1 + 4) / 16
    assert metrics["eval/s/delta_prev_p"] == pytest.approx(0.625)
    ratio = metrics["eval/s/delta_prev_mde"] / metrics["eval/s/delta_prev_stderr"]
    assert ratio == pytest.approx(2.8016, rel=1e-4)
    assert not [name for name in metrics if "baseline" in name]


def test_perplexity_is_a_ratio_of_sums(journals: Journals) -> None:
    def text(question: int, nll: float, tokens: int, **fields: Any) -> SampleRecord:
        values = {"nll": nll, "tokens": float(tokens), "bytes": 4.0 * tokens}
        return sample(question, nll / tokens, values=values, **fields)

    texts = [text(0, 10.0, 10), text(1, 400.0, 200), sample(2, None)]
    old = journals.write([text(0, 20.0, 10, digest="old"), text(1, 500.0, 200, digest="old")], "o")
    metrics = journals.metrics(
        texts, 3, kind="perplexity", earlier=[Earlier("prev", str(old), "old")]
    )
    assert metrics["eval/s"] == pytest.approx(410 / 210)
    assert metrics["eval/s/perplexity"] == pytest.approx(2.718281828 ** (410 / 210))
    assert metrics["eval/s/bits_per_byte"] == pytest.approx(410 / 0.6931471806 / 840)
    assert metrics["eval/s/tokens"] == 210
    assert metrics["eval/s/delta_prev"] == pytest.approx(-110 / 210)
    assert (metrics["eval/s/delta_prev_up"], metrics["eval/s/delta_prev_down"]) == (0, 2)
    assert metrics["eval/s-none_reward_ratio"] == pytest.approx(1 / 3)
    assert not [name for name in metrics if "response_len" in name or "pass" in name]


def test_options_have_their_further_numbers(journals: Journals) -> None:
    samples = [
        sample(q, float(q < 2), values={"acc_norm": float(q < 1), "gold_share": 0.25 * q})
        for q in range(4)
    ]
    metrics = journals.metrics(samples, 4, kind="loglikelihood_choice")
    assert metrics["eval/s/acc_norm"] == 0.25
    assert metrics["eval/s/gold_share"] == 0.375
    assert metrics["eval/s/acc_norm/stderr"] == pytest.approx(0.25)
    assert not [name for name in metrics if "response_len" in name]


def test_aggregates_put_sets_and_their_errors_together() -> None:
    metrics = {
        "eval/a": 0.2,
        "eval/a/stderr": 0.03,
        "eval/a/ci95_low": 0.14,
        "eval/a/ci95_high": 0.28,
        "eval/a/delta_prev": 0.1,
        "eval/a/delta_prev_stderr": 0.02,
        "eval/b": 0.8,
        "eval/b/stderr": 0.04,
        "eval/b/ci95_low": 0.72,
        "eval/b/ci95_high": 0.86,
    }
    questions = {"a": 30, "b": 10}
    macro = aggregate_metrics(Aggregate(name="all", sets=["a", "b"]), metrics, questions)
    assert macro["eval/all"] == pytest.approx(0.5)
    assert macro["eval/all/stderr"] == pytest.approx(0.025)
    assert macro["eval/all/ci95_low"] == pytest.approx(0.5 - 0.05)
    assert macro["eval/all/ci95_high"] == pytest.approx(0.5 + 0.5 * 0.1)
    assert "eval/all/delta_prev" not in macro  # b has none
    micro = aggregate_metrics(
        Aggregate(name="all", sets=["a", "b"], how="micro"), metrics, questions
    )
    assert micro["eval/all"] == pytest.approx(0.35)
    texts = {"eval/a": 1.0, "eval/a/tokens": 900.0, "eval/b": 2.0, "eval/b/tokens": 100.0}
    both = Aggregate(name="all", sets=["a", "b"], how="micro")
    assert aggregate_metrics(both, texts, questions)["eval/all"] == pytest.approx(1.1)
    alone = aggregate_metrics(Aggregate(name="all", sets=["a"]), metrics, questions)
    assert (alone["eval/all/delta_prev"], alone["eval/all/delta_prev_stderr"]) == (0.1, 0.02)
    assert aggregate_metrics(Aggregate(name="all", sets=["c"]), metrics, questions) == {}


def test_repetition_is_looked_for_at_the_end_of_long_responses() -> None:
    noise = "".join(chr(random.Random(i).randint(32, 126)) for i in range(12_000))  # noqa: S311
    assert not repeats("ab" * 4_000)
    assert not repeats(noise)
    assert repeats(noise + "ab" * 6_000)
    assert not repeats("ab" * 6_000 + noise)


@pytest.mark.parametrize(
    ("label", "step"),
    [(LABEL, 40), ("17", 17), ("default", None), ("a:b:c:d", None), ("", None), ("r:-1:x:y", -1)],
)
def test_the_step_of_a_label(label: str, step: int | None) -> None:
    assert version_step(label) == step
