"""How long a point may take before the watchdog calls it stuck."""

from __future__ import annotations

from pathlib import Path

import pytest
from dispatch_room import room

from evald import dispatch


async def test_a_point_may_run_until_its_deadline_and_wait_for_others_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_SLACK_S", -1.0)
    async with room(tmp_path, point_deadline_s=1.0, sample_timeout_s=0.5) as r:
        for step in (1, 2):
            await r.dispatcher.offer(r.point(step))
        await r.until(lambda: len(r.measure.started) == 2)
        loop, first, second = r.dispatcher.pulses()
        assert (loop.name, loop.overdue(60)) == ("dispatch", "")
        assert first.overdue(60).startswith("r:step:1.r0: 'evaluating' since")
        assert second.overdue(60) == ""
        r.release(1, 2)
        await r.until(lambda: len(r.dispatcher.pulses()) == 1)
