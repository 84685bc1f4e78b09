"""Files of the lm-evaluation-harness, in the form that lm_eval 0.4.13 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evald.blackbox.lm_eval import convert_sample
from evald.postures.blackbox.results import BoxResults, ResultsRefused, read_results
from evald.postures.blackbox.samples import write_samples
from evald.results.samples import SampleJournal

DATE = "2026-01-02T03-04-05.678901"
#: gsm8k has one metric with two filters, arc two metrics, the group no number of documents.
RESULTS: dict[str, Any] = {
    "results": {
        "gsm8k": {
            "name": "gsm8k",
            "alias": "gsm8k",
            "sample_len": 4,
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.1,
            "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": 0.2,
        },
        "arc": {
            "alias": "arc",
            "acc,none": 0.3,
            "acc_stderr,none": "N/A",
            "acc_norm,none": 0.4,
            "acc_norm_stderr,none": 0.05,
        },
        "my group/all": {"alias": "all", "acc,none": 0.35, "acc_stderr,none": 0.02},
        "empty": {"alias": " - empty"},
    },
    "configs": {
        "gsm8k": {"metric_list": [{"metric": "exact_match"}]},
        "arc": {"metric_list": [{"metric": "acc_norm"}, {"metric": "acc"}]},
    },
    "n-samples": {
        "gsm8k": {"original": 8, "effective": 4},
        "arc": {"original": 3, "effective": 3},
    },
    "n-shot": {"gsm8k": 5},
    "lm_eval_version": "0.4.13",
    "pretty_env_info": "long",
}


def write(directory: Path, content: Any = RESULTS, date: str = DATE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"results_{date}.json").write_text(json.dumps(content))
    return directory


def read(directory: Path) -> BoxResults:
    results = read_results(directory)
    assert isinstance(results, BoxResults)
    return results


def test_tasks_become_sets(tmp_path: Path) -> None:
    write(tmp_path / "model_name")  # wherever below the directory
    results = read(tmp_path)
    gsm8k, arc, group = results.sets
    assert gsm8k.metrics == {
        "eval/gsm8k": 0.25,
        "eval/gsm8k/stderr": 0.1,
        "eval/gsm8k/ci95_low": pytest.approx(0.054, abs=1e-4),
        "eval/gsm8k/ci95_high": pytest.approx(0.446, abs=1e-4),
        "eval/gsm8k/exact_match/strict-match": 0.25,
        "eval/gsm8k/exact_match_stderr/strict-match": 0.1,
        "eval/gsm8k/exact_match/flexible-extract": 0.5,
        "eval/gsm8k/exact_match_stderr/flexible-extract": 0.2,
    }
    # the task names acc_norm first
    assert arc.metrics["eval/arc"] == arc.metrics["eval/arc/acc_norm"] == 0.4
    assert "eval/arc/acc_stderr" not in arc.metrics
    assert group.name == "my_group_all"
    assert group.metrics["eval/my_group_all"] == 0.35
    assert gsm8k.counts is not None
    assert (gsm8k.counts.n_total, gsm8k.counts.n_scored) == (4, 4)
    assert group.counts is None
    assert results.provenance == {"lm_eval": {"lm_eval_version": "0.4.13", "n-shot": {"gsm8k": 5}}}


def test_several_runs_of_one_point_are_put_together(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", {"results": {"arc": {"acc,none": 0.9}, "other": {"acc,none": 0.1}}}, "z")
    metrics = {one.name: one.metrics[f"eval/{one.name}"] for one in read(tmp_path).sets}
    assert metrics == {"gsm8k": 0.25, "arc": 0.9, "my_group_all": 0.35, "other": 0.1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], 'it has no table "results"'),
        ({"results": []}, 'it has no table "results"'),
        ({"results": {"arc": {"acc,none": "?"}}}, "set arc: metric score must be a number"),
        ({"results": {"arc": {"acc,none": float("nan")}}}, "metric score is nan, but only finite"),
        ({"results": {"arc": None}}, '"sets" must be a table of at least one'),
    ],
)
def test_what_the_harness_would_not_write(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(ResultsRefused) as refused:
        read_results(write(tmp_path, content))
    assert says in str(refused.value)


def sample(doc: int, filter_name: str, score: Any, responses: list[Any]) -> dict[str, Any]:
    return {
        "doc_id": doc,
        "doc": {"question": "?"},
        "target": "4",
        "filter": filter_name,
        "filtered_resps": responses,
        "exact_match": score,
    }


def test_samples_are_those_of_the_headline(tmp_path: Path) -> None:
    write(tmp_path)
    lines = [
        sample(0, "strict-match", 1.0, ["4"]),
        sample(0, "flexible-extract", 1.0, ["4"]),
        sample(1, "strict-match", 0.0, ["5"]),
    ]
    (tmp_path / f"samples_gsm8k_{DATE}.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    (gsm8k, arc, _) = read(tmp_path).sets
    assert arc.samples == []
    journal = SampleJournal(tmp_path / "samples", "gsm8k")
    counts = write_samples(gsm8k, journal, digest="d", config="c")
    assert counts.n_scored == 2
    rows = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [(row["question"], row["score"], row["response"]) for row in rows] == [
        ("0", 1.0, "4"),
        ("1", 0.0, "5"),
    ]
    assert rows[0]["reference"] == "4"
    assert rows[0]["extra"]["doc"] == {"question": "?"}


@pytest.mark.parametrize(
    "rest",
    [
        {"configs": [1], "n-samples": "x"},
        {"configs": {"arc": {"metric_list": 5}}, "n-samples": {"arc": [1]}},
        {"configs": {"arc": {"metric_list": ["acc"]}}, "n-samples": {"arc": {"effective": "all"}}},
    ],
)
def test_odd_surroundings_do_not_matter(tmp_path: Path, rest: dict[str, Any]) -> None:
    write(tmp_path, {"results": {"arc": {"acc,none": 0.5, "acc_stderr,none": None}}, **rest})
    with pytest.raises(ResultsRefused, match="acc_stderr must be a number, got None"):
        read_results(tmp_path)
    write(tmp_path, {"results": {"arc": {"acc,none": 0.5}, "odd": {"x_stderr,none": 1}}, **rest})
    assert [one.metrics for one in read(tmp_path).sets] == [
        {"eval/arc": 0.5, "eval/arc/acc": 0.5},
        {"eval/odd": 1.0, "eval/odd/x_stderr": 1.0},
    ]


@pytest.mark.parametrize(
    ("score", "expected"),
    [(True, 1.0), (0.5, 0.5), (float("nan"), None), ([0.1, 7], None), (None, None)],
)
def test_scores_that_are_no_number_are_left_out(score: Any, expected: float | None) -> None:
    converted = convert_sample(
        sample(0, "none", score, [[-1.5, False], [-2.0, True]]), "exact_match,none"
    )
    assert converted is not None
    assert converted["score"] == expected
    assert converted["response"] == "[[-1.5, false], [-2.0, true]]"
