"""The decode model of fake engines: nothing is lost, nobody overtakes, and parts make a whole."""

from __future__ import annotations

import asyncio
import random

import pytest
from tokenizers import Tokenizer

from evald.testing import Decode, write_base_model
from evald.testing.decode_model import DecodeModel, Decoder
from evald.testing.long_answers import response_tokens, split, text_of, tokens_of
from evald.testing.snapshots import END_TOKEN

STEP = Decode(step_s=1.0, slots=4)


def run_out(model: DecodeModel) -> dict[int, float]:
    """Let everything end; when each one did, in order."""
    ended: dict[int, float] = {}
    while (end_s := model.next_end_s()) is not None:
        ended |= dict.fromkeys(model.advance(end_s), end_s)
    return ended


def test_a_lone_request_takes_a_step_for_each_token() -> None:
    model = DecodeModel(STEP)
    model.enter(1, 10)
    assert model.next_end_s() == pytest.approx(12.5)
    assert model.advance(12.4) == []
    assert model.advance(12.6) == [1]
    assert model.usage.busy_s == pytest.approx(12.6 - 0.1)
    assert model.next_end_s() is None


def test_all_that_runs_advances_together_and_slower() -> None:
    model = DecodeModel(STEP)
    for key in range(4):
        model.enter(key, 10)
    assert model.tokens_per_s == pytest.approx(2.0)
    assert run_out(model) == pytest.approx(dict.fromkeys(range(4), 20.0))
    assert model.usage.slot_s == pytest.approx(80.0)


def test_the_rate_changes_when_somebody_comes() -> None:
    model = DecodeModel(STEP)
    model.enter(1, 10)
    model.advance(6.25)  # five tokens
    model.enter(2, 5)
    # both have five tokens to go, at 1.5 s each
    assert run_out(model) == pytest.approx({1: 13.75, 2: 13.75})


def test_who_finds_no_slot_waits_in_order() -> None:
    model = DecodeModel(STEP)
    for key in range(7):
        model.enter(key, 10 if key else 5)
    assert (model.running, model.waiting) == (4, 3)
    assert list(run_out(model)) == [0, 1, 2, 3, 4, 5, 6]
    assert model.usage.tokens == 65


def test_an_abort_tells_what_there_is_and_makes_room() -> None:
    model = DecodeModel(STEP)
    for key in range(6):
        model.enter(key, 10)
    model.advance(9.0)
    assert model.abort(5) == 0  # it still waited
    assert model.abort(0) == 4
    assert (model.running, model.waiting) == (4, 0)
    assert list(run_out(model)) == [1, 2, 3, 4]
    assert (model.usage.tokens, model.usage.aborted, model.usage.completed) == (44, 2, 4)


def test_a_prompt_holds_all_others_up() -> None:
    model = DecodeModel(Decode(step_s=1.0, slots=4, prefill_token_s=0.1))
    model.enter(1, 4, prompt_tokens=10)
    assert model.next_end_s() == pytest.approx(6.0)
    model.advance(3.5)
    model.enter(2, 2, prompt_tokens=30)
    assert run_out(model) == pytest.approx({1: 9.5, 2: 9.5})


def test_usage_of_the_cache_is_what_runs_and_its_prompts() -> None:
    model = DecodeModel(Decode(step_s=1.0, slots=4, kv_tokens=100))
    model.enter(1, 10, prompt_tokens=20)
    model.advance(6.25)
    assert model.token_usage == pytest.approx(0.25)
    model.enter(2, 10, prompt_tokens=30)
    assert model.token_usage == pytest.approx(0.55)
    run_out(model)
    assert model.token_usage == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - test data, no secret
    model = DecodeModel(Decode(step_s=0.01, slots=8))
    wanted: dict[int, int] = {}
    got: dict[int, int] = {}
    now_s = 0.0
    for key in range(500):
        now_s += rng.expovariate(2)
        got |= {one: wanted[one] for one in model.advance(now_s)}
        wanted[key] = rng.randrange(0, 400)
        model.enter(key, wanted[key])
        left = sorted(wanted.keys() - got.keys())
        if rng.random() < 0.2:
            one = rng.choice(left)
            got[one] = model.abort(one)
            assert got[one] <= wanted[one]
    got |= {one: wanted[one] for one in run_out(model)}
    assert got.keys() == wanted.keys()
    usage = model.usage
    assert usage.tokens == sum(got.values())
    assert usage.completed + usage.aborted == 500
    # each token took at least a step of a batch of one, and at most one of a full batch
    assert 0.01 * 9 / 8 * usage.tokens <= usage.slot_s + 1
    assert usage.slot_s <= 0.02 * (usage.tokens + usage.aborted) + 1
    assert usage.busy_s <= usage.slot_s <= 8 * usage.busy_s


async def test_in_real_time_an_abort_leaves_the_others_alone() -> None:
    decoder = Decoder(Decode(step_s=0.0005, slots=2))
    one, two, three = (
        asyncio.create_task(decoder.run(rid, tokens, 7))
        for rid, tokens in (("a", 40), ("b", 1_000_000), ("c", 20))
    )
    assert await one == 40
    assert await three == 20
    decoder.abort("b")
    decoder.abort("nobody")
    assert 20 <= await two < 1_000_000
    assert (decoder.model().running, decoder.model().usage.aborted) == (0, 1)


async def test_a_request_whose_task_ends_gives_its_slot_back() -> None:
    decoder = Decoder(Decode(step_s=0.0005, slots=1))
    first = asyncio.create_task(decoder.run("a", 1_000_000))
    second = asyncio.create_task(decoder.run("b", 3))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 3


def test_tokens_are_those_of_the_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = write_base_model(tmp_path_factory.mktemp("base"))
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    text = "\x02 a — b\n\\boxed{7} é\x7f"
    tokens = tokens_of(text.encode())
    assert tokens == tokenizer.encode(text).ids
    assert text_of(tokens) == text == tokenizer.decode(tokens)
    # within the dash, which takes three tokens
    assert text_of(tokens[:5]) == tokenizer.decode(tokens[:5])


def test_a_part_and_the_rest_are_the_whole() -> None:
    prompt = tokens_of(b"what is 3 + 4?")
    whole = response_tokens(STEP, "\\boxed{7}", prompt, 5)
    assert text_of(whole).endswith("\\boxed{7}")
    assert whole[-1] == END_TOKEN
    for length in (1, 3, len(whole) // 2, len(whole) - 1):
        question, partial = split(prompt + whole[:length])
        assert (question, partial) == (prompt, whole[:length])
    assert split(prompt) == (prompt, [])


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    lengths = sorted(len(response_tokens(STEP, "7", [1, 2], seed)) for seed in range(4000))
    assert lengths[2000] == pytest.approx(400, rel=0.1)
    assert lengths[3960] == pytest.approx(8000, rel=0.3)
    assert len(response_tokens(STEP, "7", [1, 2], 9)) != len(response_tokens(STEP, "8", [1, 2], 9))
