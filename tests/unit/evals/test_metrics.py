from __future__ import annotations

import random
from itertools import combinations

import pytest

from evald.evals.metrics import (
    SampleOutcome,
    pass_at_k,
    repeats,
    set_metrics,
    standard_error,
    version_step,
)

DIGEST = "0123456789abcdef"
LABEL = "run:40:01234567:beef"


def scored(question: int, score: float, n_tokens: int = 10, **fields: object) -> SampleOutcome:
    base = SampleOutcome(question, "scored", score, n_tokens=n_tokens, weight_version=LABEL)
    values = {name: getattr(base, name) for name in base.__struct_fields__}
    return SampleOutcome(**{**values, **fields})


def test_the_headline_keeps_the_full_denominator() -> None:
    outcomes = [scored(0, 1.0), scored(1, 1.0), SampleOutcome(2, "error")]
    metrics = set_metrics("s", 4, 1, outcomes, DIGEST)
    assert metrics["eval/s"] == 0.5
    assert metrics["eval/s/mean_scored"] == 1.0
    assert metrics["eval/s-none_reward_ratio"] == 0.5


def test_spread_is_over_questions_not_samples() -> None:
    outcomes = [scored(q, float(s)) for q, s in [(0, 1), (0, 1), (1, 1), (1, 0), (2, 0), (2, 0)]]
    metrics = set_metrics("s", 3, 2, outcomes, DIGEST)
    # means 1, 0.5, 0: sample standard deviation 0.5
    assert metrics["eval/s"] == 0.5
    assert metrics["eval/s/stderr"] == pytest.approx(0.5 / 3**0.5)
    assert metrics["eval/s/ci95_low"] == pytest.approx(0.5 - 1.959964 * 0.5 / 3**0.5)
    assert metrics["eval/s/ci95_high"] == pytest.approx(0.5 + 1.959964 * 0.5 / 3**0.5)
    assert standard_error([0.3, 0.3]) == 0.0


def test_one_question_has_no_standard_error() -> None:
    metrics = set_metrics("s", 1, 1, [scored(0, 1.0)], DIGEST)
    assert not [name for name in metrics if "stderr" in name or "ci95" in name]


def test_no_sample_at_all_leaves_out_what_is_undefined() -> None:
    metrics = set_metrics("s", 2, 2, [], DIGEST)
    assert metrics["eval/s"] == 0.0
    assert metrics["eval/s-none_reward_ratio"] == 1.0
    assert not [name for name in metrics if "response_len" in name or "mean_scored" in name]


def test_ratios_lengths_and_versions() -> None:
    outcomes = [
        scored(0, 1.0, 10, truncated=True),
        scored(1, 0.0, 30, no_answer=True, repeats=True),
        SampleOutcome(2, "grader_error", n_tokens=20, weight_version=LABEL),
        SampleOutcome(3, "timeout"),
    ]
    metrics = set_metrics("s", 4, 1, outcomes, DIGEST)
    assert metrics["eval/s-truncated_ratio"] == 0.25
    assert metrics["eval/s/no_answer_ratio"] == 0.25
    assert metrics["eval/s/response_len/mean"] == 20.0
    assert metrics["eval/s/response_len/median"] == 20.0
    assert metrics["eval/s/response_len/max"] == 30.0
    assert metrics["eval/s/response_len/min"] == 10.0
    assert metrics["eval/s/repetition_frac"] == pytest.approx(1 / 3)
    assert metrics["eval/s/weight_version/mean"] == 40.0
    assert metrics["eval/s/weight_version/mixed_version_ratio"] == 0.0


def test_mixed_means_other_weights_not_another_pin_of_the_same() -> None:
    outcomes = [
        scored(0, 1.0),
        scored(1, 1.0, weight_version="run:40:01234567:other"),
        scored(2, 1.0, weight_version="run:30:89abcdef:beef"),
        scored(3, 1.0, weight_version="default"),
    ]
    metrics = set_metrics("s", 4, 1, outcomes, DIGEST)
    assert metrics["eval/s/weight_version/mixed_version_ratio"] == 0.25
    assert metrics["eval/s/weight_version/mean"] == pytest.approx((40 + 40 + 30) / 3)


def test_labels_without_a_step_have_no_mean() -> None:
    metrics = set_metrics("s", 1, 1, [scored(0, 1.0, weight_version="default")], DIGEST)
    assert "eval/s/weight_version/mean" not in metrics


def test_pass_at_k_for_powers_of_two_up_to_n() -> None:
    outcomes = [scored(0, float(s)) for s in (1, 0, 0)] + [SampleOutcome(1, "error")] * 3
    metrics = set_metrics("s", 2, 3, outcomes, DIGEST)
    assert metrics["eval/s-pass@1"] == pytest.approx(metrics["eval/s"])
    assert metrics["eval/s-pass@2"] == pytest.approx((1 - 1 / 3) / 2)
    assert "eval/s-pass@4" not in metrics


def test_pass_at_k_needs_several_samples_with_scores_of_zero_or_one() -> None:
    single = set_metrics("s", 1, 1, [scored(0, 1.0)], DIGEST)
    shades = set_metrics("s", 1, 2, [scored(0, 0.5), scored(0, 1.0)], DIGEST)
    assert not [name for name in [*single, *shades] if "pass@" in name]


def test_pass_at_k_is_the_share_of_all_subsets() -> None:
    draw = random.Random(0)  # noqa: S311 - a test
    for _ in range(50):
        samples = [draw.random() < 0.4 for _ in range(draw.randint(1, 7))]
        for k in range(1, len(samples) + 1):
            subsets = list(combinations(samples, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(expected)


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
