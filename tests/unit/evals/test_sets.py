from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from evald.config import EvalSet
from evald.errors import ConfigError
from evald.evals.sets import load_set

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "label": 2},
    {"prompt": [{"role": "user", "content": "hi"}], "label": "x"},
]


def problems_of(eval_set: EvalSet) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_set(eval_set)
    return caught.value.problems


def test_rows_become_questions_in_file_order_and_blank_lines_do_not_count(make_set: Any) -> None:
    text = "\ufeff\n" + "\n  \n".join(json.dumps(row) for row in ROWS) + "\n\n"
    loaded = load_set(make_set(text, n_samples_per_eval_prompt=3))
    assert [(q.id, q.prompt, q.label) for q in loaded.questions] == [
        ("1", "1+1=", 2),
        ("2", [{"role": "user", "content": "hi"}], "x"),
    ]
    assert loaded.name == "toy"
    assert loaded.n_samples == 6


def test_ids_and_metadata_come_from_their_keys(make_set: Any) -> None:
    rows = [
        {"prompt": "p", "label": 1, "key": 7, "m": {"a": 1}},
        {"prompt": "p", "label": 1, "key": "b", "m": None},
    ]
    loaded = load_set(make_set(rows, id_key="key", metadata_key="m"))
    assert [(q.id, q.metadata) for q in loaded.questions] == [("7", {"a": 1}), ("b", None)]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{bad", "line 2: not valid JSON"),
        ('{"prompt": ' + "[" * 100_000, "line 2: not valid JSON (maximum recursion depth"),
        (
            '{"label": 1, "prompt": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
            "message 1 has no 'content' of text",
        ),
        ("[1]", "line 2: the row is a list; give one JSON object a line"),
        ('"x"', "the row is text"),
        ("null", "the row is null"),
        ("3", "the row is a number"),
        (
            '{"label": 1, "question": "q"}',
            "key 'prompt' is missing (the row has label, question); set input_key",
        ),
        ("{}", "key 'prompt' is missing (the row has nothing)"),
        ('{"prompt": "p"}', "key 'label' is missing"),
        ('{"prompt": "", "label": 1}', "key 'prompt': the prompt is empty; give text or"),
        (
            '{"prompt": 5, "label": 1}',
            "the prompt is a number; give text or a list of chat messages",
        ),
        ('{"prompt": [], "label": 1}', "the list of messages is empty"),
        ('{"prompt": ["x"], "label": 1}', "message 1 is text"),
        ('{"prompt": [{"content": "x"}], "label": 1}', "message 1 has no text 'role'"),
        ('{"prompt": [{"role": "user"}], "label": 1}', "message 1 has no 'content' of text"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "label": 1}',
            "images are not supported",
        ),
        ('{"prompt": "p", "label": null}', "key 'label': the reference must be text"),
        ('{"prompt": "p", "label": {"a": 1}}', "the reference must be text"),
        ('{"prompt": "p", "label": "  "}', "the reference is empty"),
        ('{"prompt": "p", "label": []}', "the reference is empty"),
    ],
)
def test_a_bad_row_is_named_with_file_line_key_and_what_is_allowed(
    make_set: Any, row: str, sentence: str
) -> None:
    eval_set = make_set(json.dumps(ROWS[0]) + "\n" + row)
    (problem,) = problems_of(eval_set)
    assert problem.startswith(f"cannot read eval set 'toy': {eval_set.path} line 2: ")
    assert sentence in problem


def test_text_parts_and_tool_calls_are_messages(make_set: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    assert load_set(make_set([{"prompt": messages, "label": 1}])).questions[0].prompt == messages


def test_every_bad_row_is_named_but_not_without_end(make_set: Any) -> None:
    problems = problems_of(make_set("x\n" * 50))
    assert len(problems) == 21
    assert problems[-1].endswith("and 30 more faults")


def test_a_key_that_no_row_has_is_one_fault(make_set: Any) -> None:
    rows = [{"prompt": "p", "answer": n} for n in range(30)]
    eval_set = make_set(rows)
    (problem,) = problems_of(eval_set)
    assert problem == (
        f"cannot read eval set 'toy': {eval_set.path}: key 'label' is missing in all 30 rows "
        "(the first has prompt, answer); set label_key to the right one"
    )
    assert len(problems_of(make_set([*rows, {"prompt": "p", "label": 1}]))) == 21
    assert len(problems_of(make_set([{"prompt": "p"}, {"label": 1}]))) == 2


def test_a_repeated_id_is_named_with_both_lines(make_set: Any) -> None:
    rows = [{"prompt": "p", "label": 1, "id": i} for i in (1, 2, "1")]
    (problem,) = problems_of(make_set(rows, id_key="id"))
    assert "line 3: key 'id' has the value '1' of line 1 again" in problem


@pytest.mark.parametrize("value", [True, "", 1.5, None])
def test_an_id_is_text_or_an_integer(make_set: Any, value: object) -> None:
    (problem,) = problems_of(make_set([{"prompt": "p", "label": 1, "id": value}], id_key="id"))
    assert "id_key wants text or an integer" in problem


def test_messages_without_a_template_are_refused_at_load(make_set: Any) -> None:
    (problem,) = problems_of(make_set(ROWS, apply_chat_template=False))
    assert "line 2" in problem
    assert "apply_chat_template is false" in problem


def test_empty_missing_and_unreadable_files(make_set: Any) -> None:
    (problem,) = problems_of(make_set("\n\n"))
    assert "the file has no rows" in problem
    gone = msgspec.structs.replace(make_set(ROWS), path="/nowhere/x.jsonl")
    (problem,) = problems_of(gone)
    assert problem == (
        "cannot read eval set 'toy': /nowhere/x.jsonl: No such file or directory; "
        "set path to a JSONL file"
    )
    for path, meant in [
        ("/nowhere/x.jsonl[0:10]", "/nowhere/x.jsonl@[0:10]"),
        ("/nowhere/x.parquet[-5:]", "/nowhere/x.parquet@[-5:]"),
    ]:
        (problem,) = problems_of(msgspec.structs.replace(gone, path=path))
        assert problem.endswith(f"file or directory; for some rows of a file write {meant}")
    (problem,) = problems_of(msgspec.structs.replace(gone, path="/"))
    assert "Is a directory" in problem


def test_settings_of_grader_and_stop_are_checked_first(make_set: Any) -> None:
    (problem,) = problems_of(make_set(ROWS, grader="boxd_math"))
    assert problem.startswith("eval set 'toy': grader: 'boxd_math' is unknown; give one of exact,")
    two = problems_of(make_set(ROWS, grader="regex", stop=[""]))
    assert len(two) == 2


def test_choice_references_must_be_letters(make_set: Any) -> None:
    rows = [{"prompt": "p", "label": label} for label in ("a", ["B", "C"], "E")]
    (problem,) = problems_of(make_set(rows, grader="boxed_choice"))
    assert "line 3: key 'label': the reference 'E' is none of the letters 'ABCD'" in problem


def test_config_digest_follows_what_decides_a_score_and_nothing_else(make_set: Any) -> None:
    base = make_set(ROWS)
    digest = load_set(base).config_digest

    def changed(**fields: Any) -> bool:
        return load_set(msgspec.structs.replace(base, **fields)).config_digest != digest

    assert changed(temperature=0.5)
    assert changed(seed=1)
    assert changed(name="other")
    assert changed(grader="boxed_exact")
    assert changed(apply_chat_template_kwargs={"enable_thinking": False})
    assert changed(repetition_penalty=1.1)
    assert changed(metadata_overrides={"a": 1})
    assert not changed(n_samples_per_eval_prompt=4)
    assert not changed(min_eval_samples=1)
    assert not changed(list_up_to_tokens=1)
    assert not changed(grader_timeout_s=1.0)
    assert not changed(set_deadline_s=5.0)
    with open(base.path, "a") as file:  # noqa: PTH123 - appends
        file.write("\n" + json.dumps(ROWS[0]))
    assert changed()
    assert load_set(base).data_digest != load_set(make_set(ROWS)).data_digest


def test_metadata_overrides_lie_over_each_rows_metadata(make_set: Any) -> None:
    rows = [
        {"prompt": "p", "label": 1, "m": {"a": 1, "b": 2}},
        {"prompt": "p", "label": 1, "m": None},
    ]
    overrides = {"b": 3, "c": [4]}
    loaded = load_set(make_set(rows, metadata_key="m", metadata_overrides=overrides))
    assert [q.metadata for q in loaded.questions] == [{"a": 1, "b": 3, "c": [4]}, overrides]
    loaded = load_set(make_set(rows, metadata_overrides=overrides))
    assert loaded.questions[0].metadata == overrides
    (problem,) = problems_of(
        make_set([{**rows[0], "m": "text"}], metadata_key="m", metadata_overrides=overrides)
    )
    assert "line 1: key 'm' is text, over which metadata_overrides cannot be laid" in problem


def test_tools_are_a_list_or_the_json_of_one_and_a_row_may_have_none(make_set: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    chat = {"prompt": ROWS[1]["prompt"], "label": 1}
    rows = [chat | {"t": [tool]}, chat | {"t": json.dumps([tool])}, chat | {"t": None}, chat]
    loaded = load_set(make_set(rows, tool_key="t"))
    assert [q.tools for q in loaded.questions] == [[tool], [tool], [], []]
    assert load_set(make_set(rows)).questions[0].tools == []


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ("{", "line 1: key 't' is text, and no JSON ("),
        ({"name": "f"}, "line 1: key 't' is no list of objects; give tools"),
        (["f"], "line 1: key 't' is no list of objects"),
    ],
)
def test_tools_that_are_none_are_named(make_set: Any, tools: object, sentence: str) -> None:
    (problem,) = problems_of(make_set([{**ROWS[1], "t": tools}], tool_key="t"))
    assert sentence in problem


def test_tools_that_no_template_would_tell_of_are_refused(make_set: Any) -> None:
    rows = [{**ROWS[0], "t": [{"name": "f"}]}]
    (problem,) = problems_of(make_set(rows, tool_key="t"))
    assert "key 't' has tools, but the prompt is text that is sent as it is" in problem
    loaded = load_set(make_set(rows, tool_key="t", apply_chat_template=True))
    assert loaded.questions[0].tools == [{"name": "f"}]


def test_a_slice_keeps_the_numbers_of_its_rows_and_reads_no_others(make_set: Any) -> None:
    lines = ["{bad", "", *[json.dumps(ROWS[0])] * 3, "{bad"]
    eval_set = make_set("\n".join(lines))
    sliced = msgspec.structs.replace(eval_set, path=f"{eval_set.path}@[1:-1]")
    loaded = load_set(sliced)
    assert [q.id for q in loaded.questions] == ["2", "3", "4"]
    digest = loaded.data_digest
    with open(eval_set.path, "a") as file:  # noqa: PTH123 - appends
        file.write("\nmore")
    assert load_set(msgspec.structs.replace(sliced, path=f"{eval_set.path}@[1:4]")).data_digest == (
        digest
    )
    (problem,) = problems_of(msgspec.structs.replace(sliced, path=f"{eval_set.path}@[:2]"))
    assert f"{eval_set.path}@[:2] line 1: not valid JSON" in problem
    (problem,) = problems_of(msgspec.structs.replace(sliced, path=f"{eval_set.path}@[9:]"))
    assert problem.endswith("@[9:]: the slice takes none of its rows; give another one")


@pytest.mark.parametrize("part", ["@[5]", "@[0:10:2]", "@[a:b]", "@[0:5"])
def test_what_looks_like_a_slice_and_is_none_is_said(make_set: Any, part: str) -> None:
    eval_set = make_set(ROWS)
    (problem,) = problems_of(msgspec.structs.replace(eval_set, path=eval_set.path + part))
    assert problem.endswith("what stands behind @ is no slice; write FILE@[a:b], such as @[0:100]")


def test_a_set_that_can_never_have_enough_samples_is_refused(make_set: Any) -> None:
    (problem,) = problems_of(make_set(ROWS, n_samples_per_eval_prompt=2, min_eval_samples=5))
    assert "2 questions make 4 samples, fewer than min_eval_samples = 5; raise" in problem
    assert load_set(make_set(ROWS, min_eval_samples=2)).n_samples == 2
