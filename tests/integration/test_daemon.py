"""The whole daemon as a process, with fake engines: points, order, restarts, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rig import Rig, rig, until

from evald.results.records import Accepted, RunEnd, SetRecord
from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    return write_fake_python(tmp_path / "fake-python")


def test_n_snapshots_give_exactly_n_ok_records(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        r.start()
        for step in range(5):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
        done = r.evald("wait", str(r.results), "--points", "5", "--ok", "--timeout", "40")
        assert done.returncode == 0, done.stderr + r.log()
        assert sorted(point.step for point in r.points()) == list(range(5))
        for point in r.points():
            assert point.metrics["eval/a"] == point.metrics["eval/b"] == 1.0
            assert point.metrics["eval/step"] == point.step
            assert point.counts.n_total == point.counts.n_scored == 20
            assert point.provenance["sglang"] == "fake"
            assert all(f":{point.step}:" in version for version in point.weight_versions)
        assert [record.seq for record in r.records()] == list(range(1, len(r.records()) + 1))
        # the ring: keep = 2 stay, the others are gone
        until(lambda: len(list(r.root.glob("step_*"))) == 2, "only the ring is left")
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)


def test_the_last_one_comes_while_the_one_before_runs(tmp_path: Path) -> None:
    with rig(
        tmp_path, python=write_fake_python(tmp_path / "python", delay_s=0.3), questions=120
    ) as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        (r.root / "run.end").write_text('{"last_step": 2}')
        done = r.evald("wait", str(r.results), "--points", "2", "--ok", "--timeout", "60")
        assert done.returncode == 0, done.stderr + r.log()
        until(lambda: any(isinstance(x, RunEnd) for x in r.records()), "the run end is recorded")
        assert not (r.root / "run.end").exists()


def test_exit_on_run_end_stops_by_itself(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        daemon = r.start("--exit-on-run-end")
        write_snapshot(r.root / "step_3", answer=7)
        (r.root / "run.end").write_text('{"last_step": 3}')
        assert daemon.wait(40) == 0
        assert [str(point.outcome) for point in r.points()] == ["ok"]


def test_kill_9_in_mid_evaluation_resumes_and_records_once(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=0.5)
    with rig(tmp_path, python=slow, questions=300) as r:
        r.start()
        for step in (1, 2, 3):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
        journal = r.work / "results" / "samples" / "t" / "step_1.r0" / "a.jsonl"
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 20, "samples")
        r.kill()
        until(lambda: not r.processes(), "no process is left 10 s after the kill", 10)
        assert r.points() == []
        write_fake_python(slow)  # the rest takes no time
        r.start()
        done = r.evald("wait", str(r.results), "--points", "3", "--ok", "--timeout", "60")
        assert done.returncode == 0, done.stderr + r.log()
        assert len([x for x in r.records() if isinstance(x, Accepted)]) == 3
        first = r.point(1)
        assert first.counts.n_resumed >= 20
        assert first.counts.n_total == first.counts.n_scored == 600
        assert first.metrics["eval/a"] == 1.0
        assert [record.seq for record in r.records()] == list(range(1, len(r.records()) + 1))
        until(lambda: len(list(r.root.glob("step_*"))) == 2, "no more than keep is left")


def test_a_restart_does_not_evaluate_again_what_has_ended(
    tmp_path: Path, fake_python: Path
) -> None:
    with rig(tmp_path, python=fake_python) as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        r.point(1)
        assert r.stop() == 0
        before = r.results.read_bytes()
        r.start()
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        r.point(2)
        assert r.results.read_bytes().startswith(before)
        assert [point.step for point in r.points()] == [1, 2]


def test_sigterm_lets_the_running_point_finish_and_the_queue_resumes(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=0.3)
    settings = {"python": slow, "questions": 200, "dispatch": "max_in_flight = 1"}
    with rig(tmp_path, **settings) as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        assert r.stop() == 0
        assert [point.step for point in r.points()] == [1]
        assert not r.processes()
        write_fake_python(slow)  # the rest takes no time
        r.start()
        assert str(r.point(2).outcome) == "ok"


def test_a_second_sigterm_forces(tmp_path: Path) -> None:
    with rig(
        tmp_path, python=write_fake_python(tmp_path / "python", delay_s=20), questions=20
    ) as r:
        daemon = r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        daemon.send_signal(signal.SIGTERM)
        until(lambda: r.state() == "draining", "drains")
        assert daemon.poll() is None
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(15) == 0
        assert r.points() == []
        assert until(lambda: not r.processes(), "no process is left", 10)


def test_drain_deadline_ends_a_long_point_without_a_record(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=30)
    with rig(tmp_path, python=slow, dispatch="drain_timeout_s = 1") as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        assert r.stop() == 0
        assert r.points() == []
        assert (r.root / "step_1" / ".complete").exists()


def test_a_second_daemon_is_refused(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        daemon = r.start()
        second = r.evald("run", str(r.config))
        assert second.returncode == 1
        assert f"(pid {daemon.pid})" in second.stderr
        assert daemon.poll() is None


def test_an_engine_killed_in_mid_point_does_not_cost_the_point(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=0.3)
    with rig(tmp_path, python=slow, questions=300, fleet="engines = 2") as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        serving = [e for e in r.status()["engines"] if e["state"] == "serving"]
        os.kill(serving[0]["pid"], signal.SIGKILL)
        point = r.point(1, timeout_s=60)
        assert str(point.outcome) == "ok"
        assert point.counts.n_scored == point.counts.n_total == 600
        assert point.metrics["eval/a"] == 1.0


def test_point_deadline_gives_a_partial_or_skipped_point(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=60)
    limits = "sample_timeout_s = 1\npoint_deadline_s = 2"
    with rig(tmp_path, python=slow, dispatch=limits) as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        point = r.point(1)
        assert (str(point.outcome), point.reason) == ("skipped", "deadline")
        assert point.counts.n_timeout == point.counts.n_total == 20
        assert "20 timed out" in point.detail
        sets = [record.record_id for record in r.records() if isinstance(record, SetRecord)]
        assert point.void_sets == sets


def test_trainer_skip_baseline_and_requests(tmp_path: Path, fake_python: Path) -> None:
    dispatch = "baseline = true\nbaseline_step = -1"
    with rig(tmp_path, python=fake_python, dispatch=dispatch) as r:
        outside = write_snapshot(tmp_path / "kept" / "checkpoint", seed=9, answer=7, marker=None)
        r.start()
        (r.root / "step_5.skip").write_text('{"reason": "export_failed", "detail": "disk full"}')
        write_snapshot(r.root / "step_6", seed=6, answer=7)
        request = {"kind": "reuse", "step": 7, "path": str(outside)}
        (r.root / "seven.request").write_text(json.dumps(request))
        skip, base, reuse = r.point(5), r.point(-1), r.point(7)
        assert (skip.reason, skip.detail, skip.directory) == ("export_failed", "disk full", "")
        assert (str(base.kind), base.metrics["eval/a"]) == ("baseline", 0.0)
        assert reuse.metrics["eval/a"] == 1.0
        assert outside.is_dir()
        until(lambda: not list(r.root.glob("*.request")), "the request is consumed")
        assert not list(r.root.glob("*.skip"))


def test_status_tail_and_check_speak_of_the_running_daemon(
    tmp_path: Path, fake_python: Path
) -> None:
    with rig(tmp_path, python=fake_python) as r:
        daemon = r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        r.point(1)
        shown = r.evald("status", str(r.config))
        assert shown.returncode == 0
        assert "engine-0" in shown.stdout
        as_json = json.loads(r.evald("status", str(r.config), "--json").stdout)
        assert as_json["pid"] == daemon.pid
        assert as_json["ended"]["ok"] == 1
        lines = r.evald("tail", str(r.results), "--once").stdout.splitlines()
        assert [json.loads(line)["seq"] for line in lines] == list(range(1, len(lines) + 1))
        checked = r.evald("check", str(r.config))
        assert checked.returncode == 0
        assert "config is good" in checked.stdout
        assert "at the peak" in checked.stdout


def test_eval_without_a_daemon(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        good = write_snapshot(tmp_path / "snapshot", seed=1, answer=7, marker=None)
        done = r.evald("eval", str(r.config), str(good), "--step", "12")
        assert done.returncode == 0, done.stderr
        assert "t step 12: ok" in done.stdout
        assert not r.results.exists()
        broken = write_snapshot(tmp_path / "broken", seed=1, marker=None)
        with (broken / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        done = r.evald("eval", str(r.config), str(broken), "--step", "13")
        assert done.returncode == 1
        assert "invalid_snapshot" in done.stdout
        assert not r.processes()


def test_a_pipe_that_closes_early_does_not_hurt_tail(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        r.point(1)
        tail = subprocess.Popen(
            [sys.executable, "-m", "evald", "tail", str(r.results)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert tail.stdout is not None
        assert tail.stdout.readline().startswith(b'{"type":"accepted"')
        tail.stdout.close()
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        _, errors = tail.communicate(timeout=20)
        assert b"Traceback" not in errors


def test_an_idle_daemon_without_engines_is_small(tmp_path: Path) -> None:
    with rig(tmp_path, fleet="engines = 0") as r:
        daemon = r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: any(isinstance(x, Accepted) for x in r.records()), "accepted")
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        rss_kb = int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1])
        assert rss_kb < 80_000
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "/torch/" not in maps
        assert "/numpy/" not in maps


def test_two_writers_at_once_lose_nothing(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python, questions=2, staging="keep = 0") as r:
        r.start()

        def drop(first: int) -> None:
            for step in range(first, first + 10):
                write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
                time.sleep(0.01)

        writers = [threading.Thread(target=drop, args=(first,)) for first in (0, 100)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        done = r.evald("wait", str(r.results), "--points", "20", "--ok", "--timeout", "60")
        assert done.returncode == 0, done.stderr + r.log()
        until(lambda: not list(r.root.glob("step_*")), "keep = 0 leaves nothing")


def test_the_rig_itself_leaves_nothing(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        assert isinstance(r, Rig)
        root = r.root
    assert not root.exists()


def test_a_stop_does_not_wait_for_the_digest_of_a_huge_file(
    tmp_path: Path, fake_python: Path
) -> None:
    with rig(tmp_path, python=fake_python) as r:
        daemon = r.start()
        huge = write_snapshot(r.root / "step_1", seed=1, marker=None)
        with (huge / "large.bin").open("wb") as file:
            file.truncate(1 << 42)  # sparse: it takes no room, and minutes to read
        (huge / ".complete").touch()
        until(lambda: r.status().get("running"), "the point is prepared")
        (r.root / "step_2.skip").write_text('{"reason": "busy"}')
        assert r.point(2).reason == "busy"  # the rest goes on
        daemon.send_signal(signal.SIGTERM)
        until(lambda: r.state() == "draining", "drains")
        assert r.stop(10) == 0
        assert [point.step for point in r.points()] == [2]


def test_hostile_words_and_names_cost_their_own_record_alone(
    tmp_path: Path, fake_python: Path
) -> None:
    with rig(tmp_path, python=fake_python) as r:
        daemon = r.start()
        words = {
            "nul": {"kind": "reuse", "step": 1, "path": "a\0b"},
            "long": {"kind": "reuse", "step": 2, "path": "x/" * 3000},
            "huge": {"kind": "reuse", "step": int("9" * 400), "path": "x"},
            "root": {"kind": "reuse", "step": 3, "path": "/"},
        }
        for name, word in words.items():
            (r.root / f"{name}.request").write_text(json.dumps(word))
        odd = write_snapshot(r.root / "step_4", seed=4, marker=None)
        os.link(odd / "model.safetensors", os.fsencode(odd) + b"/\xff\n.safetensors")
        (odd / ".complete").touch()
        (r.root / "step_5").symlink_to("x" * 300)
        pipe = write_snapshot(r.root / "step_6", seed=6, marker=None)
        os.mkfifo(pipe / "model.safetensors.index.json")
        (pipe / ".complete").touch()
        for step in (2, 3, 4, 6):
            point = r.point(step)
            assert point.reason == "invalid_snapshot"
            assert "\n" not in point.detail
        write_snapshot(r.root / "step_7", seed=7, answer=7)
        assert str(r.point(7).outcome) == "ok"
        assert daemon.poll() is None
        assert r.stop() == 0


def test_a_baseline_that_is_configured_and_asked_for_is_measured_once(
    tmp_path: Path, fake_python: Path
) -> None:
    dispatch = "baseline = true\nbaseline_step = -1"
    with rig(tmp_path, python=fake_python, dispatch=dispatch) as r:
        (r.root / "a.request").write_text('{"kind": "baseline"}')
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        r.start()
        done = r.evald("wait", str(r.results), "--points", "2", "--ok", "--timeout", "40")
        assert done.returncode == 0, done.stderr + r.log()
        assert r.stop() == 0


def test_the_budget_refuses_the_newest_of_a_burst(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python, staging="max_bytes = 3_000_000") as r:
        for step in range(1, 6):
            waiting = write_snapshot(r.root / f"step_{step}", seed=step, answer=7, marker=None)
            (waiting / "padding").write_bytes(bytes(800_000))
            (waiting / ".complete").touch()
        r.start()
        reasons = [r.point(step).reason for step in range(1, 6)]
        assert reasons == ["", "", "", "no_space", "no_space"]


def test_a_second_daemon_on_the_same_root_is_refused(tmp_path: Path, fake_python: Path) -> None:
    """With its own results directory it would pass the ledger's lock."""
    with rig(tmp_path, python=fake_python) as r:
        daemon = r.start()
        other = tmp_path / "other.toml"
        text = r.config.read_text().replace(f"{tmp_path}/results", f"{tmp_path}/results2")
        other.write_text(text.replace("evald.sock", "evald2.sock"))
        second = r.evald("run", str(other))
        assert second.returncode == 1
        assert f"another evald (pid {daemon.pid}) deletes ended snapshots" in second.stderr
        assert daemon.poll() is None


def test_eval_of_a_missing_directory_is_told(tmp_path: Path, fake_python: Path) -> None:
    with rig(tmp_path, python=fake_python) as r:
        done = r.evald("eval", str(r.config), "/no/where", "--step", "1")
        assert done.returncode == 1
        assert done.stderr == "evald: cannot evaluate /no/where: there is no such directory\n"
