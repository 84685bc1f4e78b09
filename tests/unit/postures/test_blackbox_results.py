"""What a black box has written: taken as it is meant, or refused with what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.postures.blackbox import results as box_results
from evald.postures.blackbox.results import (
    BoxResults,
    BoxSet,
    ResultsRefused,
    Skipped,
    read_results,
    read_skip,
    skipped,
)
from evald.postures.blackbox.samples import MAX_LINE_BYTES, BoxSample, write_samples
from evald.results.follow import split_lines
from evald.results.records import Counts
from evald.results.samples import SampleJournal


def write(directory: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "results.json").write_text(text)
    return directory


def read(directory: Path, content: Any) -> BoxResults:
    results = read_results(write(directory, content))
    assert isinstance(results, BoxResults)
    return results


def one_set(row: Any, name: str = "math") -> dict[str, Any]:
    return {"sets": {name: row}}


def test_metrics_get_the_names_that_dashboards_show(tmp_path: Path) -> None:
    metrics = {
        "score": 1,
        "pass@8": 0.5,
        "truncated_ratio": 0.25,
        "none_reward_ratio": 0.0,
        "response_len/mean": 12,
        "acc,none": -3.5,
    }
    (one,) = read(tmp_path, one_set({"metrics": metrics, "seconds": 3})).sets
    assert one.metrics == {
        "eval/math": 1.0,
        "eval/math-pass@8": 0.5,
        "eval/math-truncated_ratio": 0.25,
        "eval/math-none_reward_ratio": 0.0,
        "eval/math/response_len/mean": 12.0,
        "eval/math/acc,none": -3.5,
    }
    assert (one.seconds, one.counts, one.samples) == (3.0, None, [])


def test_the_rest_of_the_point(tmp_path: Path) -> None:
    content = {"sets": {"a": 0.5, "b": 1}, "engines": ["e"], "weight_versions": ["v"]}
    results = read(tmp_path, {**content, "provenance": {"x": [1]}})
    assert [one.metrics for one in results.sets] == [{"eval/a": 0.5}, {"eval/b": 1.0}]
    assert (results.engines, results.weight_versions) == (["e"], ["v"])
    assert results.provenance == {"x": [1]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"n_total": 10}, Counts(n_total=10, n_scored=10)),
        ({"n_total": 10, "n_error": 3}, Counts(n_total=10, n_scored=7, n_error=3)),
        ({"n_scored": 4, "n_timeout": 1}, Counts(n_total=5, n_scored=4, n_timeout=1)),
        (
            {"n_scored": 4, "n_truncated": 2, "n_no_answer": 1, "n_grader_error": 1},
            Counts(n_total=5, n_scored=4, n_truncated=2, n_no_answer=1, n_grader_error=1),
        ),
    ],
)
def test_counts_are_completed(tmp_path: Path, given: dict[str, int], expected: Counts) -> None:
    (one,) = read(tmp_path, one_set({"metrics": {"score": 1}, "counts": given})).sets
    assert one.counts == expected


METRICS = {"metrics": {"score": 1}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "a JSON object is expected, got []"),
        ({}, '"sets" must be a table of at least one eval set, got None'),
        ({"sets": {}}, '"sets" must be a table of at least one eval set'),
        ({"sets": ["math"]}, '"sets" must be a table'),
        (one_set({}), 'set math: "metrics" must be a table of numbers, got None'),
        (one_set("0.5"), 'set math: "metrics" must be a table of numbers'),
        (one_set({"metrics": {}}), 'set math: "metrics" must be a table of numbers, got {}'),
        (one_set({"metrics": {"acc": "0.5"}}), "set math: metric acc must be a number, got '0.5'"),
        (one_set({"metrics": {"acc": True}}), "set math: metric acc must be a number, got True"),
        (one_set({"metrics": {"acc": None}}), "set math: metric acc must be a number, got None"),
        ('{"sets": {"math": NaN}}', "set math: metric score is nan, but only finite numbers"),
        ('{"sets": {"math": {"metrics": {"f": -Infinity}}}}', "metric f is -inf, but only finite"),
        ('{"sets": {"math": 1e999}}', "metric score is inf, but only finite"),
        ('{"sets": {"math": 1' + "0" * 400 + "}}", "metric score is inf, but only finite"),
        (one_set({"metrics": {"": 1}}), "set math: '' is no name for a metric"),
        (one_set({"metrics": {"a\nb": 1}}), "is no name for a metric"),
        (one_set(METRICS, "../up"), "set '../up': a name has letters, digits"),
        (one_set(METRICS, ""), "set '': a name has letters, digits"),
        (one_set({**METRICS, "seconds": "1"}), "set math: seconds must be a number, got '1'"),
        (one_set({**METRICS, "counts": {"n": 1}}), "counts {'n': 1}: unknown are n"),
        (one_set({**METRICS, "counts": [1]}), "counts [1]: Expected `object`"),
        (one_set({**METRICS, "counts": {"n_total": 1.5}}), "Expected `int`"),
        (one_set({**METRICS, "counts": {"n_total": 3, "n_scored": 1}}), "n_total must be n_scored"),
        (one_set({**METRICS, "counts": {"n_error": -1}}), "none may be negative"),
        (one_set({**METRICS, "samples": 5}), 'set math: "samples" must be a list or a file'),
        (one_set({**METRICS, "samples": "s.jsonl"}), "there is no file of samples "),
        ({**one_set(METRICS), "engines": "e"}, "\"engines\" must be a list of texts, got 'e'"),
        ({**one_set(METRICS), "provenance": [1]}, '"provenance" must be a table, got [1]'),
        ({**one_set(METRICS), "provenance": {"x": "y" * 70_000}}, '"provenance" has more than'),
        ('{"sets": {"math": 1' + "0" * 5000 + "}}", "cannot use "),
        ({"skip": 3}, '"skip" must be a reason, got 3'),
    ],
)
def test_what_is_no_result_is_refused_in_words(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(ResultsRefused) as refused:
        read_results(write(tmp_path, content))
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"cannot use {tmp_path}/results.json: ")
    assert len(str(refused.value)) < 500


def test_too_large_a_file_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_results, "MAX_RESULTS_BYTES", 50)
    with pytest.raises(ResultsRefused, match="has 60 bytes, allowed are 50; write samples into a"):
        read_results(write(tmp_path, " " * 60))


def test_nothing_or_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(ResultsRefused, match=r"neither results.json nor results_\*.json"):
        read_results(tmp_path)
    assert read_skip(tmp_path) is None
    (tmp_path / "results.json").mkdir()
    with pytest.raises(ResultsRefused, match="no regular file"):
        read_results(tmp_path)


def test_a_skip_is_an_answer(tmp_path: Path) -> None:
    write(tmp_path, {"skip": "no_judge", "detail": "it is\ndown"})
    assert read_results(tmp_path) == read_skip(tmp_path) == Skipped("no_judge", "it is down")
    write(tmp_path, one_set(METRICS))
    assert read_skip(tmp_path) is None


@pytest.mark.parametrize(
    ("reason", "detail", "expected"),
    [
        ("no_judge", "", ("no_judge", "")),
        ("No judge!", "", ("no_judge", "No judge!")),
        ("no judge", "it is down", ("no_judge", "no judge: it is down")),
        ("???", "", ("unnamed", "???")),
        ("x" * 80, "", ("x" * 64, "x" * 80)),
        ("ok", "y" * 900, ("ok", "y" * 500)),
    ],
)
def test_reasons_fit_into_metric_names(reason: str, detail: str, expected: tuple[str, str]) -> None:
    assert skipped(reason, detail) == Skipped(*expected)


# --- samples -------------------------------------------------------------------------------------


def box_set(samples: list[Any] | Path) -> BoxSet:
    return BoxSet(name="math", metrics={}, counts=None, seconds=None, samples=samples)


def written(tmp_path: Path, samples: list[Any] | Path) -> tuple[Counts, list[BoxSample]]:
    journal = SampleJournal(tmp_path / "samples", "math")
    counts = write_samples(box_set(samples), journal, digest="d", config="c")
    lines, torn = split_lines(journal.path.read_bytes())
    assert not torn
    return counts, [msgspec.json.decode(line, type=BoxSample) for line in lines]


def test_samples_are_written_and_counted(tmp_path: Path) -> None:
    counts, samples = written(
        tmp_path,
        [
            {"question": 5, "score": True, "response": "x", "truncated": True, "why": {"a": 1}},
            {"question": "q", "sample": 1, "score": 0, "no_answer": True},
            {"score": None},
            {"status": "timeout"},
            {"status": "grader_error", "grader_reason": "judge"},
        ],
    )
    assert counts == Counts(
        n_total=5,
        n_scored=2,
        n_truncated=1,
        n_no_answer=1,
        n_error=1,
        n_grader_error=1,
        n_timeout=1,
    )
    assert [sample.question for sample in samples] == ["5", "q", "3", "4", "5"]
    assert [sample.score for sample in samples] == [1.0, 0.0, None, None, None]
    assert samples[0].extra == {"why": {"a": 1}}
    assert {(sample.digest, sample.config) for sample in samples} == {("d", "c")}


def test_samples_of_an_earlier_attempt_are_replaced(tmp_path: Path) -> None:
    written(tmp_path, [{"score": 1}] * 3)
    _, samples = written(tmp_path, [{"score": 0.5}])
    assert [sample.score for sample in samples] == [0.5]


def test_a_file_of_samples_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text('{"question": "half \\ud83d", "score": 1}\n\n{"score": 0, "p": NaN}')
    counts, samples = written(tmp_path, file)
    assert counts.n_scored == 2
    assert [sample.question for sample in samples] == ["half ?", "2"]
    assert samples[1].extra == {"p": None}


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (["x"], "set math: sample 1: an object is expected, got str"),
        ([{}, {"score": "1"}], "set math: sample 2: Expected `float | null`, got `str`"),
        ([{"score": float("nan")}], "sample 1: score is nan, but only finite numbers"),
        ([{"response": ["a"]}], "Expected `str`, got `array` - at `$.response`"),
        ([{"score": 10**400}], "sample 1: "),
        ([{"question": 10**5000}], "sample 1: "),
        ([{"extra": 10**5000}], "sample 1: "),
        ([{"status": "good"}], "sample 1: Invalid enum value 'good'"),
    ],
)
def test_a_bad_sample_is_named(tmp_path: Path, samples: list[Any], says: str) -> None:
    with pytest.raises(ResultsRefused) as refused:
        written(tmp_path, samples)
    assert says in str(refused.value)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text('{"score": 1}\n{"score": \n')
    with pytest.raises(ResultsRefused, match=r"s.jsonl, line 2: it is not JSON"):
        written(tmp_path, file)
    file.write_text('{"score": 1, "response": "' + "x" * MAX_LINE_BYTES + '"}')
    with pytest.raises(ResultsRefused, match="line 1: longer than 16,777,216 bytes"):
        written(tmp_path, file)
    file.unlink()
    with pytest.raises(ResultsRefused, match=r"cannot read .*: No such file"):
        written(tmp_path, file)


def test_a_pipe_in_the_place_of_results_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "results.json")
    with pytest.raises(ResultsRefused, match="no regular file"):
        read_results(tmp_path)


@pytest.mark.parametrize("name", ["step", "lag_steps", "duration_seconds", "skipped_busy"])
def test_a_set_must_not_take_the_name_of_a_metric_of_evalds_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(ResultsRefused, match="evald's own"):
        read(tmp_path, one_set(0.5, name))
