"""The part of a fake engine that decodes: responses come token by token, and can be continued."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from evald.testing import long_answers
from evald.testing.decode_model import Decode, Decoder
from evald.testing.fake_output import ABORTED, NAN_ANSWER, Output, stopped


class Decoding:
    """Generates what ``decode`` says, at its speed."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        #: requests that went on with what other weights had begun: nobody should want that.
        self._foreign = 0
        self._decoder = Decoder(decode)

    async def output(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        rid: str,
        *,
        answer: Callable[[list[int]], str] | None,
    ) -> Output:
        """Answer from wherever an earlier answer to the prompt has got to.

        ``answer`` gives the weights' answer to a prompt; None: they are broken.
        """
        limit = sampling.get("max_new_tokens", 128)
        question, partial = long_answers.split(prompt)
        if answer is None:
            whole = long_answers.tokens_of(NAN_ANSWER.encode() * (len(partial) + limit))
        else:
            seed = sampling.get("sampling_seed") or 0
            whole = long_answers.response_tokens(self.decode, answer(question), question, seed)
            self._foreign += whole[: len(partial)] != partial
        ids = whole[len(partial) :]
        if sampling.get("ignore_eos"):
            ids = list(itertools.islice(itertools.cycle(whole), len(partial), len(partial) + limit))
        reason = stopped(len(ids), limit)
        ids = ids[:limit]
        n_tokens = await self._decoder.run(rid, len(ids), len(prompt))
        if n_tokens < len(ids):
            ids, reason = ids[:n_tokens], ABORTED
        return Output(ids, long_answers.text_of(ids), reason)

    def abort(self, rid: str) -> None:
        """End a request now."""
        self._decoder.abort(rid)

    def load(self) -> dict[str, Any]:
        """Tell the load as SGLang does."""
        model = self._decoder.model()
        return {
            "num_running_reqs": model.running,
            "num_waiting_reqs": model.waiting,
            "token_usage": model.token_usage,
            "gen_throughput": model.tokens_per_s,
        }

    def usage(self) -> dict[str, Any]:
        """Tell what has been done since the start: ``Usage``, and "foreign"."""
        return {**msgspec.to_builtins(self._decoder.model().usage), "foreign": self._foreign}
