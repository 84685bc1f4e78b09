"""SIGHUP and `evald ctl reload` on a daemon with a point in flight."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from rig import Rig, rig, until

from evald.testing import write_snapshot
from evald.testing.fake_launcher import write_fake_python


def change(r: Rig, old: str, new: str) -> None:
    text = r.config.read_text()
    assert text.count(old) == 1
    r.config.write_text(text.replace(old, new))


def hang_up(r: Rig) -> None:
    assert r.daemon is not None
    r.daemon.send_signal(signal.SIGHUP)


def test_the_point_in_flight_keeps_its_sets_and_the_next_has_the_new_ones(tmp_path: Path) -> None:
    slow = write_fake_python(tmp_path / "python", delay_s=0.3)
    with rig(tmp_path, python=slow, questions=100, dispatch="max_in_flight = 1") as r:
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        (tmp_path / "c.jsonl").write_text('{"prompt": "c?", "label": "8"}\n')
        # b goes, c comes, and other questions are asked of a
        (tmp_path / "a.jsonl").write_text('{"prompt": "again?", "label": "7"}\n')
        change(r, '[[eval]]\nname = "b"', '[[eval]]\nname = "c"')
        change(r, "b.jsonl", "c.jsonl")
        hang_up(r)
        until(lambda: "config_reloaded" in r.log(), "it is reloaded")
        assert not r.points()  # in the middle of step 1
        first, second = r.point(1), r.point(2)
        assert (first.outcome, first.counts.n_total, first.counts.n_error) == ("ok", 200, 0)
        assert set(first.provenance["sets"]) == {"a", "b"}
        assert set(second.provenance["sets"]) == {"a", "c"}
        assert (second.metrics["eval/a"], second.metrics["eval/c"]) == (1.0, 0.0)
        assert second.counts.n_total == 2
        assert second.curve_breaks == ["a"]
        assert first.provenance["sets"]["a"]["data"] != second.provenance["sets"]["a"]["data"]
        (told,) = [json.loads(x)["detail"] for x in r.log().splitlines() if "config_reloaded" in x]
        assert told == (
            "changed: eval set 'c' is new, eval set 'b' is gone, eval set 'a' has other data"
        )
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)


def test_an_operator_hears_what_changes_what_does_not_and_what_is_wrong(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python")) as r:
        r.start()
        daemon = r.daemon
        reload = ("ctl", "reload", "--target", str(r.config))
        done = r.evald(*reload)
        assert (done.returncode, done.stdout) == (0, "nothing has changed\n")
        change(r, "engines = 1", "engines = 2")
        r.config.write_text('log_level = "warning"\n' + r.config.read_text())
        done = r.evald(*reload)
        assert done.stdout == "changed: log_level; needs a restart: fleet.engines\n", done.stderr
        assert r.evald("status", str(r.config)).stdout.count("needs a restart: fleet.engines") == 1
        change(r, "a.jsonl", "nowhere.jsonl")
        done = r.evald(*reload)
        assert done.returncode == 1
        assert "cannot reload the config, the old one stays: " in done.stderr
        until(lambda: "nowhere.jsonl" in r.status().get("config_fault", ""), "the status says it")
        write_snapshot(r.root / "step_1", answer=7)
        assert r.point(1).metrics["eval/a"] == 1.0
        assert "point_accepted" not in r.log()
        assert daemon is not None
        assert daemon.poll() is None


def test_a_corrected_grader_counts_from_the_next_point_on(tmp_path: Path) -> None:
    body = "def score(response, reference, metadata):\n    return {}\n"
    grader = tmp_path / "mine.py"
    grader.write_text(body.format(0))
    python = 'grader = "python"\n[defaults.grader_config]\nfunction = "mine:score"\n[defaults_end]'
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), questions=3) as r:
        text = r.config.read_text().replace('grader = "boxed_exact"\n', "")
        text = text.replace("max_response_len = 16\n", "max_response_len = 16\n" + python)
        r.config.write_text(text.replace("\n[defaults_end]", "\n"))
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        assert r.point(1).metrics["eval/a"] == 0.0
        grader.write_text(body.format(1))
        hang_up(r)
        until(lambda: "config_reloaded" in r.log(), "it is reloaded")
        write_snapshot(r.root / "step_2", seed=2, answer=7)
        assert r.point(2).metrics["eval/a"] == 1.0
        r.note_processes()
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)


def test_a_storm_of_hangups_ends_neither_a_start_nor_a_stop(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), questions=3) as r:
        over = threading.Event()

        def storm() -> None:
            while not over.wait(0.002):
                with suppress(FileNotFoundError, TypeError):  # it has not begun yet
                    if "preflight" in r.log():
                        hang_up(r)

        thread = threading.Thread(target=storm)
        thread.start()
        try:
            r.start()
            write_snapshot(r.root / "step_1", seed=1, answer=7)
            assert r.point(1).outcome == "ok"
            r.note_processes()
            assert r.stop() == 0
        finally:
            over.set()
            thread.join()
        assert until(lambda: not r.processes(), "no process is left", 10)
        assert not (tmp_path / "evald.sock").exists()


def test_a_data_file_that_is_a_pipe_is_refused_and_holds_nothing_up(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python"), questions=3) as r:
        r.start()
        (tmp_path / "a.jsonl").unlink()
        os.mkfifo(tmp_path / "a.jsonl")
        done = r.evald("ctl", "reload", "--target", str(r.config))
        assert done.returncode == 1
        assert "a.jsonl: it is a pipe; write the rows into a file" in done.stderr
        # (gone just when the start's own check of the prompts wants to read it, too)
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        assert r.point(1).outcome == "ok"
        assert r.stop() == 0
