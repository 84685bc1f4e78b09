"""What ``/generate`` answers, checked as it is decoded: a wrong shape never travels further."""

from __future__ import annotations

import math
from typing import Any

import msgspec

#: finish reasons of a complete answer.
COMPLETE = frozenset({"stop", "length"})
#: of one that was aborted.
ABORTED = "abort"


class FinishReason(msgspec.Struct, frozen=True):
    """Why an answer ended: "stop", "length", or "abort" (which comes with HTTP 200)."""

    type: str
    #: the token (an integer) or text that ended it.
    matched: Any = None


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens that one weight version wrote."""

    version: str | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """What the server says about an answer."""

    #: of the request that it answers.
    id: str | None = None
    finish_reason: FinishReason | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    #: for each token its log-probability (null when it is no number), id and text.
    output_token_logprobs: list[list[Any]] | None = None
    #: the same of the prompt's tokens from ``logprob_start_len`` on; the first one's is null.
    input_token_logprobs: list[list[Any]] | None = None


class Answer(msgspec.Struct, frozen=True):
    """One answer, complete or not."""

    meta_info: MetaInfo
    text: str | None = None
    output_ids: list[int] | None = None

    @property
    def reason(self) -> str | None:
        """Why it ended."""
        finish = self.meta_info.finish_reason
        return None if finish is None else finish.type

    @property
    def versions(self) -> set[str]:
        """All weight versions that took part; empty when it names none."""
        meta = self.meta_info
        named = {meta.weight_version, *(span.version for span in meta.weight_versions or [])}
        return {version for version in named if version is not None}

    @property
    def logprobs(self) -> list[Any]:
        """Log-probability of each token, unchecked."""
        return [entry[0] if entry else None for entry in self.meta_info.output_token_logprobs or []]

    def prompt_logprobs(self, count: int) -> list[float]:
        """Return those of the prompt's last ``count`` tokens.

        Raises ValueError for fewer, and for one that is no number (weights with NaN).
        """
        entries = self.meta_info.input_token_logprobs or []
        values = [entry[0] for entry in entries[1:] if entry]
        if len(values) != count:
            raise ValueError(f"{count} log-probabilities expected, got {len(values)}")
        if not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
            raise ValueError("a log-probability is no number: the weights may hold NaN")
        return [float(value) for value in values]


_answers = msgspec.json.Decoder(list[Answer])


def read_answers(payload: bytes, count: int) -> list[Answer]:
    """Decode the answers to ``count`` prompts; raises ValueError with what is wrong."""
    try:
        answers = _answers.decode(payload)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.DecodeError as error:
        got = payload[:80].decode(errors="replace")
        raise ValueError(f"{error}; got {got!r}") from error
    if len(answers) != count:
        raise ValueError(f"{count} answers expected, got {len(answers)}")
    for answer in answers:
        if answer.reason in COMPLETE and (answer.text is None or answer.output_ids is None):
            raise ValueError("a complete answer has no text or no output_ids")
    return answers
