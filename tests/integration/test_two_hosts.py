"""A trainer and an eval node that share no file system: bytes over ssh, the rest over HTTP."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from far_host import far_host, two_hosts
from rig import rig, until

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python

#: what a training job does, with nothing but the trainer's room.
_JOB = """
import json, sys
from pathlib import Path
from evald.trainer.links.http_link import HttpLink, Refused
from evald.trainer.publish import end_run, skip
from evald.trainer.push import carrier_for

url, token_file, destination, spool, *ssh = sys.argv[1:]
carrier = carrier_for(destination, root=Path(spool), ssh=ssh)
carrier.carry(skip(spool, 6, "export_failed", "rank 3 died"))
carrier.carry(end_run(spool, 6))
try:
    HttpLink(url, "wrong").check()
except Refused as error:
    refused = str(error)
link = HttpLink(url, token_file=token_file)
assert link.check()
records = []
while not any(record["type"] == "run_end" for record in records):
    records += link.records(records[-1]["seq"] if records else 0)
samples = link.samples("t/step/5/r0", "a")
status = link.status()
print(json.dumps([refused, records, samples, status.beat]))
"""


def test_a_pushed_snapshot_is_measured_and_its_record_comes_back(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_urlsafe())
    token.chmod(0o600)
    snapshot = write_snapshot(tmp_path / "out", seed=5, answer=7, marker=None)
    spool = tmp_path / "spool"
    spool.mkdir()
    with (
        two_hosts() as hosts,
        far_host(tmp_path, address=hosts.address, before=hosts.eval_node) as far,
        rig(
            tmp_path,
            python=write_fake_python(tmp_path / "fake-python"),
            status=f'listen = "{hosts.address}:0"\ntoken_file = "{token}"',
        ) as r,
    ):
        r.start(before=hosts.eval_node)
        url = f"http://{r.status()['listen']}"
        assert url.startswith(f"http://{hosts.address}:")

        def at_the_trainer(*words: str) -> str:
            done = subprocess.run(
                [*hosts.trainer, *words],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                cwd=tmp_path,
            )
            assert done.returncode == 0, done.stderr + r.log()[-3000:]
            return done.stdout

        evald = (sys.executable, "-m", "evald")
        destination = far.destination(r.root)
        ssh = " ".join(far.ssh)
        push = ("push", str(snapshot), destination, "--name", "step_5", "--ssh", ssh)
        assert at_the_trainer(*evald, *push).startswith(f"pushed step_5 to {destination}: ")
        key = ("--token-file", str(token))
        at_the_trainer(*evald, "wait", url, "--points", "1", "--ok", "--timeout", "40", *key)
        printed = at_the_trainer(
            sys.executable, "-c", _JOB, url, str(token), destination, str(spool), *far.ssh
        )
        refused, records, samples, beat = json.loads(printed)
        assert "does not take the token" in refused
        assert beat > 0
        check(records, samples)
        shown = at_the_trainer(*evald, "status", url, *key)
        assert f"listens  {hosts.address}:" in shown
        at_the_trainer(*evald, "ctl", "drain", "--target", url, *key)
        assert until(lambda: r.daemon is not None and r.daemon.poll() is not None, "it drains")
        assert not list(r.root.glob(".push-*"))


def check(records: list[dict[str, Any]], samples: list[dict[str, Any]]) -> None:
    points = {record["step"]: record for record in records if record["type"] == "point"}
    assert {step: point["outcome"] for step, point in points.items()} == {5: "ok", 6: "skipped"}
    assert points[5]["metrics"]["eval/a"] == 1.0
    assert points[6]["reason"] == "export_failed"
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    assert len(samples) == 10
    assert {sample["score"] for sample in samples} == {1.0}
