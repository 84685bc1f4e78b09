from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from evald.config import EvalSet
from evald.errors import ConfigError, EvalSkip, InvalidSnapshot, SnapshotGone
from evald.evals.encoding import Encoded, Encoding, Fault
from evald.evals.kinds.generate import EncodedPrompt
from evald.evals.preparation import Preparation, PreparedPoint, check_prompts
from evald.evals.rows import Question
from evald.evals.sets import LoadedSet, load_set
from evald.evals.token_ids import unpack
from evald.point import EvalPoint, PointKey, Snapshot

CHAT = [{"prompt": [{"role": "user", "content": "hi"}], "label": 1}]


def point_at(directory: Path) -> EvalPoint:
    snapshot = Snapshot(run="r", step=1, directory=directory, fingerprint="f", size_bytes=1)
    return EvalPoint(PointKey("r", 1), snapshot)


def copy_of(model: Path, name: str, **template: str) -> Path:
    """Copy a model as a snapshot, with another chat template if one is given."""
    snapshot = model.parent / name
    shutil.copytree(model, snapshot)
    if template:
        (snapshot / "chat_template.jinja").write_text(template["template"])
    return snapshot


def prompts_of(prepared: PreparedPoint) -> list[list[int]]:
    """Token ids of the prompts; none of those that cannot be asked."""
    prompts = prepared.sets[0].prompts
    return [unpack(p.ids) if isinstance(p, EncodedPrompt) else [] for p in prompts]


def toy(make_set: Any, rows: Any = CHAT, **fields: Any) -> LoadedSet:
    return load_set(make_set(rows, **fields))


def test_prompts_are_the_base_models_and_encoded_once(make_model: Any, make_set: Any) -> None:
    base = make_model()
    preparation = Preparation([toy(make_set)], base)
    first = preparation.prepare(point_at(copy_of(base, "step_1")))
    second = preparation.prepare(point_at(copy_of(base, "step_2", template="other")))
    assert prompts_of(first) == prompts_of(second)
    assert first.sets[0].prompts is second.sets[0].prompts
    assert first.sets[0].config_digest == second.sets[0].config_digest
    assert first.provenance["chat_template"]["differs"] is False
    assert second.provenance["chat_template"]["differs"] is True
    assert second.provenance["tokenizer"]["differs"] is False


class Slow(Encoding):
    """Says when it encodes, and goes on when it may."""

    def __init__(self, *, encodes: threading.Event, may: threading.Event) -> None:
        super().__init__()
        self._encodes, self._may = encodes, may

    def encode(self, eval_set: EvalSet, questions: Sequence[Question]) -> list[Encoded]:
        self._encodes.set()
        assert self._may.wait(20)
        return super().encode(eval_set, questions)


def test_a_point_waits_for_the_thread_of_one_that_was_cancelled(
    make_model: Any, make_set: Any
) -> None:
    """They share one encoder: nothing cancels a thread, and the next point comes all the same."""
    base = make_model()
    encodes, may = threading.Event(), threading.Event()
    made: list[Slow] = []

    def make_encoder() -> Slow:
        made.append(Slow(encodes=encodes, may=may))
        return made[-1]

    preparation = Preparation([toy(make_set)], base, make_encoder=make_encoder)
    with ThreadPoolExecutor(2) as pool:
        cancelled = pool.submit(preparation.prepare, point_at(copy_of(base, "step_1")))
        assert encodes.wait(20)
        before = len(made)
        after = pool.submit(preparation.prepare, point_at(copy_of(base, "step_2")))
        wait([after], timeout=0.2)
        assert len(made) == before
        may.set()
        prompts = cancelled.result(20).sets[0].prompts
        assert after.result(20).sets[0].prompts is prompts


def test_the_snapshots_own_template_is_used_when_asked_for(make_model: Any, make_set: Any) -> None:
    base = make_model()
    preparation = Preparation([toy(make_set, tokenizer="snapshot")], base)
    one = preparation.prepare(point_at(copy_of(base, "step_1", template="AB")))
    two = preparation.prepare(point_at(copy_of(base, "step_2", template="A")))
    again = preparation.prepare(point_at(base.parent / "step_2"))
    assert [len(prompts_of(p)[0]) for p in (one, two, again)] == [2, 1, 1]
    assert one.sets[0].config_digest != two.sets[0].config_digest
    assert two.sets[0].prompts is again.sets[0].prompts


def test_a_snapshot_without_tokenizer_matters_only_to_sets_that_want_it(
    make_model: Any, make_set: Any
) -> None:
    base = make_model()
    bare = base.parent / "step_1"
    bare.mkdir()
    prepared = Preparation([toy(make_set)], base).prepare(point_at(bare))
    assert prepared.provenance["tokenizer"]["snapshot"] is None
    assert prepared.provenance["tokenizer"]["differs"] is None
    own = Preparation([toy(make_set, tokenizer="snapshot")], base)
    with pytest.raises(InvalidSnapshot, match=r"cannot prepare eval set 'toy': .*tokenizer\.json"):
        own.prepare(point_at(bare))
    with pytest.raises(SnapshotGone, match="vanished before the pin"):
        own.prepare(point_at(base.parent / "nowhere"))


def test_provenance_tells_what_was_measured_with_what(make_model: Any, make_set: Any) -> None:
    base = make_model()
    loaded = toy(make_set, temperature=0.5, n_samples_per_eval_prompt=2, seed=3)
    prepared = Preparation([loaded], base).prepare(point_at(base))
    told = prepared.provenance["sets"]["toy"]
    assert told["data"] == loaded.data_digest
    assert told["config"] == prepared.sets[0].config_digest
    assert told["settings"] == loaded.settings_digest
    assert (told["grader"], told["seed"], told["samples_per_question"]) == ("exact", 3, 2)
    assert told["sampling"]["temperature"] == 0.5
    json.dumps(prepared.provenance)


def test_a_base_model_that_cannot_be_used_skips_the_point(make_model: Any, make_set: Any) -> None:
    base = make_model()
    snapshot = copy_of(base, "step_1")
    (base / "tokenizer.json").unlink()
    with pytest.raises(EvalSkip, match="cannot use the base model's tokenizer") as caught:
        Preparation([toy(make_set)], base).prepare(point_at(snapshot))
    assert caught.value.reason == "crashed"
    (base / "config.json").unlink()
    with pytest.raises(EvalSkip, match=r"cannot use the base model: .*config.json"):
        Preparation([toy(make_set)], base).prepare(point_at(snapshot))


def test_a_stop_token_beyond_the_vocabulary_is_refused(make_model: Any, make_set: Any) -> None:
    base = make_model()
    preparation = Preparation([toy(make_set, stop_token_ids=[5, 999])], base)
    with pytest.raises(EvalSkip, match="'toy': stop_token_ids: token None has id 999"):
        preparation.prepare(point_at(base))


def test_questions_that_cannot_be_asked_are_told_before_the_start(
    make_model: Any, make_set: Any
) -> None:
    base = make_model(max_position_embeddings=560)
    rows = [{"prompt": "short", "label": 1}, {"prompt": "x" * 100, "label": 1}]
    good = load_set(make_set(rows[:1], "good"))
    (note,) = check_prompts([good, load_set(make_set(rows, "long"))], base)
    assert note.startswith("eval set 'long': 1 of 2 questions cannot be asked: question 2: the")
    with pytest.raises(ConfigError, match="1 of 1 questions cannot be asked"):
        check_prompts([load_set(make_set(rows[1:], "none"))], base)
    long = [load_set(make_set(rows, "long"))]
    assert check_prompts(long, base, context_len=700) == []


def test_a_base_model_that_cannot_be_used_is_told_once(tmp_path: Path, make_set: Any) -> None:
    sets = [load_set(make_set(CHAT, name)) for name in ("a", "b")]
    with pytest.raises(ConfigError) as caught:
        check_prompts(sets, tmp_path)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"a":' * 100_000),
        ("tokenizer_config.json", '{"a":' * 100_000),
        ("special_tokens_map.json", '{"a":' * 100_000),
        ("tokenizer_config.json", '{"chat_template": [{"name": ["x"], "template": "a"}]}'),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}'),
        # the Rust library panics over it
        ("tokenizer.json", '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "A"}}'),
    ],
)
def test_odd_tokenizer_files_of_a_snapshot_cost_that_point_at_most(
    make_model: Any, make_set: Any, name: str, content: str
) -> None:
    base = make_model()
    snapshot = copy_of(base, "step_1")
    (snapshot / name).write_text(content)
    prepared = Preparation([toy(make_set)], base).prepare(point_at(snapshot))
    assert prompts_of(prepared) != []
    own = Preparation([toy(make_set, tokenizer="snapshot")], base)
    with pytest.raises(InvalidSnapshot, match="uses the snapshot's tokenizer"):
        own.prepare(point_at(snapshot))


def test_a_prompt_that_the_tokenizer_cannot_encode_is_one_fault(
    make_model: Any, make_set: Any
) -> None:
    base = make_model(template="{{ messages[0].content or '\\ud800' }}")
    rows = [*CHAT, {"prompt": [{"role": "user", "content": ""}], "label": 1}]
    prepared = Preparation([toy(make_set, rows)], base).prepare(point_at(base))
    assert [isinstance(one, Fault) for one in prepared.sets[0].prompts] == [False, True]


def test_a_config_that_is_no_object_is_said(make_model: Any, make_set: Any) -> None:
    base = make_model()
    (base / "config.json").write_text("[]")
    with pytest.raises(EvalSkip, match=r"config.json: it is not a JSON object"):
        Preparation([toy(make_set)], base).prepare(point_at(base))


def test_all_questions_that_are_too_long_are_named(make_model: Any, make_set: Any) -> None:
    base = make_model(max_position_embeddings=560)
    rows = [{"prompt": "x" * (100 if n else 1), "label": 1} for n in range(30)]
    (note,) = check_prompts([load_set(make_set(rows, "long"))], base)
    assert "29 of 30 questions cannot be asked: question 2: the prompt has 100 tokens" in note
    named = ", ".join(str(n) for n in range(2, 22))
    assert note.endswith(f"; too long for the context: {named} and 9 more")


def test_the_chat_template_is_told_of_a_rows_tools(make_model: Any, make_set: Any) -> None:
    base = make_model(template="{{ tools[0].name if tools else '-' }}{{ documents }}")
    rows = [{**CHAT[0], "t": [{"name": "abc"}]}, CHAT[0]]
    loaded = toy(make_set, rows, tool_key="t", apply_chat_template_kwargs={"documents": "d"})
    prepared = Preparation([loaded], base).prepare(point_at(base))
    assert [len(prompt) for prompt in prompts_of(prepared)] == [4, 2]
