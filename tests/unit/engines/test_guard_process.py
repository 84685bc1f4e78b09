"""EngineProcess: what the daemon does with a guard, on both event loops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from process_tree import Tree, is_alive, wait_until

from evald.engines import guard, leftovers, process
from evald.engines.process import EngineProcess
from evald.errors import EvaldError

ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(coroutine)

    return run


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    tree.clean_up()


async def started(tree: Tree, *behaviour: str) -> EngineProcess:
    log_path = tree.script.with_name("engine.log")
    engine = await EngineProcess.start(tree.argv(*behaviour), ENV, log_path, name="e0")
    await asyncio.to_thread(tree.wait_started)
    return engine


async def within(awaitable: Awaitable[Any], timeout_s: float = 20) -> Any:
    async with asyncio.timeout(timeout_s):
        return await awaitable


def test_life_of_an_engine(run: Run, tree: Tree) -> None:
    async def body() -> None:
        engine = await started(tree, "polite", "children")
        assert engine.pid == tree.pids()["launcher"]
        before = (engine.returncode, engine.exited.is_set())
        assert before == (None, False)
        pid_file = leftovers.pid_file(engine.log_path)
        assert pid_file.exists()
        await within(engine.stop(30))
        assert await within(engine.wait()) == engine.returncode == 0
        assert engine.exited.is_set()
        assert tree.is_gone()
        assert not pid_file.exists()
        await within(engine.stop(0))
        engine.kill()
        engine.kill()

    run(body())


def test_environment_is_exactly_the_given_one(run: Run, tree: Tree) -> None:
    async def body() -> None:
        log_path = tree.script.with_name("env.log")
        engine = await EngineProcess.start(["/usr/bin/env"], ENV, log_path, name="e0")
        assert await within(engine.wait()) == 0
        await within(engine.stop(0))
        assert log_path.read_text().splitlines() == ["PATH=/usr/bin:/bin", "LANG=C.UTF-8"]

    run(body())


def test_exit_of_the_launcher(run: Run, tree: Tree) -> None:
    async def body() -> None:
        engine = await started(tree, "children", "exit3")
        assert await within(engine.wait()) == 3
        await within(engine.stop(30))
        assert tree.is_gone()

    run(body())


def test_stubborn_engine_is_killed_after_the_grace(run: Run, tree: Tree) -> None:
    async def body() -> None:
        engine = await started(tree, "stubborn", "children")
        await within(asyncio.gather(engine.stop(60), engine.stop(0.2)))
        assert engine.returncode == -signal.SIGKILL
        assert tree.is_gone()

    run(body())


def test_kill_needs_no_event_loop(run: Run, tree: Tree) -> None:
    async def body() -> None:
        engine = await started(tree, "stubborn", "children")
        engine.kill()
        assert wait_until(tree.is_gone)  # blocks the loop on purpose
        await within(engine.stop(0))
        assert engine.returncode == -signal.SIGKILL

    run(body())


def test_death_of_the_guard(run: Run, tree: Tree) -> None:
    async def body() -> None:
        engine = await started(tree, "stubborn", "children")
        os.kill(engine._guard.pid, signal.SIGKILL)
        assert await within(engine.wait()) == -signal.SIGKILL
        await within(engine.stop(30))
        assert leftovers.group_members(engine.pid) == []
        # What leaves the group as well is out of reach when the guard is gone.
        outside = tree.pids()["session"]
        assert is_alive(outside)
        os.kill(outside, signal.SIGKILL)

    run(body())


def test_death_of_the_guard_leaves_no_shared_memory(run: Run, tree: Tree, tmp_path: Path) -> None:
    ours = Path(f"/dev/shm/sglang_loads_{os.getpid()}_{tmp_path.name}.shm")

    async def body() -> None:
        engine = await started(tree, "memory", str(ours))
        async with asyncio.timeout(30):
            while not engine._memory:
                await asyncio.sleep(0.01)
        os.kill(engine._guard.pid, signal.SIGKILL)
        await within(engine.wait())
        await within(engine.stop(0))

    try:
        run(body())
        assert not ours.exists()
    finally:
        ours.unlink(missing_ok=True)


def test_stuck_guard_is_replaced(run: Run, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KILL_TIMEOUT_S", 0.3)

    async def body() -> None:
        engine = await started(tree, "stubborn")
        os.kill(engine._guard.pid, signal.SIGSTOP)
        await within(engine.stop(0.1))
        assert engine.returncode == -signal.SIGKILL
        assert tree.is_gone()

    run(body())


def test_survivors_are_an_error(run: Run, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        engine = await started(tree)
        monkeypatch.setattr(leftovers, "group_members", lambda _group: [4711])
        monkeypatch.setattr(process, "KILL_TIMEOUT_S", 0.1)
        os.kill(engine._guard.pid, signal.SIGKILL)
        with pytest.raises(EvaldError, match=f"group {engine.pid} survive SIGKILL"):
            await within(engine.stop(0))

    run(body())


def test_what_cannot_be_started(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        start = EngineProcess.start
        with pytest.raises(EvaldError, match="cannot start engine e0: cannot execute /nowhere/x"):
            await start(["/nowhere/x"], ENV, tmp_path / "log", name="e0")
        with pytest.raises(EvaldError, match=r"cannot write the log .*No such file or directory"):
            await start(["/bin/true"], ENV, tmp_path / "no" / "log", name="e0")
        monkeypatch.setattr(guard, "__file__", str(tmp_path / "no.py"))
        with pytest.raises(EvaldError, match="cannot start engine e0: its guard ended"):
            await start(["/bin/true"], ENV, tmp_path / "log", name="e0")
        silent = tmp_path / "silent.py"
        silent.write_text("import sys; sys.stdin.read()")
        monkeypatch.setattr(guard, "__file__", str(silent))
        monkeypatch.setattr(process, "GUARD_START_TIMEOUT_S", 0.2)
        with pytest.raises(EvaldError, match="cannot start engine e0: its guard was silent"):
            await start(["/bin/true"], ENV, tmp_path / "log", name="e0")

    run(body())


def test_guard_that_cannot_be_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        pipes: list[int] = []

        def pipe() -> tuple[int, int]:
            ends = os.pipe2(os.O_CLOEXEC)
            pipes.extend(ends)
            return ends

        monkeypatch.setattr(os, "pipe", pipe)
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(FileNotFoundError):
            await EngineProcess.start(["/bin/true"], ENV, tmp_path / "log", name="e0")
        for end in pipes[:2]:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(end)

    run(body())


def test_cancelled_start_leaves_nothing(run: Run, tree: Tree) -> None:
    async def body() -> None:
        log_path = tree.script.with_name("engine.log")
        argv = tree.argv("stubborn", "children")
        others = set(guard.descendants(os.getpid()))  # of tests before this one
        cancelled = 0
        for delay_s in (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06):
            start = asyncio.create_task(EngineProcess.start(argv, ENV, log_path, name="e0"))
            await asyncio.sleep(delay_s)
            start.cancel()
            try:
                engine = await within(start)
            except asyncio.CancelledError:
                cancelled += 1
            else:
                await within(engine.stop(0))
        assert cancelled
        # a guard whose own start was cancelled ends by itself, when its pipe does
        async with asyncio.timeout(30):
            while not set(guard.descendants(os.getpid())) <= others:
                await asyncio.sleep(0.01)
        assert tree.is_gone()

    run(body())
