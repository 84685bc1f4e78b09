"""Stored samples by page and filter, and one of them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald.evals.rows import Question
from evald.results.compressed import compress
from evald.results.modes import Modes
from evald.results.sample_heads import FILTERS, Filter
from evald.results.samples import SampleRecord
from evald.status.sample_pages import AskedQuestion, SamplePage, SamplePages

NEW, OLD = "r/step/2/r0", "r/step/1/r0"


def sample(question: str, score: float | None = 1.0, number: int = 0, **fields: Any) -> bytes:
    given: dict[str, Any] = {"digest": "d", "config": "c", "status": "scored"} | fields
    if score is None:
        given["status"] = "error"
    record = SampleRecord(question=question, sample=number, score=score, **given)
    return msgspec.json.encode(record) + b"\n"


def write(results: Path, step: int, *lines: bytes) -> Path:
    directory = results / "samples" / "r" / f"step_{step}.r0"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "a.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def find_question(set_name: str, question: str) -> AskedQuestion | None:
    if (set_name, question) != ("a", "q0"):
        return None
    return AskedQuestion(Question(id=question, prompt="What?"), "data")


@pytest.fixture
def pages(tmp_path: Path) -> SamplePages:
    return SamplePages(tmp_path, find_question=find_question)


def asked(pages: SamplePages, chosen: Filter = "all", against: str = OLD) -> SamplePage:
    return pages.page(NEW, "a", against, chosen, 0, 100)


def names(page: SamplePage) -> list[tuple[str, int]]:
    return [(one.question, one.sample) for one in page.samples]


def test_filters(tmp_path: Path, pages: SamplePages) -> None:
    write(
        tmp_path,
        2,
        sample("right"),
        sample("wrong", 0.0, no_answer=True),
        sample("half", 0.5, truncated=True),
        sample("failed", None),
    )
    assert asked(pages).n == {
        "all": 4, "wrong": 2, "truncated": 1, "no_answer": 1, "failed": 1, "flipped": 0,
    }  # fmt: skip
    found = {name: [q for q, _ in names(asked(pages, name))] for name in FILTERS}
    assert found == {
        "all": ["right", "wrong", "half", "failed"],
        "wrong": ["wrong", "half"],
        "truncated": ["half"],
        "no_answer": ["wrong"],
        "failed": ["failed"],
        "flipped": [],
    }


def test_flips_are_of_questions_whose_mean_changed(tmp_path: Path, pages: SamplePages) -> None:
    write(
        tmp_path, 1,
        sample("fell"), sample("fell", 1.0, 1), sample("rose", 0.0), sample("same"),
        sample("swapped", 1.0), sample("swapped", 0.0, 1), sample("gap"),
    )  # fmt: skip
    write(
        tmp_path, 2,
        sample("fell"), sample("fell", 0.0, 1), sample("rose"), sample("same"),
        sample("swapped", 0.0), sample("swapped", 1.0, 1), sample("gap", None), sample("new"),
    )  # fmt: skip
    page = asked(pages, "flipped")
    assert [(one.question, one.sample, one.moved) for one in page.samples] == [
        ("fell", 0, -0.5), ("fell", 1, -0.5), ("rose", 0, 1.0),
    ]  # fmt: skip
    assert asked(pages, "flipped", against="").samples == []
    assert asked(pages, "flipped", against="r/step/7/r0").samples == []
    # measured otherwise: nothing can be said
    write(tmp_path, 1, sample("rose", 0.0, config="other"))
    assert asked(pages, "flipped").samples == []


def test_the_newest_of_each_counts_and_only_of_this_config(
    tmp_path: Path, pages: SamplePages
) -> None:
    path = write(
        tmp_path, 2, sample("gone", config="old"), sample("a", None), b"{torn\n", sample("a", 0.0)
    )
    assert names(asked(pages)) == [("a", 0)]
    with path.open("ab") as file:  # a point that runs
        file.write(sample("b") + b'{"question": "half writ')
    assert names(asked(pages)) == [("a", 0), ("b", 0)]
    assert asked(pages).samples[0].score == 0.0


def test_pages_and_excerpts_also_of_compressed_samples(tmp_path: Path, pages: SamplePages) -> None:
    lines = [
        sample(f"q{n}", 0.0, response="x" * 9000 + str(n), reference=["é", n]) for n in range(9)
    ]
    path = write(tmp_path, 2, *lines)
    plain = pages.page(NEW, "a", "", "wrong", 3, 4)
    assert [one.question for one in plain.samples] == ["q3", "q4", "q5", "q6"]
    assert plain.offset == 3
    assert plain.samples[0].response == "..." + "x" * 239 + "3"
    assert plain.samples[0].reference == '["é",3]'
    assert compress(path, Modes(), lambda: False)
    assert pages.page(NEW, "a", "", "wrong", 3, 4) == plain
    assert pages.page(NEW, "a", "", "wrong", 99, 4).samples == []


def test_one_sample_with_its_prompt_and_the_earlier_one(tmp_path: Path, pages: SamplePages) -> None:
    write(tmp_path, 1, sample("q0", 0.0, response="then"))
    write(tmp_path, 2, sample("q0", 1.0, response="y" * 1_200_000), sample("q1"))
    detail = pages.one(NEW, "a", OLD, "q0", 0)
    assert len(detail.sample.response) < 1_001_000
    assert detail.earlier is not None
    assert (detail.earlier.response, detail.prompt) == ("then", "What?")
    assert detail.data_digest == "data"
    other = pages.one(NEW, "a", OLD, "q1", 0)
    assert (other.earlier, other.prompt) == (None, None)
    for question, number in (("q0", 1), ("q9", 0)):
        with pytest.raises(FileNotFoundError):
            pages.one(NEW, "a", OLD, question, number)


def test_what_is_no_point_and_what_is_damaged(tmp_path: Path, pages: SamplePages) -> None:
    with pytest.raises(ValueError, match="must be a point's"):
        pages.page("../x", "a", "", "all", 0, 5)
    with pytest.raises(FileNotFoundError):
        pages.page(NEW, "a", "", "all", 0, 5)
    path = write(tmp_path, 2, b"")
    with pytest.raises(ValueError, match="must be a point's"):
        pages.page(NEW, "a", "../x", "all", 0, 5)
    assert pages.page(NEW, "a", "", "all", 0, 5).n["all"] == 0
    odd = b'{"question":"a","sample":0,"digest":"d","config":"c","status":"scored","response":3}\n'
    write(tmp_path, 2, odd)
    with pytest.raises(OSError, match="is damaged at byte 0"):
        pages.page(NEW, "a", "", "all", 0, 5)
    path.unlink()
    path.with_name("a.jsonl.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(OSError, match=r"damaged|gzip"):
        pages.page(NEW, "a", "", "all", 0, 5)
