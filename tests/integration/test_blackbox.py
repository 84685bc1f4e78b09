"""Classes in real processes: every way in which they answer, fail, hang and die."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from blackbox_rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def test_one_object_sees_one_point_after_another(rig: Rig) -> None:
    first = await rig.evaluate(1, "keep")
    second = await rig.evaluate(2)
    assert first.metrics == {"eval/math": 0.5, "eval/math-pass@4": 0.75, "eval/math/len": 1.0}
    assert second.metrics["eval/math/len"] == 2.0
    assert (first.counts.n_total, first.counts.n_scored) == (1, 1)
    assert (first.engines, first.weight_versions) == (["mine"], ["r:1:abc:1"])
    assert first.provenance["judge"] == "v3"
    assert first.provenance["blackbox"]["class"] == "boxes:Box"
    assert [one.name for one in rig.sets] == ["math", "math"]
    (sample,) = rig.samples(1)
    assert (sample.question, sample.score, sample.status) == ("q1", 1.0, "scored")
    assert (sample.digest, sample.extra) == ("00000001" * 4, {"why": "right"})
    assert len(rig.notes("built")) == 1
    (log,) = rig.logs()
    assert "evaluating r/step/2/r0" in log.read_text()
    (kept,) = rig.results_dir.rglob("mine.txt")
    assert kept.parent.name == "000001-r-step_1.r0"
    (view,) = rig.posture.engines()
    assert (view.state, view.pid, view.in_flight) == ("idle", rig.notes("built")[0], 0)
    await rig.stop()
    assert rig.notes("disposed") == rig.notes("built")
    assert rig.posture.engines()[0].state == "stopped"


async def test_skips_are_its_own_and_the_object_stays(rig: Rig) -> None:
    skip = await rig.skipped(1, "skip")
    assert (skip.reason, skip.detail) == ("judge_down", "the judge answers 503")
    odd = await rig.skipped(2, "odd_skip")
    assert (odd.reason, odd.detail) == ("the_judge_s_down", "The judge's down!")
    await rig.evaluate(3)
    assert len(rig.notes("built")) == 1
    assert rig.posture.engines()[0].restarts == 0


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("crash", r"raised ValueError: no such tokenizer; see .*\.log"),
        ("garbage", "returned str; return evald.blackbox.Results"),
        ("loud leave", "it ended with exit code 3; last in .*last words"),
        ("loud kill", "it was killed by signal 9; last in .*last words"),
    ],
)
async def test_a_crash_costs_one_point_and_the_process(rig: Rig, do: str, says: str) -> None:
    skip = await rig.skipped(1, f"child {do}")
    assert skip.reason == "crashed"
    assert len(skip.detail.splitlines()) == 1
    assert len(skip.detail) < 1000
    assert re.search(says, skip.detail), skip.detail
    assert not rig.alive()
    assert rig.posture.engines()[0].restarts == 1
    await rig.evaluate(2)
    assert len(set(rig.notes("built"))) == 2
    assert len(rig.logs()) == 2


async def test_the_object_is_there_before_the_first_point(rig: Rig) -> None:
    async with asyncio.timeout(30):
        while rig.posture.engines()[0].state != "idle" or not rig.notes("built"):
            await asyncio.sleep(0.01)
    await rig.evaluate(1)
    assert len(rig.notes("built")) == 1


async def test_a_start_that_fails_is_tried_again_for_the_point(tmp_path: Path) -> None:
    async with Rig(tmp_path, config={"start": ["crash"]}) as rig:
        async with asyncio.timeout(30):
            while not rig.posture.engines()[0].detail:
                await asyncio.sleep(0.01)
        assert "ValueError: no such tokenizer" in rig.posture.engines()[0].detail
        assert (await rig.skipped(1)).reason == "crashed"
        assert len(rig.notes("built")) == 2


async def test_samples_that_are_none_are_refused(rig: Rig) -> None:
    skip = await rig.skipped(1, "odd_samples")
    assert skip.reason == "crashed"
    assert "set math: sample 2: Expected `str`, got `array`" in skip.detail
    assert not rig.sets


async def test_numbers_that_are_not_finite_are_refused_in_words(rig: Rig) -> None:
    skip = await rig.skipped(1, "nan")
    assert skip.reason == "crashed"
    assert "set math: metric score is nan, but only finite numbers are recorded" in skip.detail
    assert not rig.sets


@pytest.mark.parametrize("do", ["hang", "block"])
async def test_a_hang_ends_at_the_timeout(tmp_path: Path, do: str) -> None:
    async with Rig(tmp_path, timeout_s=3.0, stop_grace_s=0.5) as rig:
        await rig.evaluate(1)
        began = time.monotonic()
        skip = await rig.skipped(2, f"child {do}")
        assert skip.reason == "deadline"
        assert "blackbox.timeout_s is 3" in skip.detail
        assert 3.0 <= time.monotonic() - began < 10.0
        assert not rig.alive()
        # who still listens may clean up
        assert len(rig.notes("disposed")) == (1 if do == "hang" else 0)
        await rig.evaluate(3)


async def test_the_points_own_deadline_counts_too(rig: Rig) -> None:
    await rig.evaluate(1)
    assert (await rig.skipped(2, "hang", deadline_s=0.3)).reason == "deadline"
    assert not rig.alive()


async def test_a_process_that_dies_while_idle_costs_no_point(rig: Rig) -> None:
    await rig.evaluate(1, "kill_later")
    await asyncio.sleep(0.5)
    assert not rig.alive()
    await rig.evaluate(2)
    # unseen: it dies before it has taken the point
    pid = rig.notes("built")[-1]
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(rig.evaluate(3))
    await asyncio.sleep(0.3)
    assert not task.done()
    os.kill(pid, signal.SIGKILL)
    await task
    assert len(rig.notes("built")) == 3
    assert rig.posture.engines()[0].restarts == 0


async def test_large_samples_pass_by_the_daemon(rig: Rig) -> None:
    result = await rig.evaluate(1, "large")
    assert (result.counts.n_total, result.counts.n_scored) == (4000, 4000)
    assert len(rig.samples(1)) == 4000
    # evaluated again: replaced, not added
    await rig.evaluate(1)
    assert len(rig.samples(1)) == 1


async def test_cancelled_in_the_middle_nothing_counts(tmp_path: Path) -> None:
    async with Rig(tmp_path, stop_grace_s=1.0) as rig:
        await rig.evaluate(1)
        task = asyncio.create_task(rig.evaluate(2, "child block"))
        async with asyncio.timeout(30):
            while not rig.notes("child"):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # the next one starts when nothing is left of it, not even what is deaf to SIGTERM
        await rig.evaluate(3)
        assert len(rig.notes("built")) == 2
        assert rig.alive() == rig.notes("built")[1:]


async def test_the_daemons_stop_is_no_crash_of_the_point(rig: Rig) -> None:
    await rig.evaluate(1)
    task = asyncio.create_task(rig.evaluate(2, "hang"))
    async with asyncio.timeout(30):
        while rig.posture.engines()[0].state != "evaluating":
            await asyncio.sleep(0.01)
    await rig.stop()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("settings", "reason", "says"),
    [
        ({"class": "boxes:Nothing"}, "crashed", "cannot start boxes:Nothing: AttributeError: "),
        ({"class": "nowhere:Box"}, "crashed", "ModuleNotFoundError: No module named 'nowhere'"),
        ({"config": {"start": ["crash"]}}, "crashed", "ValueError: no such tokenizer; see /"),
        ({"config": {"start": ["leave"]}}, "crashed", "it ended with exit code 3; last in /"),
        ({"config": {"start": ["skip"]}}, "judge_down", "the judge answers 503"),
        (
            {"config": {"start": ["block"]}, "start_timeout_s": 1.0, "stop_grace_s": 0.0},
            "crashed",
            "it was not constructed within 1 s; see /",
        ),
        ({"python": "/nowhere/python"}, "crashed", "/nowhere/python"),
        ({"cwd": "/nowhere"}, "crashed", "cannot change directory to '/nowhere'"),
    ],
)
async def test_what_cannot_start_is_said_in_words(
    tmp_path: Path, settings: dict[str, object], reason: str, says: str
) -> None:
    async with Rig(tmp_path, **settings) as rig:
        skip = await rig.skipped(1)
        assert skip.reason == reason
        assert says in skip.detail
        assert not rig.alive()


#: a daemon that does nothing but evaluate one point.
DAEMON = """
import asyncio, sys
from pathlib import Path
from blackbox_rig import Rig
import uvloop

async def main():
    async with Rig(Path(sys.argv[1])) as rig:
        await rig.evaluate(1)
        print("idle", flush=True)
        await rig.evaluate(2, "child hang")

uvloop.run(main())
"""


@pytest.mark.parametrize("with_guard", [False, True])
async def test_nothing_outlives_a_killed_daemon(tmp_path: Path, with_guard: bool) -> None:
    rig = Rig(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DAEMON, str(tmp_path), env=environment
    )
    try:
        async with asyncio.timeout(30):
            while not rig.notes("child"):
                await asyncio.sleep(0.02)
    finally:
        guards = [int(stat) for stat in _children(daemon.pid)]
        if with_guard:
            for pid in guards:
                os.kill(pid, signal.SIGKILL)
        daemon.kill()
        await daemon.wait()
    if not with_guard:
        async with asyncio.timeout(30):
            while rig.alive():
                await asyncio.sleep(0.02)
    # the next daemon finds what even the guard could not end
    async with rig:
        await rig.evaluate(3)
        assert rig.alive() == [rig.notes("built")[-1]]


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_same_under_uvloop(tmp_path: Path) -> None:
    async def life() -> None:
        async with Rig(tmp_path) as rig:
            await rig.evaluate(1)
            assert (await rig.skipped(2, "kill")).reason == "crashed"
            await rig.evaluate(3)

    uvloop.run(life())


async def test_what_cannot_be_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evald.results.pause.LOOK_AGAIN_S", 0.02)
    async with Rig(tmp_path) as rig:
        await rig.evaluate(1)
        outputs = rig.results_dir / "blackbox" / "outputs"
        outputs.rename(outputs.with_name("old"))
        for step, way in ((2, rig.results_dir / "samples" / "r" / "step_2.r0"), (3, outputs)):
            if way.is_dir():
                way.rename(way.with_name("older"))
            way.write_text("in the way")
            evaluating = asyncio.create_task(rig.evaluate(step))
            async with asyncio.timeout(20):
                while not rig.pause.why:
                    await asyncio.sleep(0.01)
            way.unlink()
            await evaluating
            assert rig.pause.why == ""


@pytest.mark.parametrize("say", ["start", "point"])
async def test_nonsense_on_evalds_own_socket_is_a_crash(tmp_path: Path, say: str) -> None:
    nonsense = (
        "import os, socket\n"
        "for fd in range(3, 64):\n"
        "    try: found = socket.socket(fileno=os.dup(fd))\n"
        "    except OSError: continue\n"
        "    if found.family == socket.AF_UNIX and 'evald-blackbox' in repr(found.getpeername()):\n"
        "        found.sendall(b'hello\\n')\n"
    )
    (tmp_path / "nonsense.py").write_text(
        f"class Box:\n"
        f"    def __init__(self, config):\n"
        f"        if config['say'] == 'start': exec({nonsense!r})\n"
        f"    def evaluate_checkpoint(self, directory, point):\n"
        f"        exec({nonsense!r})\n"
    )
    async with Rig(tmp_path, **{"class": "nonsense:Box"}, config={"say": say}) as rig:
        skip = await rig.skipped(1)
        assert skip.reason == "crashed"
        assert "it said b'hello\\n' out of turn on evald's own socket" in skip.detail
