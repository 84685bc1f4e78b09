from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_sglang import small_sglang

from evald.config import Fleet, Group
from evald.config_resolve import resolve_engines
from evald.engines.argument import ServerArguments
from evald.engines.inherit import Inherited, Setting
from evald.engines.plan import EnginePlan, engine_plan
from evald.errors import ConfigError

INHERITED = Inherited(
    settings={
        "schedule_policy": Setting("fcfs", "file"),
        "mem_fraction_static": Setting(0.8, "file"),
        "context_length": Setting(4096, "file"),
        "port": Setting(30000, "file"),
        "load_format": Setting("safetensors", "file"),
    }
)


def planned(*, seen: list[str] | None = None, **fleet: Any) -> list[EnginePlan]:
    problems: list[str] = []
    resolved = resolve_engines(Fleet(model="/m", **fleet), problems)
    assert problems == []
    return engine_plan(resolved, gpus=seen)


def shape(plans: list[EnginePlan]) -> list[tuple[str, str | None, str]]:
    return [(plan.name, plan.group, ",".join(plan.gpus)) for plan in plans]


GROUPS = [
    Group(name="one", engines=2, gpus_per_engine=1),
    Group(name="pair", gpus=4, gpus_per_engine=2),
]


@pytest.mark.parametrize(
    ("fleet", "gpus", "engines"),
    [
        ({}, None, [("engine-0", None, "0")]),
        ({"engines": 0}, None, []),
        ({"engines": 0}, [], []),
        (
            {"gpus": 4, "gpus_per_engine": 2},
            None,
            [("engine-0", None, "0,1"), ("engine-1", None, "2,3")],
        ),
        (
            {"gpus": 2},
            ["GPU-c", "GPU-a", "GPU-b"],
            [("engine-0", None, "GPU-c"), ("engine-1", None, "GPU-a")],
        ),
        (
            {"group": GROUPS},
            None,
            [
                ("one-0", "one", "0"),
                ("one-1", "one", "1"),
                ("pair-0", "pair", "2,3"),
                ("pair-1", "pair", "4,5"),
            ],
        ),
        (
            {"group": [Group(name="none", engines=0), Group(name="one")]},
            ["5"],
            [("one-0", "one", "5")],
        ),
        (
            {"device": "cpu", "group": [Group(name="a", engines=2), Group(name="b")]},
            None,
            [("a-0", "a", ""), ("a-1", "a", ""), ("b-0", "b", "")],
        ),
        ({"device": "cpu", "engines": 2}, [], [("engine-0", None, ""), ("engine-1", None, "")]),
    ],
)
def test_engines_and_their_gpus(
    fleet: dict[str, Any], gpus: list[str] | None, engines: list[tuple[str, str | None, str]]
) -> None:
    assert shape(planned(seen=gpus, **fleet)) == engines


def test_too_few_gpus() -> None:
    with pytest.raises(ConfigError, match=r"need 6 GPUs, and evald sees 2 \(GPU-a, GPU-b\)"):
        planned(seen=["GPU-a", "GPU-b"], group=GROUPS)
    with pytest.raises(ConfigError, match=r"need 1 GPUs, and evald sees none; lower engines"):
        planned(seen=[])


def test_each_layer_wins_over_the_one_before_it() -> None:
    fleet = Fleet(
        model="/m",
        group=[
            Group(name="a", engines=1, sglang={"mem-fraction-static": 0.6, "dtype": "bfloat16"}),
            Group(name="b", engines=1, gpus_per_engine=2),
        ],
        sglang={"dtype": "float32"},
    )
    a, b = engine_plan(fleet, inherited=INHERITED)
    settings = {name: (s.value, s.origin) for name, s in a.resolved.settings.items()}
    assert settings == {
        "schedule_policy": ("fcfs", "file"),
        "enable_metrics": (True, "evald"),
        "log_level_http": ("warning", "evald"),
        "mem_fraction_static": (0.6, "[[fleet.group]] a"),
        "context_length": (4096, "file"),
        "load_format": ("safetensors", "file"),
        "dtype": ("float32", "[fleet.sglang]"),
    }
    assert [gone.name for gone in a.resolved.dropped] == ["port"]
    assert b.resolved.value("mem_fraction_static") == 0.8
    assert (a.resolved.value("tp_size"), b.resolved.value("tp_size")) == (None, 2)


def test_what_others_ask_of_a_plan() -> None:
    (plan,) = engine_plan(Fleet(model="/m", engines=1), inherited=INHERITED)
    assert (plan.load_format, plan.context_len) == ("safetensors", 4096)
    (plain,) = engine_plan(Fleet(model="/m", engines=1))
    assert (plain.load_format, plain.context_len) == ("auto", None)


def test_a_default_for_one_launch() -> None:
    (plan,) = engine_plan(Fleet(model="/m", engines=1, sglang={"dtype": "float32"}))
    more = plan.with_default("tokenizer_path", "/base", "evald")
    assert more.resolved.value("tokenizer_path") == "/base"
    assert plan.resolved.value("tokenizer_path") is None
    assert more.with_default("dtype", "auto", "evald") is more


def test_what_evald_asks_for_is_left_out_where_sglang_does_not_have_it() -> None:
    sglang = small_sglang()
    older = [one for one in sglang.arguments if one.dest != "schedule_policy"]
    arguments = ServerArguments(version="0.5.0", arguments=older)
    (plan,) = engine_plan(Fleet(model="/m", engines=1), arguments=arguments)
    assert plan.resolved.value("enable_metrics") is True
    assert "schedule_policy" not in plan.resolved.settings


def test_cpu_engines_have_their_recipe() -> None:
    (plan,) = engine_plan(Fleet(model="/m", device="cpu", engines=1))
    recipe = {"attention_backend": "torch_native", "max_total_tokens": 65536, "sleep_on_idle": True}
    assert recipe.items() <= {n: s.value for n, s in plan.resolved.settings.items()}.items()
    assert msgspec.to_builtins(plan)["gpus"] == []


def test_deterministic_inference_is_asked_of_every_engine_whatever_is_inherited() -> None:
    off = {"enable_deterministic_inference": Setting(False, "file")}
    problems: list[str] = []
    fleet = resolve_engines(Fleet(model="/m", deterministic=True, group=GROUPS), problems)
    for plan in engine_plan(fleet, inherited=Inherited(settings=off)):
        setting = plan.resolved.settings["enable_deterministic_inference"]
        assert setting == Setting(True, "[fleet] deterministic")
    (plain,) = planned()
    assert plain.resolved.value("enable_deterministic_inference") is None
