"""The configs that ship with evald are good."""

from __future__ import annotations

from pathlib import Path

import pytest

from evald.config_load import load_config
from evald.engines.plan import engine_plan

CONFIGS = Path(__file__).parents[2] / "configs"
POSTURES = {
    "demo.toml": "Fleet",
    "node.toml": "Fleet",
    "node-tp1.toml": "Fleet",
    "node-tp2.toml": "Fleet",
    "trl.toml": "Fleet",
    "hf-trainer.toml": "Fleet",
    "attached.toml": "Attached",
    "shared.toml": "Shared",
    "blackbox-lm-eval.toml": "BlackBox",
}


def test_all_of_them_are_listed_here() -> None:
    # (miles.toml names an eval YAML, which must be there: it is checked as a whole elsewhere)
    assert {path.name for path in CONFIGS.glob("*.toml")} == {*POSTURES, "miles.toml"}


@pytest.mark.parametrize("name", POSTURES)
def test_loads(name: str) -> None:
    config = load_config(CONFIGS / name, environ={})
    assert type(config.posture).__name__ == POSTURES[name]


def test_the_node_has_engines_of_two_shapes() -> None:
    config = load_config(CONFIGS / "node.toml", environ={})
    assert config.fleet is not None
    names = [plan.name for plan in engine_plan(config.fleet)]
    assert names == ["small-0", "small-1", "small-2", "small-3", "big-0", "big-1"]
