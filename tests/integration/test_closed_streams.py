"""A daemon that was started without standard streams: some supervisors close them."""

from __future__ import annotations

from pathlib import Path

from rig import rig, until

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

CLOSED = ("sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh")


def test_it_serves_without_them(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python")) as r:
        r.start(before=CLOSED)
        write_snapshot(r.root / "step_1", answer=7)
        assert str(r.point(1).outcome) == "ok"
        assert r.evald("check", str(r.config), before=CLOSED).returncode == 0
        assert r.stop() == 0
        until(lambda: not r.processes(), "no process is left", 10)
