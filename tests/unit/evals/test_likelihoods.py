from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.chat_template import PromptError
from evald.evals.custom.calls import Outcome, Serve
from evald.evals.custom.functions import Work
from evald.evals.kinds import Kind, kind_of
from evald.evals.kinds.perplexity import cut_windows
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles
from evald.evals.rows import Question
from evald.evals.sets import load_set
from evald.evals.token_ids import unpack
from evald.postures.contract import Generation
from evald.testing.fake_engine import prompt_logprob

MakeModel = Callable[..., Path]


class ScoringAsker:
    """Gives each token the log-probability that fake engines give it."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.starts: list[int] = []

    async def generate(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        *,
        score_from: list[int] | None = None,
    ) -> list[Generation]:
        assert all(parameters["max_new_tokens"] == 0 for parameters in sampling)
        assert score_from is not None
        assert len(prompts) == len(sampling) == len(score_from)
        self.prompts += prompts
        self.starts += score_from
        return [
            Generation(
                output_ids=[],
                text="",
                finish_reason="length",
                weight_version="v",
                engine="e",
                latency_s=0.0,
                prompt_logprobs=[prompt_logprob(token) for token in prompt[start:]],
            )
            for prompt, start in zip(prompts, score_from, strict=True)
        ]

    async def run_function(self, work: Work, serve: Serve) -> Outcome:
        raise AssertionError(work, serve)


def encoder_of(directory: Path) -> PromptEncoder:
    return PromptEncoder(TokenizerFiles.read(directory), ModelLimits.read(directory))


def one_set(**fields: Any) -> tuple[EvalSet, Kind]:
    eval_set = EvalSet(**{"name": "s", "path": "s.jsonl", **fields})
    return eval_set, kind_of(eval_set)


def question(**fields: Any) -> Question:
    return Question(id="1", **fields)


# --- choice ------------------------------------------------------------------------------------


async def test_the_likeliest_option_is_chosen_by_sum_and_by_character(
    make_model: MakeModel,
) -> None:
    encoder = encoder_of(make_model())
    _, by_sum = one_set(kind="loglikelihood_choice", options_key="o", option_prefix="")
    _, by_rate = one_set(
        kind="loglikelihood_choice", options_key="o", option_prefix="", choose_by="per_character"
    )
    ids = {c: encoder.encode_continued("x", c, apply_chat_template="auto", kwargs={})[0][1]
           for c in "abcdefghij"}  # fmt: skip
    by_cost = sorted(ids, key=lambda c: -prompt_logprob(ids[c]))
    cheap, dear = by_cost[0], by_cost[-1]
    # one dear letter costs less in all than many cheap ones, and more for each character
    options = [dear, cheap * 12]
    row = question(prompt="x", options=options, label=0)
    asker = ScoringAsker()
    for kind, score in ((by_sum, 1.0), (by_rate, 0.0)):
        (answer,) = await kind.ask(asker, row, kind.encode(encoder, row), [0])
        assert answer.grade is not None
        assert answer.grade.score == score
        assert (answer.values["acc"], answer.values["acc_norm"]) == (1.0, 0.0)
    sums = [prompt_logprob(ids[dear]), 12 * prompt_logprob(ids[cheap])]
    share = math.exp(sums[0]) / (math.exp(sums[0]) + math.exp(sums[1]))
    assert answer.values["gold_share"] == pytest.approx(share)


async def test_options_stand_behind_the_prompt_and_only_they_are_scored(
    make_model: MakeModel,
) -> None:
    encoder = encoder_of(make_model())
    _, kind = one_set(kind="loglikelihood_choice", choices="AB")
    text = question(prompt="2+2 ", options=["A", "B"], label=1)
    asker = ScoringAsker()
    await kind.ask(asker, text, kind.encode(encoder, text), [0])
    plain = encoder.encode_document("2+2")[1:]
    # the space at the prompt's end is the option's, and the set's own comes on top
    assert [prompt[: len(plain)] for prompt in asker.prompts] == [plain, plain]
    assert asker.starts == [len(plain)] * 2
    assert [len(prompt) for prompt in asker.prompts] == [len(plain) + 3] * 2
    chat = question(prompt=[{"role": "user", "content": "2+2"}], options=["A", "B"], label=1)
    encoded = kind.encode(encoder, chat)
    lengths = [len(unpack(ids)) for ids in encoded.texts]
    assert [n - start for n, start in zip(lengths, encoded.starts, strict=True)] == [1, 1]
    assert kind.width(encoded, [0]) == 2


@pytest.mark.parametrize(
    ("row", "index"),
    [
        ({"q": "x", "o": ["yes", "no"], "a": 1}, 1),
        ({"q": "x", "o": ["yes", "no"], "a": "B"}, 1),
        ({"q": "x", "o": ["yes", "no"], "a": "no"}, 1),
        ({"q": "x", "o": ["B", "A"], "a": "B"}, 0),
    ],
)
def test_a_label_is_index_letter_or_text(row: dict[str, Any], index: int) -> None:
    _, kind = one_set(kind="loglikelihood_choice", options_key="o", input_key="q", label_key="a")
    assert kind.read(row)["label"] == index


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "x", "o": ["yes", "no"], "label": 2}, "2 is none of the 2 options"),
        ({"prompt": "x", "o": ["yes", "no"], "label": True}, "is true or false; give the right"),
        ({"prompt": "x", "o": ["yes", "no"], "label": "C"}, "'C' is none of the 2 options"),
        ({"prompt": "x", "o": ["yes"], "label": 0}, "must be a list of two or more texts"),
        ({"prompt": "x", "o": ["yes", ""], "label": 0}, "texts that are not empty"),
        ({"prompt": "x", "o": ["yes", "yes"], "label": 0}, "the same option twice"),
        ({"prompt": "x", "label": 0}, "key 'o' is missing"),
    ],
)
def test_bad_choice_rows(make_set: Any, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_set(make_set([row], kind="loglikelihood_choice", options_key="o"))
    assert sentence in str(caught.value)


# --- perplexity --------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(2, 50), st.integers(1, 49))
def test_every_token_but_the_first_is_scored_once(n_tokens: int, size: int, overlap: int) -> None:
    overlap = min(overlap, size - 1)
    cuts = cut_windows(n_tokens, size, overlap)
    scored = [index for _, start, end in cuts for index in range(start, end)]
    assert scored == list(range(1, n_tokens))
    for first, start, end in cuts:
        assert end - first <= size
        assert start - first == min(overlap, start)
    for (_, _, end), (_, start, _) in pairwise(cuts):
        assert end == start


async def test_a_document_is_scored_in_windows(make_model: MakeModel) -> None:
    encoder = encoder_of(make_model(max_position_embeddings=40))
    _, kind = one_set(kind="perplexity", window_overlap_tokens=5)
    text = "the quick brown fox jumps over the lazy dog " * 3 + "ü"
    row = question(prompt=text)
    encoded = kind.encode(encoder, row)
    # the server keeps a few tokens of its context free
    assert max(len(unpack(ids)) for ids in encoded.texts) == 32
    assert kind.width(encoded, [0]) == len(encoded.texts) > 1
    (answer,) = await kind.ask(ScoringAsker(), row, encoded, [0])
    ids = encoder.encode_document(text)
    assert answer.values == {
        "nll": pytest.approx(-sum(prompt_logprob(token) for token in ids[1:])),
        "tokens": len(ids) - 1,
        "bytes": len(text.encode()),
    }
    assert answer.grade is not None
    assert answer.grade.score == answer.values["nll"] / answer.values["tokens"]


def test_the_first_token_is_predicted_from_bos_or_eos(make_model: MakeModel) -> None:
    own = encoder_of(make_model("own", bos=True))
    other = encoder_of(make_model("other"))
    (first, *rest) = own.encode_document("ab")
    (stand_in, *same) = other.encode_document("ab")
    assert rest == same
    assert first != stand_in


async def test_a_response_is_scored_behind_its_prompt(make_model: MakeModel) -> None:
    encoder = encoder_of(make_model())
    _, kind = one_set(kind="perplexity", perplexity_of="response")
    row = question(prompt=[{"role": "user", "content": "hello"}], label="good day")
    asker = ScoringAsker()
    (answer,) = await kind.ask(asker, row, kind.encode(encoder, row), [0])
    assert answer.values["bytes"] == answer.values["tokens"] == 8
    assert len(asker.prompts[0]) - asker.starts[0] == 8


def test_a_response_that_does_not_fit_is_not_cut(make_model: MakeModel) -> None:
    encoder = encoder_of(make_model(max_position_embeddings=40))
    _, kind = one_set(kind="perplexity", perplexity_of="response")
    with pytest.raises(PromptError, match="at most 32 fit"):
        kind.encode(encoder, question(prompt="a", label="b" * 40))


@pytest.mark.parametrize(
    ("row", "fields", "sentence"),
    [
        ({"prompt": [{"role": "user", "content": "x"}]}, {}, 'set perplexity_of = "response"'),
        ({"prompt": "x"}, {"perplexity_of": "response"}, "key 'label' is missing"),
        ({"prompt": "x", "label": 1}, {"perplexity_of": "response"}, "is a number; give the"),
        ({"prompt": "x"}, {"window_tokens": 4, "window_overlap_tokens": 4}, "is not below"),
    ],
)
def test_bad_perplexity_sets(
    make_set: Any, row: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_set(make_set([row], kind="perplexity", **fields))
    assert sentence in str(caught.value)


def test_a_set_that_is_only_scored_has_one_sample(make_set: Any) -> None:
    loaded = load_set(make_set([{"prompt": "x"}], kind="perplexity", n_samples_per_eval_prompt=4))
    assert loaded.n_samples == 1
