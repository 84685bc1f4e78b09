"""In which order the sets of a point are asked: what takes longest first.

The engines are full until the last question is out; what then remains is the answers under way.
Long ones that begin last would keep a few places busy and leave the others empty.

SGLang's deterministic inference (0.5.17 on an H200) gives a generated response again, whatever is
generated beside it: 256 of 256. With requests for the prompt's log-probabilities beside it, up to
34 of 256 came out different. So there the two are never asked at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

from evald.evals.set_run import SetRun
from evald.postures.contract import SetResult


class FeedingOrder:
    """Sorts sets by the length of one answer; remembers what was measured at earlier points.

    ``deterministic``: nothing is generated while prompts are scored.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        #: mean tokens of an answer, by set.
        self._measured: dict[str, float] = {}

    def note(self, result: SetResult) -> None:
        """Take in how long the answers of a set were."""
        mean = result.metrics.get(f"eval/{result.name}/response_len/mean")
        if mean is not None:
            self._measured[result.name] = mean

    def phases(self, sets: Iterable[SetRun]) -> list[list[SetRun]]:
        """Give the sets in the order in which they are asked; a phase begins when none runs."""
        order = self.sort(sets)
        if not self._deterministic:
            return [order]
        scored = [one for one in order if one.kind.single]
        generated = [one for one in order if not one.kind.single]
        return [phase for phase in (generated, scored) if phase]

    def sort(self, sets: Iterable[SetRun]) -> list[SetRun]:
        """Give the sets in the order in which they are asked; equals as the config has them.

        As long as an answer of any set is unknown, all are as long as they may be.
        """
        sets = list(sets)
        lengths = {one.name: self._longest(one) for one in sets}
        if all(one.name in self._measured or one.kind.single for one in sets):
            lengths |= self._measured

        def work(one: SetRun) -> tuple[float, int]:
            length = 0.0 if one.kind.single else lengths[one.name]
            return length, one.prepared.loaded.n_samples

        return sorted(sets, key=work, reverse=True)

    @staticmethod
    def _longest(one: SetRun) -> float:
        return float(one.eval_set.max_response_len)
