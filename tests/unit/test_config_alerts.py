"""[[alert]] and [webhook]: what is accepted, and what each refusal says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import evald
from evald.alerts.build import build_rules
from evald.alerts.builtin import BUILTIN
from evald.alerts.comparing import Comparing
from evald.config import Config
from evald.config_check_alerts import metric_notes
from evald.config_load import build_config
from evald.errors import ConfigError

SETS = [
    {"name": "aime", "path": "a.jsonl", "n_samples_per_eval_prompt": 4, "temperature": 1.0},
    {"name": "aime-hard", "path": "a.jsonl"},
    {"name": "wiki", "path": "w.jsonl", "kind": "perplexity"},
]
WEBHOOK = {"url_env": "HOOK"}


def build(*alerts: dict[str, Any], posture: str = "fleet", **tables: Any) -> Config:
    raw: dict[str, Any] = {
        "staging": {"root": "/dev/shm/x"},
        "results": {"dir": "out"},
        "alert": [{"name": f"n{i}"} | alert for i, alert in enumerate(alerts)],
    }
    postures: dict[str, dict[str, Any]] = {
        "fleet": {"model": "base"},
        "attached": {"model": "base", "urls": ["http://a:1"]},
        "blackbox": {"command": ["x", "{output}"]},
    }
    raw[posture] = postures[posture]
    if posture != "blackbox":
        raw["eval"] = SETS
    return build_config(raw | tables, base=Path("/etc/evald"), environ={})


@pytest.mark.parametrize(
    ("alert", "sentence"),
    [
        ({"kind": "dropp"}, "alert[0].kind: must be one of 'drop', 'truncated'"),
        ({"kind": "drop", "sets": ["aime"]}, "alert[0].sets: kind 'drop' has none; remove it"),
        ({"kind": "silent"}, "alert[0].after_s: missing; say how long no point may end"),
        ({"kind": "silent", "after_s": 0}, "alert[0].after_s: "),
        ({"kind": "disk"}, "alert[0].below_share: missing; set it, below_bytes, or both"),
        ({"kind": "disk", "below_share": 1.5}, "alert[0].below_share: "),
        ({"kind": "quarantined", "k": 2.0}, "alert[0].k: kind 'quarantined' has none; remove it"),
        (
            {"kind": "truncated", "sets": ["aimee"]},
            "alert[0].sets: there is no eval set 'aimee'; there are aime, aime-hard, wiki",
        ),
        ({"kind": "drop", "metrics": ["a", "a"]}, "alert[0].metrics: one is there twice"),
        (
            {"kind": "drop", "name": "best_not_kept"},
            "alert[0].name: 'best_not_kept' is an alert of",
        ),
        (
            {"kind": "builtin"},
            "alert[0].kind: 'builtin' only tells the webhook of what is recorded anyway; add [web",
        ),
        ({"kind": "drop", "metric": "eval/aime"}, "did you mean 'metrics'?"),
    ],
)
def test_refused(alert: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(alert)
    assert sentence in "\n".join(error.value.problems)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"webhook": {}}, "webhook: set exactly one of url_env and url_file, got neither"),
        ({"webhook": {"url_env": "A", "url_file": "b"}}, "got both"),
        ({"webhook": WEBHOOK | {"token_env": "A", "token_file": "b"}}, "webhook.token_file: token"),
        ({"webhook": WEBHOOK | {"url": "http://x"}}, "webhook.url: unknown key; did you mean"),
        ({"webhook": WEBHOOK, "alert": []}, "webhook: no [[alert]] rule tells it anything"),
        (
            {"webhook": WEBHOOK, "alert": [{"name": "b", "kind": "builtin", "names": ["nope"]}]},
            "alert[0].names: evald has no alert 'nope'; it has best_not_kept, ",
        ),
        (
            {"alert": [{"name": "a", "kind": "drop"}, {"name": "a", "kind": "drop"}]},
            "alert[1].name: 'a' is there twice; rename one",
        ),
    ],
)
def test_refused_tables(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build({"kind": "drop"}, **tables)
    assert sentence in "\n".join(error.value.problems)


def test_refused_where_the_posture_has_no_such_thing() -> None:
    with pytest.raises(ConfigError, match=r"alert\[0\]\.kind: only engines of a \[fleet\]"):
        build({"kind": "quarantined"}, posture="attached")
    with pytest.raises(ConfigError, match=r"alert\[0\]\.metrics: missing; what a black box"):
        build({"kind": "drop"}, posture="blackbox")
    build({"kind": "drop", "metrics": ["eval/mine"]}, posture="blackbox")


def test_paths_of_secrets_are_the_configs() -> None:
    config = build({"kind": "drop"}, webhook={"url_file": "hook", "token_file": "/t"})
    assert config.webhook is not None
    assert (config.webhook.url_file, config.webhook.token_file) == ("/etc/evald/hook", "/t")


def test_metrics_that_nothing_gives_are_a_warning() -> None:
    config = build({
        "kind": "drop",
        "metrics": ["eval/aime", "eval/aime-pass@4", "eval/lag_steps", "eval/aimo", "eval/aimed"],
    })  # fmt: skip
    warning = "WARNING: alert[0].metrics: no eval set or aggregate gives"
    meant = "did you mean 'eval/aime'?"
    assert metric_notes(config) == [
        f"{warning} 'eval/aimo'; {meant}",
        f"{warning} 'eval/aimed'; {meant}",
    ]
    assert metric_notes(build({"kind": "drop", "metrics": ["x"]}, posture="blackbox")) == []
    best = build(keep_best={"metric": "aime", "dir": "/best"})
    assert metric_notes(best) == [
        f"WARNING: keep_best.metric: no eval set or aggregate gives 'aime'; {meant}"
    ]


def watched(config: Config, number: int = 0) -> dict[str, tuple[int, list[str], int | None]]:
    rule = build_rules(config)[number]
    assert isinstance(rule, Comparing)
    return {one.metric: (one.sign, one.sets, one.samples_each) for one in rule._watched}


def test_rules_know_which_way_is_worse_and_what_a_metric_is_made_of() -> None:
    aggregates = [{"name": "all", "sets": ["aime", "aime-hard"]}]
    config = build({"kind": "drop"}, aggregate=aggregates)
    assert watched(config) == {
        "eval/aime": (-1, ["aime"], None),
        "eval/aime-hard": (-1, ["aime-hard"], None),
        "eval/wiki": (1, ["wiki"], None),
        "eval/all": (-1, ["aime", "aime-hard"], None),
    }
    metrics = ["eval/aime-hard/x", "eval/aime-pass@4", "eval/wiki/perplexity", "eval/else"]
    config = build({"kind": "drop", "metrics": metrics})
    assert watched(config) == {
        "eval/aime-hard/x": (-1, ["aime-hard"], None),
        "eval/aime-pass@4": (-1, ["aime"], None),
        "eval/wiki/perplexity": (1, ["wiki"], None),
        "eval/else": (-1, [], None),
    }
    config = build({"kind": "drop", "metrics": ["eval/wer"], "rule": "min"})
    assert watched(config)["eval/wer"][0] == 1
    config = build({"kind": "truncated"}, {"kind": "no_answer", "sets": ["aime"]})
    assert watched(config)["eval/aime-truncated_ratio"] == (1, ["aime"], 4)
    assert watched(config, 1) == {"eval/aime/no_answer_ratio": (1, ["aime"], 4)}


def test_the_names_of_evalds_own_alerts_are_all_known() -> None:
    sources = Path(evald.__file__).parent.rglob("*.py")
    told = {
        name
        for path in sources
        for name in re.findall(r'_alert\(\s*"(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert told == BUILTIN
