from __future__ import annotations

from typing import Any

from evald.evals.sampling import base_sampling, check_stop, sample_seed, sampling_for

#: what SGLang 0.5.23 fills in by itself when a request does not say it.
SERVER_DEFAULTS = {
    "max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
}  # fmt: skip


def test_nothing_is_left_to_the_server(make_set: Any) -> None:
    eval_set = make_set(
        "",
        max_response_len=7,
        temperature=0.6,
        top_p=0.9,
        top_k=5,
        stop=["\n"],
        repetition_penalty=1.1,
        no_stop_trim=True,
    )
    sampling = base_sampling(eval_set)
    assert set(sampling) == SERVER_DEFAULTS
    assert sampling["max_new_tokens"] == 7
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.6, 0.9, 5)
    assert sampling["stop"] == ["\n"]
    assert (sampling["repetition_penalty"], sampling["no_stop_trim"]) == (1.1, True)
    assert sampling["n"] == 1


def test_each_sample_has_a_stable_seed_of_its_own(make_set: Any) -> None:
    seeds = {
        sample_seed(name, question, sample, seed)
        for name in ("a", "b")
        for question in ("1", "11")
        for sample in (0, 1)
        for seed in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)
    # a constant: seeds must not change between versions, or points stop being comparable
    assert sample_seed("gsm8k", "42", 0, 0) == 1146736043
    assert sample_seed("gsm8k", "42", 1, 0) == 225812537
    assert sample_seed("gsm8k", "42", 0, 1) == 502749305
    assert sample_seed("数学", "é/1", 63, -1) == 417979906
    first, third = sampling_for(make_set(""), "q", [0, 2])
    assert first["sampling_seed"] == sample_seed("toy", "q", 0, 0)
    assert third["sampling_seed"] == sample_seed("toy", "q", 2, 0)


def test_stop_strings_that_the_server_refuses_are_named(make_set: Any) -> None:
    assert check_stop(make_set("", stop=["a"])) == []
    assert check_stop(make_set("", stop=["x"] * 33)) == ["stop: 33 strings; at most 32 are allowed"]
    assert "empty string" in check_stop(make_set("", stop=[""]))[0]
