"""What a fake engine answers to one prompt, in SGLang's words."""

from __future__ import annotations

from typing import Any, NamedTuple

from evald.testing.snapshots import END_TOKEN

NAN_ANSWER = "!"
ABORTED = {"type": "abort", "message": "Aborted"}


class Output(NamedTuple):
    """What was generated, and why it ended."""

    ids: list[int]
    text: str
    reason: dict[str, Any]


def stopped(length: int, limit: int) -> dict[str, Any]:
    """Say why a response of that length ends, of which ``limit`` tokens may come."""
    if length >= limit:
        return {"type": "length", "length": limit}
    return {"type": "stop", "matched": END_TOKEN}


def answer_body(
    output: Output,
    prompt: list[int],
    rid: str,
    version: str,
    *,
    logprobs: bool,
    start: int | None,
    nan: bool,
) -> dict[str, Any]:
    """Build one answer; ``logprobs``: with those of the output, ``start``: of the prompt's rest."""
    ids = output.ids
    meta_info: dict[str, Any] = {
        "id": rid,
        "finish_reason": output.reason,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
    }
    if logprobs:
        value = None if nan else -0.5
        meta_info["output_token_logprobs"] = [[value, token, None] for token in ids]
    if start is not None:
        scored = [None if nan else prompt_logprob(token) for token in prompt[start:]]
        values = [None, *scored[1:]]
        meta_info["input_token_logprobs"] = [
            [value, token, None] for value, token in zip(values, prompt[start:], strict=True)
        ]
    return {"text": output.text, "output_ids": ids, "meta_info": meta_info}


def varied(answer: int, prompt: list[int], vary: int) -> int:
    """Give the number, below ``vary``, that weights with ``answer`` in them give to a prompt."""
    return (answer + sum(prompt)) % vary


def prompt_logprob(token: int) -> float:
    """Log-probability that fake engines give a token of a prompt, whatever stands before it."""
    return -(1 + token % 7) / 4
