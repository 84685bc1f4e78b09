"""The config: what is accepted, and what each refusal says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from evald.config import Config
from evald.config_load import build_config, dump_config, load_config
from evald.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "run": "r1",
    "staging": {"root": "/dev/shm/x"},
    "results": {"dir": "out"},
    "fleet": {"model": "base"},
    "eval": [{"name": "math", "path": "math.jsonl"}],
}


def changed(**dotted: Any) -> dict[str, Any]:
    """MINIMAL with ``a__b=value`` set at a.b; ``...`` removes the key."""
    raw = copy.deepcopy(MINIMAL)
    for key, value in dotted.items():
        *path, last = key.split("__")
        table: Any = raw
        for part in path:
            table = table[int(part)] if part.isdigit() else table.setdefault(part, {})
        if value is ...:
            del table[last]
        else:
            table[last] = value
    return raw


def posture(name: str, **fields: Any) -> dict[str, Any]:
    """MINIMAL with another posture than a fleet."""
    sets = {key: fields.pop(key) for key in list(fields) if key.startswith("eval__")}
    raw = changed(fleet=..., **sets)
    table = {"model": "base"} | ({} if name == "blackbox" else {"urls": ["http://a:1"]}) | fields
    raw[name] = {key: value for key, value in table.items() if value is not ...}
    return raw


def build(raw: dict[str, Any], **environ: str) -> Config:
    return build_config(raw, base=Path("/etc/evald"), environ=environ)


def test_minimal_config_resolves_paths_and_defaults() -> None:
    config = build(MINIMAL)
    assert config.results.dir == "/etc/evald/out"
    assert config.eval[0].path == "/etc/evald/math.jsonl"
    assert config.staging.keep == 2
    assert config.dispatch.overflow == "backpressure"
    assert config.fleet is not None
    assert config.fleet.engines == config.fleet.gpus == config.fleet.gpus_per_engine == 1


def test_the_best_snapshots_place_is_relative_to_the_config() -> None:
    best = build(changed(keep_best={"metric": "eval/math", "dir": "best"})).keep_best
    assert best is not None
    assert (best.dir, best.rule) == ("/etc/evald/best", "max")


def test_sets_inherit_defaults_and_override_them() -> None:
    raw = changed(defaults={"temperature": 0.7, "grader": "math"}, eval__0__grader="exact")
    eval_set = build(raw).eval[0]
    assert (eval_set.temperature, eval_set.grader) == (0.7, "exact")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"engines": 4, "gpus": 8}, (4, 8, 2)),
        ({"engines": 4, "gpus_per_engine": 2}, (4, 8, 2)),
        ({"gpus": 8, "gpus_per_engine": 2}, (4, 8, 2)),
        ({"gpus": 8}, (8, 8, 1)),
        ({"engines": 0}, (0, 0, 1)),
        ({"device": "cpu"}, (1, 0, 1)),
        ({"device": "cpu", "engines": 3}, (3, 0, 1)),
    ],
)
def test_any_two_of_engines_gpus_and_size_give_the_third(
    given: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    fleet = build(changed(fleet={"model": "m", **given})).fleet
    assert fleet is not None
    assert (fleet.engines, fleet.gpus, fleet.gpus_per_engine) == expected


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (changed(fleet__engines=3, fleet__gpus=8), "do not divide by 3"),
        (changed(fleet__gpus=7, fleet__gpus_per_engine=2), "do not divide by 2"),
        (
            changed(fleet__engines=2, fleet__gpus=8, fleet__gpus_per_engine=2),
            "fleet.gpus: 8, but engines = 2 times gpus_per_engine = 2 makes 4",
        ),
        (changed(fleet__device="cpu", fleet__gpus=2), "remove both, or set fleet.device"),
        (changed(fleet__device="gpu"), "fleet.device: must be one of 'cuda', 'cpu', got 'gpu'"),
        (changed(fleet__enginse=3), "fleet.enginse: unknown key; did you mean 'engines'?"),
        (changed(stagging={}), "stagging: unknown key; did you mean 'staging'?"),
        (changed(fleet=...), "no posture: add exactly one of the tables [fleet], [attached]"),
        (changed(staging=...), "staging: missing; it must be set"),
        (changed(blackbox={"command": ["x"]}), "[fleet] and [blackbox]: a config has exactly one"),
        (changed(fleet=5), "fleet: expected a table, got 5"),
        (changed(staging__keep=-1), "staging.keep: expected int >= 0, got -1"),
        (changed(staging__keep="two"), "staging.keep: expected int, got 'two'"),
        (changed(staging__pattern="step"), "staging.pattern: "),
        (changed(dispatch__overflow="skipp"), "did you mean 'skip'?"),
        (changed(dispatch__max_in_flight=0), "dispatch.max_in_flight: expected int >= 1"),
        (changed(dispatch__sample_timeout_s=9000.0), "must be smaller than"),
        (
            changed(staging__unmarked_after_s=60.0),
            "staging.overtaken_after_s: 300 must not be larger than staging.unmarked_after_s = 60",
        ),
        (changed(eval__0__set_deadline_s=1.0), "eval[0].set_deadline_s: 1 must lie between"),
        (changed(eval=[]), "eval: must be one or more"),
        (changed(eval=...), "eval: missing; add at least one"),
        (changed(eval=[{"name": "a", "path": "x"}] * 2), "already the name of eval[0]"),
        (changed(eval=[{"name": "lag_steps", "path": "x"}]), "a metric of evald's own"),
        (changed(eval=[7]), "eval[0]: expected a table, got 7"),
        (changed(eval__0__name="../x"), "eval[0].name: "),
        *(
            (
                changed(**{f"eval__0__{name}": 1}),
                f"eval[0].{name}: unknown key; did you mean {ours!r}?",
            )
            for name, ours in [
                ("max_tokens", "max_response_len"),
                ("max_new_tokens", "max_response_len"),
                ("max_output_tokens", "max_response_len"),
                ("n", "n_samples_per_eval_prompt"),
                ("num_samples", "n_samples_per_eval_prompt"),
                ("dataset", "path"),
                ("file", "path"),
            ]
        ),
        (changed(eval__0__temperatur=1.0), "did you mean 'temperature'?"),
        (changed(eval__0__apply_chat_template="always"), "must be one of 'auto', True, False"),
        (changed(eval__0__top_k=0), "eval[0].top_k: must be -1 (off) or at least 1"),
        (changed(eval__0__min_new_tokens=999), "must not be larger than max_response_len"),
        (changed(defaults=3), "defaults: expected a table, got 3"),
        (changed(results__dir="/dev/shm/x/results"), "lies inside the staging root"),
        (changed(results__dir="/dev/shm"), "lies inside results.dir"),
        (changed(keep_best={"metric": "m", "dir": "/dev/shm/x/b"}), "lie in one another"),
        (changed(keep_best={"metric": "m", "dir": "/dev"}), "lie in one another"),
        (
            posture("shared") | {"keep_best": {"metric": "m", "dir": "best"}},
            "come with no snapshots",
        ),
        (changed(fleet__model="/dev/shm/x/base"), "move the base model out"),
        (changed(fleet__sglang={"port": 1}), "[fleet.sglang] port = 1 is not allowed: "),
        (changed(eval__0__grader="exacto"), "eval[0].grader"),
        (changed(eval__0__pass_k=[2]), "eval[0].pass_k: 2 is more than n_samples_per_eval_prompt"),
        (
            changed(fleet__group=[{"name": "a", "engines": 1}], fleet__engines=2),
            "fleet.engines: there are [[fleet.group]] tables; set engines in each of them",
        ),
        (
            changed(fleet__group=[{"name": "a", "engines": 2, "gpus": 3}]),
            "fleet.group[0].gpus: 3 GPUs do not divide by 2",
        ),
        (changed(fleet__group=[{"name": "a"}, {"name": "a"}]), "'a' is there twice; rename one"),
        (
            changed(fleet__deterministic=True, fleet__device="cpu"),
            "fleet.deterministic: SGLang's deterministic inference is for GPUs, and",
        ),
        (
            changed(
                fleet__deterministic=True, fleet__sglang={"enable-deterministic-inference": False}
            ),
            "fleet.deterministic: true, but [fleet.sglang] or a group sets",
        ),
        (changed(dispatch__on_set_change="refused"), "did you mean 'refuse'?"),
        (changed(eval__0__repetition_penalty=0.0), "eval[0].repetition_penalty: "),
        (
            changed(fleet__group=[{"name": "a", "sglang": {"port": 1}}]),
            "[[fleet.group]] a port = 1 is not allowed",
        ),
        (changed(fleet__pin_mode="reload"), "must be one of 'update', 'restart'"),
        (
            changed(fleet__fast_pin="on", fleet__pin_mode="restart"),
            "fleet.fast_pin: 'on' is for updates, and fleet.pin_mode is 'restart'",
        ),
        (
            changed(fleet__fast_pin="on", fleet__sglang={"load-format": "runai_streamer"}),
            "or a group sets load_format = 'runai_streamer'; remove one",
        ),
        (changed(fleet__inherit={}), "set exactly one of file, command and url, got none of them"),
        (
            changed(fleet__inherit={"file": "a", "url": "b"}),
            "set exactly one of file, command and url, got file and url",
        ),
        (changed(fleet__inherit={"url": "host:30000"}), "'host:30000' is no URL; write http://"),
        (
            changed(fleet__inherit={"command": "x", "api_key_env": "K"}),
            "fleet.inherit.api_key_env: only a url needs a key",
        ),
        (posture("attached", router="nonsense"), "attached.router: 'nonsense' is no URL"),
        (posture("shared", pause="x", resume="http://t"), "shared.pause: 'x' is no URL"),
        (changed(eval__0__set_deadline_s=9000.0), "eval[0].set_deadline_s: 9000 must lie between"),
        (
            changed(eval__0__stragglers="cut"),
            "eval[0].stragglers: 'cut', but when? set cut_at_share, cut_after_s, or both",
        ),
        (
            changed(eval__0__cut_at_share=0.9),
            "eval[0].cut_at_share: is of no use with stragglers = 'wait'; set 'cut'",
        ),
        (changed(eval__0__cut_at_share=1.0), "eval[0].cut_at_share: "),
        (
            changed(eval__0__stragglers="cut", eval__0__cut_after_s=8000.0),
            "cut_after_s: 8000 must be smaller than dispatch.point_deadline_s = 7200",
        ),
        (
            {**posture("attached"), "fleet": {"sglang": {"tp_size": 2}}},
            "[fleet] and [attached]: a config has exactly one posture",
        ),
        (posture("attached", urls=[]), "attached.urls: "),
        (posture("attached", urls=["localhost:1"]), "is no URL; write http://host:port"),
        (posture("attached", urls=["http://a:1"] * 2), "is there twice; keep one"),
        (posture("attached", urls=["http://a:1", "http://a:1/"]), "is there twice; keep one"),
        (posture("attached", router="http://a:1"), "urls are the workers behind the router"),
        (posture("attached", pin=False, path_map={"/a": "/b"}), "is of no use with pin = false"),
        (posture("attached", api_key_env="A", api_key_file="b"), "set api_key_env or api_key_file"),
        (posture("shared", pause="http://t/p"), "shared: set pause and resume together"),
        (posture("shared", resume="http://t/r"), "shared: set pause and resume together"),
        (posture("shared", eval__0__tokenizer="snapshot"), "[shared] points have no snapshot"),
        (
            posture("blackbox", model=...),
            "blackbox: exactly one of class and command must be set, got none",
        ),
        (posture("blackbox", **{"class": "x"}), 'must be "module:Class"'),
        (posture("blackbox", command=[]), "blackbox.command: must name a program"),
        (posture("blackbox", command=["x"]), "a black box measures what it wants"),
        (changed(run="a/b"), "run: must be letters, digits and . _ @ + -, the first a letter"),
        (changed(run=""), "run: "),
        (changed(staging__root=""), "staging.root: must be text that is not empty, got ''"),
        (
            changed(staging__pattern="step_{iter}"),
            "staging.pattern: must be text with {step} in it, such as 'step_{step}', got",
        ),
        (changed(staging__max_bytes="40GB"), "staging.max_bytes: expected int, got '40GB'"),
        (changed(results__file_mode=644), 'must be an octal mode as text, such as "0644", got'),
    ],
)
def test_each_refusal_names_key_value_and_remedy(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(raw)
    assert any(sentence in problem for problem in error.value.problems), error.value.problems


def test_all_faults_are_reported_together() -> None:
    raw = changed(fleet__device="gpu", staging__keep=-1, eval__0__top_p=2.0)
    with pytest.raises(ConfigError) as error:
        build(raw)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    "raw",
    [
        posture("attached", router="http://b:1", path_map={"/dev/shm": "/mnt"}),
        posture("attached", pin=False),
        posture("shared", pause="http://t/pause", resume="http://t/resume"),
        posture("blackbox", command=["run", "{dir}", "{output}"], model=...) | {"eval": ...},
        posture("blackbox", **{"class": "pkg.module:Class"}) | {"eval": ...},
    ],
)
def test_each_posture_is_accepted_alone(raw: dict[str, Any]) -> None:
    config = build({key: value for key, value in raw.items() if value is not ...})
    model = config.posture.model
    assert model in {None, "/etc/evald/base"}
    assert config.model_dir == (None if model is None else Path(model))
    assert config.engine_count == 0


def test_groups_of_engines(tmp_path: Path) -> None:
    groups = [
        {"name": "small", "gpus": 4, "gpus_per_engine": 1},
        {"name": "big", "engines": 2, "gpus_per_engine": 2},
    ]
    (tmp_path / "r.json").touch()
    config = build(changed(fleet__group=groups, fleet__inherit={"file": "r.json"}))
    assert config.fleet is not None
    assert [(g.engines, g.gpus) for g in config.fleet.group] == [(4, 4), (2, 4)]
    assert config.engine_count == 6
    assert config.fleet.inherit is not None
    assert config.fleet.inherit.file == "/etc/evald/r.json"


def test_a_bad_default_is_one_fault_however_many_sets_inherit_it() -> None:
    raw = changed(defaults={"top_p": 1.5}, eval=[{"name": n, "path": n} for n in "abc"])
    with pytest.raises(ConfigError) as error:
        build(raw)
    assert error.value.problems == ["defaults.top_p: expected float <= 1.0, got 1.5"]


def test_a_missing_variable_is_one_fault() -> None:
    with pytest.raises(ConfigError) as error:
        build(changed(fleet__model="${MODEL}"))
    assert error.value.problems == [
        "fleet.model: environment variable MODEL is not set; set it, or write ${MODEL:-default}"
    ]


def test_variables_are_expanded_or_named() -> None:
    raw = changed(staging__root="${SHM:-/dev/shm}/run", results__dir="${OUT}/r")
    config = build(raw, OUT="/data")
    assert (config.staging.root, config.results.dir) == ("/dev/shm/run", "/data/r")
    with pytest.raises(ConfigError, match=r"results\.dir: environment variable OUT is not set"):
        build(raw)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(ConfigError) as error:
        build(changed(staging__keep="x" * 500))
    assert len(error.value.problems[0]) < 200


def test_load_config_reports_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("run = ")
    with pytest.raises(ConfigError, match="cannot parse config"):
        load_config(broken)
    broken.write_bytes(b"run = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(broken)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a = {'[' * 5000}{']' * 5000}", "nested too deep"),
        (f"{'.'.join('a' * 3000)} = 1", "nested too deep"),
        (f"run = {'9' * 5000}", "4300 digits"),
    ],
    ids=["lists", "keys", "digits"],
)
def test_what_no_parser_can_hold_is_a_bad_config(tmp_path: Path, text: str, words: str) -> None:
    """Found by fuzzing: these ended with tracebacks."""
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"cannot parse config .*{words}"):
        load_config(tmp_path / "config.toml")


def test_dumped_config_is_plain_data() -> None:
    dumped = dump_config(build(MINIMAL))
    assert dumped["fleet"]["engines"] == 1
    assert dumped["eval"][0]["name"] == "math"


def test_a_brief_dump_has_of_each_set_what_differs_from_the_defaults() -> None:
    sets = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", "grader": "exact"}]
    raw = {**changed(eval=sets), "defaults": {"grader": "number", "temperature": 0.7}}
    dumped = dump_config(build(raw), brief=True)
    assert [set(one) for one in dumped["eval"]] == [{"name", "path"}, {"name", "path", "grader"}]
    assert dumped["defaults"]["temperature"] == 0.7
    inherit = {"command": "sglang serve --api-key sk-SECRET --tp 2"}
    assert "SECRET" not in str(dump_config(build(changed(fleet__inherit=inherit)), brief=True))


def test_dumped_config_tells_no_secret() -> None:
    inherit = {"command": "sglang serve --api-key sk-SECRET --tp 2"}
    dumped = dump_config(build(changed(fleet__inherit=inherit)))
    assert dumped["fleet"]["inherit"]["command"] == "sglang serve --api-key (hidden) --tp 2"
    box = posture("blackbox", command=["run", "{output}"], env={"TOKEN": "sk-SECRET"})
    del box["eval"]
    assert "sk-SECRET" not in str(dump_config(build(box)))
