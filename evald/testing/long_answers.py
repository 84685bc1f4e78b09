"""Responses as long as those of a reasoning model, which can be continued from any token on.

A response is a function of the weights' number, the prompt and the seed of the sample, so that
asking again gives the same. It begins with a byte that no prompt has: in a prompt that holds the
beginning of a response, too, it tells where that begins. Four digits behind it are of weights,
prompt and seed, so that a beginning of another response is known. Tokens are bytes, numbered as
the tokenizer of ``snapshots`` does, and some characters take several of them.
"""

from __future__ import annotations

import math
from array import array
from statistics import NormalDist
from typing import NamedTuple

import xxhash

from evald.testing.decode_model import Decode
from evald.testing.snapshots import END_TOKEN

_BEGIN = b"\x02"
#: 31 bytes; its dashes take three each.
_WORDS = "so — let us see — and further".encode()
_LONGEST = 1 << 16
_FILLER = _WORDS * (_LONGEST // len(_WORDS) + 1)
#: so many shares of 1 tell a float from its neighbours.
_SHARES = 1 << 52
#: the 99th percentile of the normal distribution.
_Z99 = NormalDist().inv_cdf(0.99)


def _token_order() -> bytes:
    """Give the bytes in the order of their tokens.

    Byte-level tokenizers write each byte as a character: a printable byte as itself, the others,
    in turn, as those from 256 on. The tokenizer of ``snapshots`` has them in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return bytes([*printable, *(byte for byte in range(256) if byte not in printable)])


_BYTE_OF = _token_order()
_TOKEN_OF = bytes(_BYTE_OF.index(byte) for byte in range(256))
BEGIN_TOKEN = _TOKEN_OF[_BEGIN[0]]


class Split(NamedTuple):
    """A prompt as it was asked first, and what has been answered to it already."""

    prompt: list[int]
    partial: list[int]


def split(prompt: list[int]) -> Split:
    """Find the beginning of a response in a prompt."""
    if BEGIN_TOKEN not in prompt:
        return Split(prompt, [])
    at = prompt.index(BEGIN_TOKEN)
    return Split(prompt[:at], prompt[at:])


def tokens_of(text: bytes) -> list[int]:
    """Give the tokens of a text."""
    return list(text.translate(_TOKEN_OF))


def text_of(tokens: list[int]) -> str:
    """Decode tokens; half a character becomes a replacement character, specials become nothing."""
    if max(tokens, default=0) >= len(_BYTE_OF):
        tokens = [token for token in tokens if token < len(_BYTE_OF)]
    return bytes(tokens).translate(_BYTE_OF).decode(errors="replace")


def response_tokens(decode: Decode, number: str, prompt: list[int], seed: int) -> list[int]:
    """Give the whole response, not yet cut to ``max_new_tokens``; ``number`` is at its end."""
    drawn = _hash(number, prompt, seed)
    share = (drawn % _SHARES + 0.5) / _SHARES
    sigma = math.log(decode.p99_tokens / decode.median_tokens) / _Z99
    length = decode.median_tokens * math.exp(sigma * NormalDist().inv_cdf(share))
    head = _BEGIN + f"{drawn & 0xFFFF:04x} ".encode()
    words = max(min(round(length), _LONGEST) - len(head) - len(number) - 1, 0)
    return [*tokens_of(head + _FILLER[:words] + number.encode()), END_TOKEN]


def _hash(number: str, prompt: list[int], seed: int) -> int:
    digest = xxhash.xxh3_64(number.encode(), seed=seed)
    digest.update(array("q", prompt).tobytes())
    return digest.intdigest()
