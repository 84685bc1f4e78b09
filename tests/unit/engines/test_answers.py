from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from evald.engines.answers import Answer, MetaInfo, VersionSpan, read_answers

GOOD: dict[str, Any] = {
    "text": "7",
    "output_ids": [55],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 257},
        "weight_version": "b",
        "weight_versions": [{"version": "b", "start": 0, "end": 1}],
        "output_token_logprobs": [[-0.5, 55, None]],
    },
}


def answer(change: Callable[[dict[str, Any]], object] = lambda _: None) -> bytes:
    changed = copy.deepcopy(GOOD)
    change(changed)
    return json.dumps([changed]).encode()


def meta(name: str, value: Any) -> bytes:
    return answer(lambda one: one["meta_info"].update({name: value}))


def test_a_good_answer() -> None:
    (one,) = read_answers(answer(), 1)
    assert (one.text, one.output_ids, one.reason) == ("7", [55], "stop")
    assert one.versions == {"b"}
    assert one.logprobs == [-0.5]


def test_an_aborted_answer_needs_no_text() -> None:
    (one,) = read_answers(b'[{"meta_info": {"finish_reason": {"type": "abort"}}}]', 1)
    assert one.reason == "abort"
    (one,) = read_answers(b'[{"meta_info": {}}]', 1)
    assert one.reason is None
    assert one.logprobs == []


def test_versions_are_all_that_took_part() -> None:
    spans = [VersionSpan("a"), VersionSpan("b"), VersionSpan()]
    assert Answer(MetaInfo(weight_version="b", weight_versions=spans)).versions == {"a", "b"}
    assert Answer(MetaInfo(weight_version="b")).versions == {"b"}
    assert Answer(MetaInfo()).versions == set()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[null]",
        b"[NaN]",
        b"[{}]",
        b'"\xff"',
        answer()[:-5],
        b"[" * 100_000,
        b'[{"meta_info":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]",
        answer(lambda one: one.update(text=None)),
        answer(lambda one: one.update(text=5)),
        answer(lambda one: one.pop("output_ids")),
        answer(lambda one: one.update(output_ids=[[1]])),
        answer(lambda one: one.update(output_ids="abc")),
        answer(lambda one: one.update(meta_info=[1])),
        meta("finish_reason", "stop"),
        meta("finish_reason", {"type": [1]}),
        meta("weight_version", ["b"]),
        meta("weight_versions", [1, 2]),
        meta("weight_versions", [{"version": [1]}]),
        meta("output_token_logprobs", [1, 2]),
    ],
)
def test_garbage_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"got|nested|output_ids"):
        read_answers(payload, 1)


def test_the_number_of_answers_must_be_right() -> None:
    with pytest.raises(ValueError, match="2 answers expected, got 1"):
        read_answers(answer(), 2)


def test_empty_log_probabilities_are_no_numbers() -> None:
    (one,) = read_answers(meta("output_token_logprobs", [[], [None, 1, "x"]]), 1)
    assert one.logprobs == [None, None]
