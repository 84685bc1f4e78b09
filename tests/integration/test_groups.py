"""A fleet of two groups of engines, as a whole daemon."""

from __future__ import annotations

from pathlib import Path

from rig import rig

from evald.testing import write_fake_python, write_snapshot


def test_two_groups_of_engines_serve_one_point(tmp_path: Path) -> None:
    groups = "\n".join(
        f'[[fleet.group]]\nname = "{name}"\nengines = {count}\n'
        f"sglang = {{ max_running_requests = {limit} }}"
        for name, count, limit in (("small", 2, 16), ("big", 1, 32))
    )
    slow = write_fake_python(tmp_path / "python", delay_s=0.2)
    with rig(tmp_path, python=slow, questions=400, fleet=groups) as r:
        r.start()
        for step in (1, 2):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
        # every engine takes the update test of its group, and joins
        second = r.point(2, timeout_s=60)
        assert str(second.outcome) == "ok"
        assert second.engines == ["big-0", "small-0", "small-1"]
        assert {e["name"] for e in r.status()["engines"]} == set(second.engines)
        assert second.counts.n_scored == 800
