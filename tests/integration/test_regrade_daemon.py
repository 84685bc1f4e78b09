"""``evald regrade``: by the running daemon, over its socket and TCP, and without one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import msgspec
from rig import Rig, rig, until

from evald.config import Results
from evald.results.ledger import Ledger
from evald.results.records import Accepted, PointRecord, SetRecord
from evald.testing import write_fake_python, write_snapshot

TOKEN = "one-word-that-nobody-guesses"  # noqa: S105 - a test's


def revisions(r: Rig) -> list[tuple[int, int]]:
    return sorted((point.step, point.revision) for point in r.points())


def use_grader(r: Rig, old: str, new: str) -> None:
    text = r.config.read_text()
    assert f'grader = "{old}"' in text
    r.config.write_text(text.replace(f'grader = "{old}"', f'grader = "{new}"'))


def samples_of(r: Rig) -> Path:
    return r.work / "results" / "samples" / "t"


def test_a_curve_is_graded_again_and_goes_on(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    with rig(
        tmp_path,
        python=write_fake_python(tmp_path / "python"),
        questions=6,
        status=f'listen = "127.0.0.1:0"\ntoken_file = "{token_file}"',
    ) as r:
        # everything is in a box, so that this grader finds everything wrong
        use_grader(r, "boxed_exact", "exact")
        r.start()
        for step in (1, 2):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
            assert r.point(step).metrics["eval/a"] == 0
        for words, sentence in (
            (["--step", "9"], "step 9 of run 't': no such point is known"),
            (["--step", "1", "--set", "x"], "the config has no such eval set (it has a, b)"),
            (["--all", "--run", "other"], "run 'other': no point of it has ended"),
        ):
            refused = r.evald("regrade", str(r.config), *words)
            assert (refused.returncode, sentence in refused.stderr) == (1, True), refused.stderr
        use_grader(r, "exact", "boxed_exact")
        stale = r.evald("regrade", str(r.config), "--all")
        assert stale.returncode == 1
        assert "the running daemon has another config of it" in stale.stderr
        assert r.stop() == 0
        nobody = r.evald("regrade", str(r.results.parent), "--all")
        assert (nobody.returncode, "name its config" in nobody.stderr) == (1, True)

        before = {path: path.read_bytes() for path in samples_of(r).rglob("*.jsonl")}
        done = r.evald("regrade", str(r.config), "--all")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"t:step:{step}.r1 is ok: a 0.0000 -> 1.0000; b 0.0000 -> 1.0000" for step in (1, 2)
        ]
        assert all(path.read_bytes() == content for path, content in before.items())
        regraded = r.point(2, revision=1)
        assert regraded.provenance["regraded_from"] == "t/step/2/r0"
        assert regraded.metrics["eval/a/delta_prev"] == 0
        added = [x for x in r.records() if isinstance(x, SetRecord | PointRecord) and x.revision]
        assert [type(x) for x in added] == [SetRecord, SetRecord, PointRecord] * 2

        # the daemon takes them for what they are, and compares the next point with them
        r.start()
        write_snapshot(r.root / "step_3", seed=3, answer=7)
        assert r.point(3).metrics["eval/a/delta_prev"] == 0
        assert r.point(3).curve_breaks == []
        assert revisions(r) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
        url = f"http://{r.status()['listen']}"
        far = r.evald("regrade", url, "--step", "1", "--set", "a", "--token-file", str(token_file))
        assert far.returncode == 0, far.stderr
        assert far.stdout.splitlines() == [
            "1 point of run 't' will be graded again",
            "t:step:1.r2 is ok: a 1.0000 -> 1.0000; b stays (not asked for)",
        ]
        # a retry still finds the snapshot, and measures it
        assert r.evald("ctl", "retry", "2", "--target", str(r.config)).returncode == 0
        assert r.point(2, revision=2).metrics["eval/a"] == 1
        assert "regraded_from" not in r.point(2, revision=2).provenance
        accepted = [(x.step, x.revision) for x in r.records() if isinstance(x, Accepted)]
        assert accepted == [(1, 0), (2, 0), (3, 0), (2, 2)]
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)


SLOW_GRADER = """
import pathlib, time

def grade(response, reference, metadata):
    while pathlib.Path("wait").exists():
        time.sleep(0.02)
    return 1
"""


def test_a_killed_daemon_leaves_no_half_of_a_revision(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW_GRADER)
    wait = tmp_path / "wait"
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), questions=4) as r:
        use_grader(r, "boxed_exact", "python")
        r.config.write_text(
            r.config.read_text().replace(
                'grader = "python"',
                'grader = "python"\ngrader_config = { function = "mine:grade" }',
            )
        )
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        assert r.point(1).metrics["eval/a"] == 1
        wait.touch()
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        until(lambda: [p["state"] for p in r.status()["running"]] == ["evaluating"], "it runs")
        busy = r.evald("regrade", str(r.config), "--step", "2")
        assert (busy.returncode, "it is being measured" in busy.stderr) == (1, True), busy.stderr
        asking = subprocess.Popen(
            [sys.executable, "-m", "evald", "regrade", str(r.config), "--step", "1"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        folder = samples_of(r) / ".regrade-step_1"
        until(lambda: any(x["state"] == "running" for x in r.status()["regrades"]), "it grades")
        second = r.evald("regrade", str(r.config), "--step", "1")
        assert "another regrade is running" in second.stderr
        r.kill()
        assert asking.wait(30) == 1
        asking.communicate()
        assert revisions(r) == [(1, 0)]
        wait.unlink()
        # had it been killed between the records of the new revision, it would look like this
        (first, *_) = [x for x in r.records() if isinstance(x, SetRecord)]
        half = msgspec.structs.replace(first, revision=1, record_id="t/step/1/r1/a")
        ledger = Ledger.open(Results(dir=str(r.results.parent)))
        asyncio.run(ledger.append(half))
        ledger.close()

        r.start()
        r.point(2)
        ended = r.point(1, revision=1)
        assert (ended.outcome, ended.reason, ended.void_sets) == (
            "skipped",
            "aborted",
            ["t/step/1/r1/a"],
        )
        assert "graded again; ask for that once more" in ended.detail
        done = r.evald("regrade", str(r.config), "--all")
        assert done.returncode == 0, done.stderr
        assert revisions(r) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
        assert r.point(1, revision=2).provenance["regraded_from"] == "t/step/1/r0"
        assert not folder.exists()
        names = sorted(path.name for path in samples_of(r).iterdir())
        assert names == ["step_1.r0", "step_1.r2", "step_2.r0", "step_2.r1"]
        lines = (samples_of(r) / "step_1.r2" / "a.jsonl").read_bytes().splitlines()
        assert [json.loads(line)["score"] for line in lines] == [1, 1, 1, 1]
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)
