"""The text of an answer that several engines have given in turn.

The texts of its pieces cannot be joined: a character may begin in one and end in the next. So the
joined tokens are decoded, by a server: it has the tokenizer of every other answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog

from evald.engines.answers import Answer
from evald.engines.api import EngineBusy, EngineError, EngineUnreachable
from evald.engines.engine import Order
from evald.postures.lane import Lane
from evald.postures.progress import Wanted

log = structlog.get_logger(__name__)

#: tokens of the prompt that SGLang decodes together with an answer: some tokenizers drop the space
#: that a text begins with.
CONTEXT = 5


class Joiner:
    """Decodes joined answers; ``works`` until servers show that they cannot."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.works = True
        self._lanes = lanes

    async def text(self, order: Order, lane: Lane, wanted: Wanted, answer: Answer) -> str | None:
        """Decode all tokens of a sample, ``answer`` being the last piece; None: nobody can.

        ``lane`` is asked first, then each other one that serves ``order``.
        """
        context = wanted.prompt[-CONTEXT:]
        ids = wanted.ids + _trimmed(wanted, answer)
        # as the server does: what the context says is taken off again
        both = [context, context + ids]
        skip = wanted.sampling.get("skip_special_tokens", True)
        others = [one for one in self._lanes if one is not lane and one.serves(order)]
        return await self._ask([lane, *others], both, skip_special_tokens=skip)

    async def _ask(
        self, lanes: Iterable[Lane], both: list[list[int]], *, skip_special_tokens: bool
    ) -> str | None:
        refusal: EngineError | None = None
        for lane in lanes:
            try:
                before, whole = await lane.connected_api().detokenize(
                    both, skip_special_tokens=skip_special_tokens
                )
            except (EngineUnreachable, EngineBusy) as error:
                log.info("answer_not_decoded", engine=lane.name, detail=str(error))
            except EngineError as error:
                refusal = error
            else:
                return whole[len(before) :]
        if refusal is not None:
            self.works = False
            log.warning(
                "answers_not_decoded",
                detail=str(refusal),
                hint="samples that were moved start again, and no others are moved",
            )
        return None


def _trimmed(wanted: Wanted, answer: Answer) -> list[int]:
    """Leave the stop token out, as the server does; its own text has no trace of it."""
    ids = answer.output_ids or []
    finish = answer.meta_info.finish_reason
    stopped = finish is not None and isinstance(finish.matched, int)
    return ids[:-1] if stopped and not wanted.sampling.get("no_stop_trim") else ids
