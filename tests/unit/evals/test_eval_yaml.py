"""The eval YAML of miles and slime: what is accepted, what it becomes, what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from evald.config import Config, EvalSet
from evald.config_load import build_config, dump_config
from evald.errors import ConfigError

SHIPPED_STYLE = """\
eval:
  defaults:
    n_samples_per_eval_prompt: 16
    max_response_len: 16384
    top_p: 0.7
  datasets:
    - name: aime
      path: /data/aime-2024/aime-2024.jsonl
      rm_type: deepscaler
    - name: gpqa
      path: /data/gpqa/gpqa_eval.parquet@[0:100]
      rm_type: gpqa
      temperature: 1
"""


class Yaml:
    """Loads configs with an eval.yaml in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environ: dict[str, str] = {}
        self.name = "eval.yaml"

    def load(self, text: str, **more: Any) -> Config:
        (self.directory / self.name).write_text(text)
        raw = {
            "staging": {"root": "/dev/shm/x"},
            "results": {"dir": "out"},
            "fleet": {"model": "base"},
            "eval_config": self.name,
            **more,
        }
        return build_config(raw, base=self.directory, environ=self.environ)

    def one(self, fields: str, **more: Any) -> EvalSet:
        """Load one data set with these fields beside name, path and rm_type."""
        base = "name: a, path: a.jsonl, rm_type: math"
        return self.load(f"datasets: [{{{base}, {fields}}}]", **more).eval[0]

    def problems(self, text: str, **more: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.load(text, **more)
        where = f"{self.directory / self.name} "
        return [problem.replace(where, "") for problem in caught.value.problems]


@pytest.fixture
def yaml(tmp_path: Path) -> Yaml:
    return Yaml(tmp_path)


def test_a_file_as_people_have_it(yaml: Yaml) -> None:
    aime, gpqa = yaml.load(SHIPPED_STYLE).eval
    assert (aime.name, aime.path) == ("aime", "/data/aime-2024/aime-2024.jsonl")
    assert (aime.grader, aime.thinking) == ("boxed_math", True)
    assert (aime.n_samples_per_eval_prompt, aime.max_response_len, aime.top_p) == (16, 16384, 0.7)
    assert gpqa.path == "/data/gpqa/gpqa_eval.parquet@[0:100]"
    assert (gpqa.grader, gpqa.choices, gpqa.temperature) == ("choice", "ABCDEFGHIJ", 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "datasets: [{name: a, path: /a, rm_type: f1}]",
        "eval: {datasets: [{name: a, path: /a, rm_type: f1}]}",
        "eval: {datasets: {a: {path: /a, rm_type: f1}}}",
        "eval: {datasets: {b: {name: a, path: /a, rm_type: f1}}}",
        "defaults: {rm_type: f1}\ndatasets: {a: {path: /a}}",
        "x-common: &c {path: /a, rm_type: f1}\neval: {datasets: {a: *c}}",
        "x-common: &c {path: /b, rm_type: f1}\neval: {datasets: {a: {<<: *c, path: /a}}}",
        "defaults: null\ndatasets: {a: {path: /a, rm_type: f1, multimodal_keys: null}}",
        "\ufeff# comment\ndatasets: {a: {path: /a, rm_type: f1, metadata_key: ~}}",
    ],
)
def test_every_shape_gives_the_same_set(yaml: Yaml, text: str) -> None:
    (one,) = yaml.load(text).eval
    assert (one.name, one.path, one.grader) == ("a", "/a", "f1")
    assert one.grader_config == {"yes_no": True}


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ("input_key: no", "input_key", "no"),
        ("prompt_key: 2024", "input_key", "2024"),
        ("label_key: 1e3", "label_key", "1e3"),
        ("tool_key: 2024-01-01", "tool_key", "2024-01-01"),
        ("metadata_key: 'on'", "metadata_key", "on"),
        ("n_samples_per_eval_prompt: 4", "n_samples_per_eval_prompt", 4),
        ("n_samples_per_eval_prompt: '4'", "n_samples_per_eval_prompt", 4),
        ("max_response_len: 1e4", "max_response_len", 10000),
        ("max_response_len: 16_384", "max_response_len", 16384),
        ("temperature: 1", "temperature", 1.0),
        ("temperature: .5", "temperature", 0.5),
        ("temperature: 6e-1", "temperature", 0.6),
        ("top_p: 0.95", "top_p", 0.95),
        ("top_k: -1", "top_k", -1),
        ("repetition_penalty: 1.05", "repetition_penalty", 1.05),
        ("min_new_tokens: 2", "min_new_tokens", 2),
        ("min_eval_samples: 7", "min_eval_samples", 7),
        ("stop: [no, 5, '\\n', \"\\n\"]", "stop", ["no", "5", "\\n", "\n"]),
        ("stop: </answer>", "stop", ["</answer>"]),
        ("stop: null", "stop", []),
        ("stop_token_ids: [1, '2']", "stop_token_ids", [1, 2]),
        ("stop_token_ids: 3", "stop_token_ids", [3]),
        ("no_stop_trim: yes", "no_stop_trim", True),
        ("skip_special_tokens: off", "skip_special_tokens", False),
        ("apply_chat_template: true", "apply_chat_template", True),
        ("apply_chat_template: null", "apply_chat_template", "auto"),
        (
            "apply_chat_template_kwargs: {enable_thinking: off, day: 2024-01-01, n: 1e1, no: 3}",
            "apply_chat_template_kwargs",
            {"enable_thinking": False, "day": "2024-01-01", "n": 10.0, "no": 3},
        ),
        (
            "metadata_overrides: {split: test, deep: [{a: 1.5}, null, '7'], at: 12:30, v: !!str 7}",
            "metadata_overrides",
            {"split": "test", "deep": [{"a": 1.5}, None, "7"], "at": "12:30", "v": "7"},
        ),
    ],
)
def test_each_field_is_honoured_and_names_stay_names(
    yaml: Yaml, fields: str, field: str, value: object
) -> None:
    assert getattr(yaml.one(fields), field) == value


def test_names_that_yaml_takes_for_something_else_stay_names(yaml: Yaml) -> None:
    text = (
        "datasets: {no: {path: on}, 2024: {path: 1e3}, 1.50: {path: yes}}\ndefaults: {rm_type: f1}"
    )
    assert [one.name for one in yaml.load(text).eval] == ["no", "2024", "1.50"]
    assert [Path(one.path).name for one in yaml.load(text).eval] == ["on", "1e3", "yes"]


def test_defaults_lie_over_those_of_the_config_file_and_under_the_set(yaml: Yaml) -> None:
    text = """
defaults: {temperature: 0.6, stop: [x], rm_type: math, metadata_overrides: {a: 1}, label_key: l}
datasets:
  - {name: one, path: a}
  - {name: two, path: a, temperature: 0.1, stop: [], rm_type: f1, metadata_overrides: null}
  - {name: three, path: a, label_key: null, top_p: null}
"""
    defaults = {"temperature": 0.9, "top_p": 0.5, "label_key": "answer", "seed": 7}
    one, two, three = yaml.load(text, defaults=defaults).eval
    assert (one.temperature, one.top_p, one.stop, one.grader) == (0.6, 0.5, ["x"], "boxed_math")
    assert (one.metadata_overrides, one.seed, one.label_key) == ({"a": 1}, 7, "l")
    assert (two.temperature, two.stop, two.grader) == (0.1, [], "f1")
    assert two.metadata_overrides == {}
    assert (three.label_key, three.top_p) == ("label", 1.0)  # null: what evald has by itself


def test_tables_and_yaml_can_stand_together(yaml: Yaml) -> None:
    text = "datasets: {b: {path: b, rm_type: remote_rm}, c: {path: c, rm_type: math}}"
    defaults = {"grader": "remote", "grader_config": {"url": "http://rm:1"}}
    config = yaml.load(text, defaults=defaults, eval=[{"name": "a", "path": "a"}])
    assert [one.name for one in config.eval] == ["a", "b", "c"]
    a, b, c = config.eval
    assert a.grader_config == b.grader_config == {"url": "http://rm:1"}
    assert (c.grader, c.grader_config) == ("boxed_math", {})
    (problem,) = yaml.problems(
        "\ndatasets: {a: {path: b, rm_type: f1}}", eval=[{"name": "a", "path": "a"}]
    )
    assert problem == "line 2: a.name: 'a' is already the name of eval[0]; names must be unique"


def test_without_rm_type_the_grader_is_the_config_files(yaml: Yaml) -> None:
    text = "datasets: {a: {path: a}}"
    assert yaml.load(text, defaults={"grader": "number"}).eval[0].grader == "number"
    (problem,) = yaml.problems(text)
    assert problem == (
        "line 1: a: rm_type is missing; name one here or in defaults, or set grader in [defaults] "
        "of the config file"
    )


def test_a_function_of_the_users_asks(yaml: Yaml) -> None:
    for path in ("pkg.rollout.generate", "pkg.rollout:generate"):
        one = yaml.one(f"custom_generate_function_path: '{path}'")
        assert (one.kind, one.function, one.grader) == (
            "custom",
            "pkg.rollout:generate",
            "boxed_math",
        )
    (one,) = yaml.load("datasets: {a: {path: a, custom_generate_function_path: a.b}}").eval
    assert one.kind == "custom"  # it may grade by itself
    (problem,) = yaml.problems("datasets: {a: {path: a, custom_generate_function_path: gen}}")
    assert problem.startswith('line 1: a.custom_generate_function_path: must be "module:function"')


def test_paths_are_relative_to_the_yaml_file(yaml: Yaml, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    yaml.name = "sub/eval.yaml"
    text = "datasets: {a: {path: '../a.jsonl@[-5:]', rm_type: f1}}"
    assert yaml.load(text).eval[0].path == str(tmp_path / "a.jsonl@[-5:]")


def test_inline_text_is_relative_to_the_config_file(yaml: Yaml, tmp_path: Path) -> None:
    text = "datasets: {a: {path: a.jsonl, rm_type: f1}}"
    config = yaml.load("", eval_config="base64:" + base64.b64encode(text.encode()).decode())
    assert config.eval[0].path == str(tmp_path / "a.jsonl")
    assert dump_config(config)["eval_config"] == "base64:..."
    for inline, sentence in (
        ("base64:x!", "eval_config: what follows base64: is no base64: "),
        ("base64:/w==", "cannot read eval_config (base64): not UTF-8 at byte 0"),
        ("base64:", "cannot read eval_config (base64): it is empty"),
        ("nowhere.yaml", f"eval_config: cannot read {tmp_path}/nowhere.yaml: No such file"),
    ):
        (problem,) = yaml.problems("", eval_config=inline)
        assert problem.startswith(sentence)


def test_environment_variables_are_filled_in(yaml: Yaml) -> None:
    yaml.environ = {"DATA": "/data", "N": "4"}
    one = yaml.one(
        "path: '${DATA}/${oc.env:NAME,\"x y\"}.jsonl', n_samples_per_eval_prompt: '${N}', "
        r"stop: ['\${DATA}', '$DATA'], top_p: '${P:-0.5}'".replace("path: ", "metadata_key: ")
    )
    assert (one.metadata_key, one.n_samples_per_eval_prompt) == ("/data/x y.jsonl", 4)
    assert (one.stop, one.top_p) == (["${DATA}", "$DATA"], 0.5)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "${NOPE}/a",
            "line 1: environment variable NOPE is not set; set it, or write ${NOPE:-default}",
        ),
        ("${oc.env:NOPE}/a", "line 1: environment variable NOPE is not set; set it, or write "),
        ("$NOPE/a", "line 1: a.path: $NOPE is not filled in; write ${NOPE}"),
        ("${eval.root}/a", "line 1: ${eval.root} names no environment variable; write ${NAME}"),
    ],
)
def test_variables_that_are_not_set_are_named(yaml: Yaml, path: str, sentence: str) -> None:
    (problem,) = yaml.problems(f"datasets: {{a: {{path: '{path}', rm_type: f1}}}}")
    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("temprature: 1", "line 1: temprature: unknown key; did you mean 'temperature'? allowed"),
        ("max_tokens: 1", "max_tokens: unknown key; did you mean 'max_response_len'? allowed"),
        ("n: 4", "n: unknown key; did you mean 'n_samples_per_eval_prompt'? allowed"),
        ("rm_typ: f1", "rm_typ: unknown key; did you mean 'rm_type'? allowed"),
        ("rm_type: [f1]", "a.rm_type: expected text, got a list"),
        ("multimodal_keys: {image: i}", "multimodal_keys cannot be served: prompts are text here"),
        (
            "custom_rm_path: a.b",
            "custom_rm_path cannot be served: its function takes the trainer's",
        ),
        ("app_service: http://x", "app_service cannot be served: it belongs to the trainer's own"),
        ("eval_task_timeout: 5", "the deadlines are [dispatch] sample_timeout_s and"),
        (
            "cluster_key: c",
            "line 1: cluster_key is evald's own; set it in [defaults] of the config",
        ),
        ("rm_type: mth", "line 1: a.rm_type: rm_type 'mth' is unknown; known are math, "),
        ("rm_type: ifbench", "line 1: a.rm_type: rm_type 'ifbench' cannot be served: its checks"),
        ("temperature: hot", "line 1: a.temperature: expected a number, got 'hot'"),
        ("temperature: .inf", "line 1: a.temperature: expected a number, got '.inf'"),
        ("temperature: -1", "line 1: a.temperature: expected float >= 0.0, got -1.0"),
        ("top_k: 0", "line 1: a.top_k: must be -1 (off) or at least 1, got 0"),
        ("top_k: 1.5", "line 1: a.top_k: expected a whole number, got '1.5'"),
        ("top_k: 010", "line 1: a.top_k: expected a whole number, got '010'"),
        ("top_k: 0x10", "expected a whole number, got '0x10'"),
        ("n_samples_per_eval_prompt: 0", "a.n_samples_per_eval_prompt: expected int >= 1, got 0"),
        ("min_eval_samples: 0", "a.min_eval_samples: expected int >= 1, got 0"),
        ("stop: {a: b}", "line 1: a.stop: expected text, got a mapping"),
        ("skip_special_tokens: 1", "a.skip_special_tokens: expected true or false, got '1'"),
        ("metadata_overrides: [1]", "a.metadata_overrides: expected a mapping, got a list"),
        ("input_key: [a]", "a.input_key: expected text, got a list"),
        ("input_key: a, prompt_key: b", "a.prompt_key: is input_key, which is there, too"),
        ("min_new_tokens: 600", "a.min_new_tokens: 600 must not be larger than max_response_len"),
        ("path: b", "line 1: key 'path' is there twice (line 1); keep one"),
        ("input_key: !env X", "line 1: the tag '!env' is not supported; remove it"),
        ("? [a, b] : 1", "line 1: a list or a mapping cannot be a key; write a name"),
        ("<<: 3", "line 1: << wants a mapping, such as <<: *common"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    yaml: Yaml, field: str, sentence: str
) -> None:
    rm_type = "" if field.startswith("rm_typ") else "rm_type: math, "
    (problem,) = yaml.problems(f"datasets: [{{name: a, path: a, {rm_type}{field}}}]")
    assert sentence in problem


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("defaults: {rm_typ: f1}\ndatasets: {a: {path: a}, b: {path: b}}", "line 1: rm_typ: unk"),
        ("datasets: {a: {dataset: a, rm_type: f1}}", "dataset: unknown key; did you mean 'path'?"),
        ("datasets: [{nmae: a, path: a, rm_type: f1}]", "nmae: unknown key; did you mean 'name'?"),
        ("datasets: {a: {path: [a], rm_type: f1}}", "a.path: expected text, got a list"),
        ("datasets: {a: {path: a, rm_type: f1}}\ndefaults: {name: [a]}", "expected text, got a li"),
        (
            "datasets: {a: {path: a, custom_generate_function: a.f}}",
            "did you mean 'custom_generate_function_path'?",
        ),
        (
            "datasets: {a: {path: a, rm_typ: f1, custom_generate_function_path: a.f}}",
            "rm_typ: unknown key; did you mean 'rm_type'?",
        ),
    ],
)
def test_a_field_with_a_fault_is_not_missing_as_well(yaml: Yaml, text: str, sentence: str) -> None:
    (problem,) = yaml.problems(text)
    assert sentence in problem


def test_an_empty_field_of_others_hides_none_of_evalds(yaml: Yaml) -> None:
    assert yaml.one("multimodal_keys: {}", defaults={"tool_key": "t"}).tool_key == "t"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot read {}: it is empty"),
        ("- a", "line 1: expected a mapping with eval: or datasets:"),
        ("eval: 3", "line 1: eval: expected a mapping with datasets:"),
        ("\neval: {default: {}}", "line 2: default: unknown key; did you mean 'defaults'?"),
        ("eval: {}", "line 1: datasets: expected a list of data sets, or a mapping by name"),
        ("datasets: []", "line 1: datasets: expected a list of data sets"),
        ("datasets: 5", "line 1: datasets: expected a list of data sets"),
        ("datasets: [5]", "line 1: datasets: expected a mapping of fields"),
        ("datasets: [{path: a, rm_type: f1}]", "line 1: datasets: name is missing; it must be set"),
        ("datasets: {a: {rm_type: f1}}", "line 1: a: path is missing; it must be set"),
        ("datasets: {a: null}\ndefaults: {rm_type: f1}", "line 1: a: path is missing"),
        (
            "defaults: {path: a}\ndatasets: {a: {path: b, rm_type: f1}}",
            "line 1: defaults.path: belongs to one data set; move it there",
        ),
        (
            "eval: {datasets: {a: {path: b, rm_type: f1}}}\ndefaults: {temperature: 1}",
            "line 2: defaults: belongs under eval:, where it would be read",
        ),
        ("delegate: [{name: x}]", "line 1: delegate cannot be served: evald asks no other"),
        ("datasets: {a/b: {path: b, rm_type: f1}}", "line 1: a/b.name: must be letters, digits"),
        ("a: [1\nb: 2", "cannot parse line 2: expected ',' or ']'"),
        ("\ta: 1", "cannot parse line 1: found character '\\t' that cannot start any token"),
        ("a: *x", "cannot parse line 1: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2", "cannot parse line 2: but found another document"),
        ("a: \x07", "cannot parse {}: unacceptable character #x0007"),
        ("[" * 5000, "cannot parse {}: too many brackets in one another"),
        ("a: &a [*a]", "cannot read line 1: more than 50000 values, or more than 50 of them"),
    ],
)
def test_a_file_that_is_no_eval_config_says_where(yaml: Yaml, text: str, sentence: str) -> None:
    problem = yaml.problems(text)[0]
    assert problem.startswith(sentence.replace("{}", str(yaml.directory / yaml.name)))


def test_aliases_cannot_fill_the_memory(yaml: Yaml) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "more than 50000 values" in yaml.problems("\n".join(levels))[0]
    assert "larger than 1048576 bytes" in yaml.problems("#" * (1 << 20) + "\n")[0]


def test_all_faults_come_together_and_a_shared_one_once(yaml: Yaml) -> None:
    text = """
defaults: {temperature: -1, rm_type: maths}
datasets:
  - {name: a, path: a}
  - {name: b, path: b, top_p: 2}
"""
    problems = yaml.problems(text)
    assert [problem.split(": ")[0:2] for problem in problems] == [
        ["line 2", "defaults.rm_type"],
        ["line 2", "defaults.temperature"],
        ["line 5", "b.top_p"],
    ]


def test_a_black_box_has_no_eval_config(yaml: Yaml) -> None:
    box = {"blackbox": {"command": ["x", "{output}"]}}
    raw = {"staging": {"root": "/dev/shm/x"}, "results": {"dir": "out"}, "eval_config": "eval.yaml"}
    (yaml.directory / "eval.yaml").write_text("datasets: {a: {path: a, rm_type: f1}}")
    with pytest.raises(ConfigError, match=r"remove the \[\[eval\]\] tables and eval_config"):
        build_config(raw | box, base=yaml.directory, environ={})
