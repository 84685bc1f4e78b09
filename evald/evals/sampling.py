"""Sampling parameters in SGLang's names, each of them sent, each sample with its own seed."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from evald.config import EvalSet

#: limit of the server on stop strings of one request.
_MAX_STOPS = 32

#: seeds are non-negative and fit the 32-bit integers of every sampling backend.
_SEED_MASK = 0x7FFF_FFFF


def check_stop(eval_set: EvalSet) -> list[str]:
    """One sentence for each fault of the stop strings, the key in front."""
    problems = []
    if len(eval_set.stop) > _MAX_STOPS:
        problems.append(f"stop: {len(eval_set.stop)} strings; at most {_MAX_STOPS} are allowed")
    if "" in eval_set.stop:
        problems.append("stop: the empty string would end every answer at once; remove it")
    return problems


def sampling_notes(sets: list[EvalSet]) -> list[str]:
    """Say so, once for all sets, where asking again gives the same."""
    # (a function of the user's may ask with another temperature)
    same = [
        repr(one.name)
        for one in sets
        if one.kind == "generate" and one.n_samples_per_eval_prompt > 1 and one.temperature == 0
    ]
    if not same:
        return []
    sentence = (
        f"WARNING: eval set{'s' if len(same) > 1 else ''} {', '.join(same)}: "
        "n_samples_per_eval_prompt is above 1 at temperature 0, so the samples of a question will "
        "be equal; raise temperature, or ask once"
    )
    return [sentence]


def base_sampling(eval_set: EvalSet) -> dict[str, Any]:
    """All parameters but the seed; also what the record says about the sampling.

    Nothing is left to the server: it fills gaps from its own defaults (128 new tokens) and from
    the model's generation config. Temperature 0 is greedy: the server then takes the most likely
    token, whatever top_p and top_k say.
    """
    return {
        "max_new_tokens": eval_set.max_response_len,
        "min_new_tokens": eval_set.min_new_tokens,
        "temperature": eval_set.temperature,
        "top_p": eval_set.top_p,
        "top_k": eval_set.top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": eval_set.repetition_penalty,
        "stop": list(eval_set.stop),
        "stop_token_ids": list(eval_set.stop_token_ids),
        "ignore_eos": False,
        "skip_special_tokens": eval_set.skip_special_tokens,
        "spaces_between_special_tokens": False,
        "no_stop_trim": eval_set.no_stop_trim,
        "n": 1,
    }


def sample_seed(set_name: str, question_id: str, sample: int, seed: int, *, turn: int = 0) -> int:
    """Give a sample its seed: 31 bits, the same at every step, different for every sample.

    The same seeds at each step let two points be compared question by question. ``turn`` counts
    the requests of one sample.
    """
    parts = [set_name, question_id, sample, seed]
    text = msgspec.json.encode([*parts, turn] if turn else parts)
    return int(xxhash.xxh3_64_intdigest(text)) & _SEED_MASK


def sampling_for(eval_set: EvalSet, question_id: str, samples: list[int]) -> list[dict[str, Any]]:
    """Give one dict for each sample number in ``samples``."""
    base = base_sampling(eval_set)
    return [
        base | {"sampling_seed": sample_seed(eval_set.name, question_id, sample, eval_set.seed)}
        for sample in samples
    ]
