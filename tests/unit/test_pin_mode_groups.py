"""Each group of engines finds out by itself whether it takes updates."""

from __future__ import annotations

from pathlib import Path

from evald.config import Fleet, Group
from evald.engines.launcher import Boot, Launched
from evald.engines.plan import engine_plan
from evald.engines.prepare import FleetPlan
from evald.errors import EvaldError
from evald.postures.fleet import fleet_engines


class NoLauncher:
    async def launch(self, attempt: int, boot: Boot | None = None) -> Launched:
        raise EvaldError(f"nothing is launched here ({attempt}, {boot})")

    def log_fault(self) -> str:
        return ""


def test_engines_of_one_group_share_their_pin_mode(tmp_path: Path) -> None:
    groups = [Group(name="a", engines=2, gpus=0, gpus_per_engine=1), Group(name="b", engines=1)]
    fleet = Fleet(model=str(tmp_path), device="cpu", group=groups)
    plan = FleetPlan(engines=engine_plan(fleet), arguments=None, env={}, notes=[])
    pool = fleet_engines(fleet, tmp_path, plan=plan, launcher_factory=lambda _plan: NoLauncher())
    modes = {engine.name: engine.upkeep.mode for engine in pool._engines}
    assert list(modes) == ["a-0", "a-1", "b-0"]
    assert modes["a-0"] is modes["a-1"]
    assert modes["a-0"] is not modes["b-0"]
