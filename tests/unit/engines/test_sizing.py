from __future__ import annotations

from typing import Any

import pytest
from small_sglang import small_sglang

from evald.config import Fleet
from evald.engines.argument import ServerArguments
from evald.engines.inherit import Inherited, Setting
from evald.engines.plan import engine_plan
from evald.engines.settings import explain
from evald.engines.sizing import GRAPH, RUNNING

RANKS = {"dp_size": 2, "enable_dp_attention": True}


def sizes(inherited: dict[str, Any] | None = None, **fleet: Any) -> tuple[Any, Any]:
    """Requests that run and their graphs, as the first engine of a fleet is launched with."""
    taken = Inherited(settings={name: Setting(v, "file") for name, v in (inherited or {}).items()})
    plan = engine_plan(Fleet(model="/m", engines=1, **fleet), inherited=taken)[0]
    return plan.resolved.value(RUNNING), plan.resolved.value(GRAPH)


@pytest.mark.parametrize(
    ("inherited", "fleet", "expected"),
    [
        # nobody has said anything: both from evald
        ({}, {}, (256, 256)),
        ({}, {"gpus_per_engine": 4}, (512, 512)),
        ({**RANKS, "tp_size": 2}, {"gpus_per_engine": 2}, (512, 256)),
        # graphs for what was said to run
        ({}, {"sglang": {"max-running-requests": 64}}, (64, 64)),
        ({RUNNING: 4096}, {}, (4096, 512)),
        ({RUNNING: 128, "mem_fraction_static": 0.8}, {}, (128, 128)),
        ({RUNNING: 64, GRAPH: 16}, {}, (64, 16)),
        # what somebody else has decided
        ({GRAPH: 64}, {}, (None, 64)),
        ({"mem_fraction_static": 0.8}, {}, (None, None)),
        ({}, {"sglang": {"disable-cuda-graph": True}}, (None, None)),
        ({}, {"sglang": {"disable-cuda-graph": False}}, (256, 256)),
        ({"cuda_graph_bs_decode": [1, 2, 4]}, {}, (None, None)),
        ({}, {"device": "cpu"}, (128, None)),
    ],
)  # fmt: skip
def test_what_runs_and_its_graphs_go_together(
    inherited: dict[str, Any], fleet: dict[str, Any], expected: tuple[Any, Any]
) -> None:
    assert sizes(inherited, **fleet) == expected


def test_the_sizes_say_where_they_are_from() -> None:
    (plan,) = engine_plan(Fleet(model="/m", engines=1, sglang={RUNNING: 64}))
    assert f"{GRAPH} = 64  (from evald, for {RUNNING})" in explain(plan.resolved)


def test_a_server_without_such_graphs_is_left_alone() -> None:
    sglang = small_sglang()
    others = [one for one in sglang.arguments if one.dest != GRAPH]
    arguments = ServerArguments(version="0.4.0", arguments=others)
    (plan,) = engine_plan(Fleet(model="/m", engines=1), arguments=arguments)
    assert plan.resolved.value(RUNNING) is None
