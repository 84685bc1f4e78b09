from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from evald.evals import grading, worker_pool
from evald.evals.graders import Grade, GraderFailed, Rules, Sample
from evald.evals.grading import Grading
from evald.evals.worker import GradeJob, Order, answer, frame
from evald.evals.worker_pool import WorkerPool

MATH = Rules("math")
BOXED_MATH = Rules("boxed_math")
DAPO = Rules("math", config={"answer_pattern": r"(?i)answer\s*:\s*([^\n]+)"})
#: exponential back-tracking: longer than anybody waits.
EXPLODING = Rules("regex", r"^(a+)+$")
EXPLOSIVE = "a" * 40 + "b"


def sample(response: str, label: Any) -> Sample:
    return Sample(response=response, label=label)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(size=2, preload=("math",))
    yield pool
    await pool.close()
    assert worker_pids() == []


def worker_pids(parent: int | None = None) -> list[int]:
    """Grader processes of a process (this one), from /proc."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"evald.evals.worker" in command and ppid == (parent or os.getpid()):
            pids.append(int(entry.name))
    return pids


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in 20 s"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("rules", "response", "label", "score"),
    [
        (MATH, "so $x = \\frac{1}{2}$", "0.5", 1.0),
        (MATH, "the answer is 12,345", 12345, 1.0),
        (MATH, "it is 4", 5, 0.0),
        (BOXED_MATH, "first 7, then \\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (BOXED_MATH, "7", "7", None),
        (BOXED_MATH, "\\boxed{\\frac{1}{2}}", ["3", 0.5], 1.0),
        (MATH, "no number here", "7", None),
        (MATH, "half a pair \ud83d of 7", "7", 1.0),
        (DAPO, "Answer: 3\nAnswer: $\\frac{1}{2}$", "0.5", 1.0),
        (DAPO, "Answer: 42.", 42, 1.0),
        (DAPO, "\\boxed{42}", 42, None),
        (Rules("regex", r"#### (\d+)"), "#### 12", 12, 1.0),
        (Rules("exact"), "x" * 50_000, "x" * 50_000, 1.0),
    ],
)
async def test_workers_grade(
    pool: WorkerPool, rules: Rules, response: str, label: Any, score: float | None
) -> None:
    grade = await Grading(pool).grade(rules, sample(response, label), timeout_s=30)
    assert (None if grade.no_answer else grade.score) == score


async def test_cheap_graders_need_no_process(pool: WorkerPool) -> None:
    assert await Grading(pool).grade(
        Rules("boxed_exact"), sample("\\boxed{1}", 1), timeout_s=1
    ) == Grade(1.0, answer="1", reason="answer: 1")
    assert worker_pids() == []


async def test_answers_that_come_together_leave_the_loop_its_turns(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "_STEP_S", 0.0)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    one = Grading(pool)
    await asyncio.gather(
        *(one.grade(Rules("exact"), sample("1", 1), timeout_s=1) for _ in "x" * 20)
    )
    ticker.cancel()
    assert turns >= 20


async def test_a_hostile_answer_costs_itself_only(pool: WorkerPool) -> None:
    await Grading(pool).grade(MATH, sample("1", 1), timeout_s=30)
    started = time.monotonic()
    hostile = [
        Grading(pool).grade(EXPLODING, sample(EXPLOSIVE, "x"), timeout_s=0.5) for _ in range(3)
    ]
    good = [Grading(pool).grade(MATH, sample(f"it is {n}", n), timeout_s=30) for n in range(20)]
    results = await asyncio.gather(*hostile, *good, return_exceptions=True)
    assert all(isinstance(result, GraderFailed) for result in results[:3])
    assert "took longer than 0.5 s and was killed" in str(results[0])
    assert [result.score for result in results[3:] if isinstance(result, Grade)] == [1.0] * 20
    assert time.monotonic() - started < 15
    assert len(worker_pids()) <= 2


async def test_an_endless_power_is_killed_in_time(pool: WorkerPool) -> None:
    await Grading(pool).grade(MATH, sample("1", 1), timeout_s=30)
    started = time.monotonic()
    with pytest.raises(GraderFailed):
        await Grading(pool).grade(MATH, sample("$9^{9^{9^{9}}}$", "$9^{9^{9^{8}}}$"), timeout_s=1)
    assert time.monotonic() - started < 20


async def test_a_cancelled_grade_leaves_no_answer_for_the_next(pool: WorkerPool) -> None:
    task = asyncio.create_task(Grading(pool).grade(EXPLODING, sample(EXPLOSIVE, "x"), timeout_s=60))
    await until(worker_pids)
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    grade = await Grading(pool).grade(Rules("regex", r"\d"), sample("7", 7), timeout_s=30)
    assert grade.score == 1.0


async def test_a_worker_that_dies_is_replaced(pool: WorkerPool) -> None:
    digit = Rules("regex", r"\d")
    await Grading(pool).grade(digit, sample("7", 7), timeout_s=30)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not worker_pids())
    await asyncio.sleep(0.1)
    assert (await Grading(pool).grade(digit, sample("7", 7), timeout_s=30)).score == 1.0
    task = asyncio.create_task(Grading(pool).grade(EXPLODING, sample(EXPLOSIVE, "x"), timeout_s=60))
    await asyncio.sleep(0.3)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GraderFailed, match="died while it worked"):
        await task


async def test_a_label_that_nobody_can_parse_is_the_graders_failure(pool: WorkerPool) -> None:
    with pytest.raises(GraderFailed, match="cannot parse the reference"):
        await Grading(pool).grade(MATH, sample("it is 5", "$$"), timeout_s=30)


async def test_workers_that_do_not_start_end_the_waiting_too(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(3):
        with pytest.raises(GraderFailed, match="cannot start a worker process"):
            await Grading(pool).grade(MATH, sample("1", 1), timeout_s=5)
    with pytest.raises(GraderFailed, match="worker processes do not start"):
        await Grading(pool).grade(MATH, sample("1", 1), timeout_s=5)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    other = WorkerPool()
    with pytest.raises(GraderFailed, match="died"):
        await Grading(other).grade(MATH, sample("1", 1), timeout_s=5)
    await other.close()


async def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no sympy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(preload=("math",))
    with pytest.raises(GraderFailed, match="cannot import math_verify: no sympy"):
        await Grading(pool).grade(MATH, sample("1", 1), timeout_s=5)
    await pool.close()


async def test_a_module_in_the_current_directory_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: WorkerPool
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert (await Grading(pool).grade(MATH, sample("1", 1), timeout_s=30)).score == 1.0


async def test_what_a_library_prints_does_not_get_between_the_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text(
        "def parse(*a, **k):\n    print('noise', flush=True)\n    return [1]\n"
        "def verify(*a, **k):\n    return True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool()
    assert (await Grading(pool).grade(MATH, sample("1", 1), timeout_s=5)).score == 1.0
    await pool.close()


def test_whatever_a_grader_raises_is_a_failure_of_that_response() -> None:
    assert "missing )" in str(answer(GradeJob.of(Rules("regex", "("), sample("x", "x"))).failure)
    assert "unknown" in str(answer(GradeJob.of(Rules("bleu"), sample("x", "x"))).failure)


def run_on_uvloop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


def test_the_pool_works_on_uvloop() -> None:
    async def work() -> None:
        pool = WorkerPool(preload=("math",))
        with pytest.raises(GraderFailed, match="was killed"):
            await Grading(pool).grade(EXPLODING, sample(EXPLOSIVE, "x"), timeout_s=0.3)
        assert (await Grading(pool).grade(MATH, sample("it is 4", 4), timeout_s=30)).score == 1.0
        await pool.close()
        assert worker_pids() == []

    run_on_uvloop(work)


DAEMON = """
import asyncio
from evald.evals.graders import Rules, Sample
from evald.evals.grading import Grading
from evald.evals.worker_pool import WorkerPool
async def main():
    pool = WorkerPool()
    await Grading(pool).grade(Rules("regex", "."), Sample(response="1", label=1), timeout_s=30)
    print("graded", flush=True)
    hostile = Sample(response="a" * 60 + "b", label=1)
    await Grading(pool).grade(Rules("regex", "^(a+)+$"), hostile, timeout_s=600)
asyncio.run(main())
"""


def test_workers_die_with_a_daemon_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"graded\n"
        time.sleep(0.3)
        (worker,) = worker_pids(daemon.pid)
        daemon.kill()
        daemon.wait()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{worker}").exists()


def test_a_worker_of_another_parent_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evald.evals.worker", "1"], input=b"", check=False, timeout=30
    )
    assert done.returncode == 1


def test_signals_to_the_whole_group_cost_no_grade() -> None:
    command = [sys.executable, "-m", "evald.evals.worker", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert len(worker.stdout.read(4)) == 4
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        worker.stdin.write(frame(Order(1, GradeJob.of(Rules("exact"), sample("1", "1")))))
        worker.stdin.close()
        assert b"answer: 1" in worker.stdout.read()
        assert worker.wait(timeout=30) == 0


def test_grading_is_not_given_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_BROKEN_S", 0.2)

    async def work() -> None:
        pool = WorkerPool()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            for _ in range(3):
                with pytest.raises(GraderFailed):
                    await Grading(pool).grade(MATH, sample("1", 1), timeout_s=5)
        await asyncio.sleep(0.3)
        assert (
            await Grading(pool).grade(Rules("regex", "."), sample("1", 1), timeout_s=30)
        ).score == 1.0
        await pool.close()

    asyncio.run(work())
