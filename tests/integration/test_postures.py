"""The whole daemon in each posture, with fake servers that the test starts by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, rig, until

from evald.engines.ports import free_port
from evald.testing import (
    FakeEngine,
    FakeTrainer,
    serve_fake,
    write_base_model,
    write_fake_python,
    write_snapshot,
)
from evald.trainer.shared import shared_eval


class Server:
    """A fake SGLang server that somebody else runs."""

    def __init__(self, model: Path, *arguments: str, weight_version: str = "default") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "evald.testing", "--model-path", str(model)]
        command += ["--port", str(self.port), "--weight-version", weight_version, *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def post(self, path: str, body: object) -> None:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())  # noqa: S310
        urllib.request.urlopen(request, timeout=10).read()  # noqa: S310 (loopback)

    def is_up(self) -> bool:
        try:
            urllib.request.urlopen(self.url + "/model_info", timeout=5).read()  # noqa: S310
        except OSError:
            return False
        return True


@contextmanager
def servers(
    model: Path, count: int, *arguments: str, version: str = "base"
) -> Iterator[list[Server]]:
    started = [Server(model, *arguments, weight_version=version) for _ in range(count)]
    try:
        for server in started:
            until(server.is_up, "the server is up")
        yield started
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def load(server: Server, directory: Path, version: str) -> None:
    """Load weights as a trainer does with its own engines."""
    server.post(
        "/update_weights_from_disk", {"model_path": str(directory), "weight_version": version}
    )


def table(name: str, started: list[Server], *lines: str) -> str:
    urls = json.dumps([server.url for server in started])
    head = [f"[{name}]", 'model = "{model}"', f"urls = {urls}", "alive_timeout_s = 20"]
    return "\n".join([*head, "probe_interval_s = 0.5", "probe_timeout_s = 1", *lines])


def shared_request(r: Rig, step: int, version: str) -> None:
    request = {"kind": "shared", "step": step, "weight_version": version}
    (r.root / f"s{step}.tmp").write_text(json.dumps(request))
    (r.root / f"s{step}.tmp").rename(r.root / f"s{step}.request")


def test_attached_engines_are_pinned_and_left_alive(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base")
    with servers(base, 2) as started:
        posture = table("attached", started)
        with rig(tmp_path, model=base, posture=posture) as r:
            r.start()
            for step in (1, 2):
                write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
            done = r.evald("wait", str(r.results), "--points", "2", "--ok", "--timeout", "40")
            assert done.returncode == 0, done.stderr + r.log()
            assert all(point.metrics["eval/a"] == 1.0 for point in r.points())
            assert r.stop() == 0
        assert all(server.process.poll() is None for server in started)


def test_attached_engine_that_is_lost_is_waited_for(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base")
    with (
        servers(base, 2, "--delay-s", "0.2") as started,
        rig(tmp_path, model=base, posture=table("attached", started), questions=300) as r,
    ):
        r.start()
        write_snapshot(r.root / "step_1", seed=1, answer=7)
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        started[0].process.send_signal(signal.SIGKILL)
        point = r.point(1, timeout_s=60)
        assert str(point.outcome) == "ok"
        assert point.counts.n_scored == point.counts.n_total == 600


def test_shared_engines_are_measured_only_on_the_version_that_was_asked_for(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base")
    weights = write_snapshot(tmp_path / "trained", seed=3, answer=7, marker=None)
    with servers(base, 2) as started:
        for server in started:
            load(server, weights, "40")
        with rig(tmp_path, model=base, posture=table("shared", started)) as r:
            r.start()
            shared_request(r, 40, "40")
            point = r.point(40)
            assert str(point.outcome) == "ok", point.detail
            assert point.metrics["eval/a"] == 1.0
            assert point.metrics["eval/a/weight_version/mean"] == 40
            assert point.weight_versions == ["40"]
            until(lambda: not list(r.root.glob("*.request")), "the request is consumed")
            shared_request(r, 41, "41")
            other = r.point(41)
            assert (str(other.outcome), other.reason) == ("skipped", "version_changed")
            # a trainer that asks once more at once, in the same file, is not left waiting
            for server in started:
                load(server, weights, "41")
            shared_request(r, 41, "41")
            assert str(r.point(41, revision=1).outcome) == "ok"
            # a snapshot has nothing to be loaded into
            write_snapshot(r.root / "step_42", seed=1, answer=7)
            assert r.point(42).reason == "invalid_snapshot"


def test_a_shared_version_that_changes_in_mid_point_gives_no_number(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base")
    weights = write_snapshot(tmp_path / "trained", seed=3, answer=7, marker=None)
    with servers(base, 1, "--delay-s", "0.2") as started:
        load(started[0], weights, "40")
        with rig(tmp_path, model=base, posture=table("shared", started), questions=600) as r:
            r.start()
            shared_request(r, 40, "40")
            until(
                lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"],
                "runs",
            )
            load(started[0], weights, "41")
            point = r.point(40, timeout_s=60)
            assert (str(point.outcome), point.reason) == ("skipped", "version_changed")
            assert "eval/a" not in point.metrics


CLASS = """
import asyncio, os
from evald.blackbox import EvalSkip, Results, SetResults

class Mine:
    def __init__(self, config):
        self.bonus = config["bonus"]

    async def evaluate_checkpoint(self, directory, point):
        print("measuring", point.step, flush=True)
        if point.step == 2:
            raise EvalSkip("no_license")
        if point.step == 3:
            os._exit(9)
        await asyncio.sleep(0)
        return Results(sets={"mine": SetResults(metrics={"score": point.step + self.bonus})})
"""


def test_black_box_class(tmp_path: Path) -> None:
    (tmp_path / "my_box.py").write_text(CLASS)
    posture = '[blackbox]\nclass = "my_box:Mine"\nmodel = "{model}"\n[blackbox.config]\nbonus = 0.5'
    with rig(tmp_path, posture=posture, sets=False) as r:
        r.start()
        for step in (1, 2, 3, 4):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
            r.point(step)
        ends = {point.step: (str(point.outcome), point.reason) for point in r.points()}
        assert ends == {
            1: ("ok", ""),
            2: ("skipped", "no_license"),
            3: ("skipped", "crashed"),
            4: ("ok", ""),
        }
        assert r.point(4).metrics["eval/mine"] == 4.5
        assert r.stop() == 0
        assert until(lambda: not r.processes(), "no process is left", 10)


def test_black_box_command(tmp_path: Path) -> None:
    program = tmp_path / "measure.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "directory, step, output = sys.argv[1:]\n"
        "assert (pathlib.Path(directory) / 'config.json').exists()\n"
        "result = {'sets': {'mine': {'metrics': {'score': int(step) / 10}}}}\n"
        "pathlib.Path(output).write_text(json.dumps(result))\n"
    )
    command = json.dumps([sys.executable, str(program), "{dir}", "{step}", "{output}"])
    posture = f"[blackbox]\ncommand = {command}\n"
    with rig(tmp_path, posture=posture, sets=False) as r:
        r.start()
        write_snapshot(r.root / "step_5", seed=5, answer=7)
        assert r.point(5).metrics["eval/mine"] == 0.5


def test_operator_verbs_over_the_status_server(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path / "python", delay_s=0.3)
    # the first point must still run when it is aborted, however slow the commands are
    fleet = "engines = 1\nmax_requests = 32"
    with rig(
        tmp_path, python=python, questions=300, fleet=fleet, dispatch="max_in_flight = 1"
    ) as r:
        r.start()

        def ctl(*arguments: str, code: int = 0) -> str:
            done = r.evald("ctl", *arguments, "--target", str(r.config))
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout + done.stderr

        ctl("pause")
        for step in (1, 2):
            write_snapshot(r.root / f"step_{step}", seed=step, answer=7)
        until(lambda: len(r.status().get("queued", [])) == 2, "both queue")
        assert r.state() == "paused"
        ctl("skip", "2", "--why", "known bad" + os.fsdecode(b"\xff"))
        second = r.point(2)
        assert (second.reason, "known bad" in second.detail) == ("aborted", True)
        ctl("resume")
        until(lambda: [p["state"] for p in r.status().get("running", [])] == ["evaluating"], "runs")
        assert "it is running; abort it" in ctl("skip", "1", code=1)
        ctl("abort", "1", "--why", "too slow")
        assert r.point(1).reason == "aborted"
        assert "neither queued nor running" in ctl("abort", "1", code=1)
        ctl("retry", "1")
        again = r.point(1, revision=1, timeout_s=60)
        assert str(again.outcome) == "ok"
        pid = r.status()["engines"][0]["pid"]
        ctl("restart", "engine-0")
        until(lambda: r.status()["engines"][0]["pid"] not in {pid, None}, "a new process")
        assert "engine-7" in ctl("restart", "engine-7", code=1)
        assert "quarantine" in ctl("release", "engine-0", code=1)
        began = time.monotonic()
        ctl("drain")
        assert r.daemon is not None
        assert r.daemon.wait(30) == 0
        assert time.monotonic() - began < 30
        assert r.evald("ctl", "pause", "--target", str(r.config)).returncode == 3


async def test_no_training_request_between_pause_and_resume_in_the_default_config(
    tmp_path: Path,
) -> None:
    """The trainer's blocking call holds its own producer still: the config says nothing of it."""
    base = write_base_model(tmp_path / "base")
    weights = write_snapshot(tmp_path / "trained", seed=3, answer=7, marker=None)
    fake = FakeEngine(weights, weight_version="40")
    served = await serve_fake(fake)
    job = FakeTrainer([served.url])
    rollouts = asyncio.create_task(job.run())
    loop = asyncio.get_running_loop()

    def on_loop(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(20)

    urls = json.dumps([served.url])
    posture = f'[shared]\nmodel = "{{model}}"\nurls = {urls}\nalive_timeout_s = 20'
    with rig(tmp_path, model=base, posture=posture, questions=30) as r:
        await asyncio.to_thread(r.start)
        marks: list[int] = []

        async def pause() -> None:
            await job.pause()
            marks.append(len(fake.rids))

        async def resume() -> None:
            marks.append(len(fake.rids))
            job.resume()

        record = await asyncio.to_thread(
            shared_eval,
            r.root,
            40,
            "40",
            results=r.results,
            pause=lambda: on_loop(pause()),
            resume=lambda: on_loop(resume()),
            timeout_s=40,
        )
        assert record is not None
        assert record["outcome"] == "ok"
        assert record["metrics"]["eval/a"] == 1.0
        between = fake.rids[marks[0] : marks[1]]
        assert len(between) >= 60
        assert not [rid for rid in between if rid.startswith("rollout")]
        sent = job.sent
        async with asyncio.timeout(20):
            while job.sent < sent + 3:
                await asyncio.sleep(0.02)
        # the same weights are measured once: the answer is there already, nobody is paused
        again = await asyncio.to_thread(
            shared_eval, r.root, 40, "40", results=r.results, pause=pytest.fail,
            resume=pytest.fail, timeout_s=5,
        )  # fmt: skip
        assert again == record
        # nobody answers: training goes on after its own deadline
        await asyncio.to_thread(r.stop)
        silent = await asyncio.to_thread(
            shared_eval, r.root, 41, "41", results=r.results, pause=lambda: None,
            resume=lambda: None, timeout_s=0.5,
        )  # fmt: skip
        assert silent is None
        assert not (r.root / "shared_41.request").exists()
    rollouts.cancel()
    await asyncio.gather(rollouts, return_exceptions=True)
    await served.process.stop(0)
