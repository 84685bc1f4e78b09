"""What undisturbed engines would have answered, sample by sample."""

from __future__ import annotations

from typing import Protocol

from tokenizers import Tokenizer

from evald.point import PointKey
from evald.results.records import PointRecord
from evald.results.samples import SampleRecord, sample_file
from evald.results.stored_samples import StoredSamples
from evald.testing.fake_engine import varied

from .plan import RUN, VARY, replay_plan
from .setting import SAMPLES, label
from .world import World


class Oracle(Protocol):
    """Knows the right answers."""

    def expect(self, digest: str, name: str, question: int) -> tuple[str, float]:
        """Give response (its end) and score to a question of a set, on the snapshot of a digest."""


class FakeOracle:
    """Fake engines answer with what is hidden in the weights, and the prompt."""

    def __init__(self, world: World) -> None:
        self._answers = {
            line["digest"]: line["answer"] for line in world.told() if line.get("digest")
        }
        base = world.places.work / "base"
        self._tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))

    def expect(self, digest: str, name: str, question: int) -> tuple[str, float]:
        """Compute it."""
        ids = self._tokenizer.encode(f"{name}{question}?", add_special_tokens=False).ids
        number = varied(self._answers[digest], ids, VARY)
        return f"\\boxed{{{number}}}", float(str(number) == label(question))


class ReferenceOracle:
    """Real engines are asked once more: a run of the same weights, without faults."""

    def __init__(self, world: World) -> None:
        weights = {
            line["digest"]: (line["seed"], line["answer"])
            for line in world.told()
            if line.get("digest")
        }
        steps = {one: step for step, one in enumerate(dict.fromkeys(weights.values()), start=1)}
        self._steps = {digest: steps[one] for digest, one in weights.items()}
        self._samples: dict[tuple[int, str, int], tuple[str, float]] = {}
        reference = World(replay_plan(list(steps)), room_s=600.0, real=True)
        try:
            reference.run()
            #: what went wrong with the reference itself.
            self.problems = reference.problems
            for point in reference.points():
                for name in SAMPLES:
                    for one in samples_of(reference, point, name):
                        key = (point.step, name, int(one.question) - 1)
                        self._samples[key] = one.response, one.score or 0.0
        finally:
            reference.close()

    def expect(self, digest: str, name: str, question: int) -> tuple[str, float]:
        """Look it up; a question that the reference could not answer gives nothing."""
        return self._samples.get((self._steps[digest], name, question), ("", 0.0))


def samples_of(world: World, point: PointRecord, name: str) -> list[SampleRecord]:
    """Read the samples of one set of a point that count."""
    key = PointKey(RUN, point.step, point.revision, point.kind)
    stored = StoredSamples(
        sample_file(world.places.results, key, name),
        point.digest or "",
        point.provenance["sets"][name]["config"],
        n_samples=SAMPLES[name],
    )
    stored.count()
    return [one for batch in stored.batches() for one in batch]
