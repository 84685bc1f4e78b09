"""Engine processes with real SGLang: a launch that proves itself, and ends that leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from evald.config import Fleet
from evald.engines import guard, leftovers
from evald.engines.environment import engine_env
from evald.engines.flags import LaunchCommand, launch_command
from evald.engines.plan import engine_plan
from evald.engines.ports import free_port, is_free
from evald.engines.process import EngineProcess

#: a daemon that does nothing but hold one engine: EnvJSON, log file, then the engine's argv.
DAEMON = """
import asyncio, json, sys
from pathlib import Path
import uvloop
from evald.engines.process import EngineProcess

async def main():
    env, log, *argv = sys.argv[1:]
    engine = await EngineProcess.start(argv, json.loads(env), Path(log), name="e0")
    print("engine", engine.pid, flush=True)
    await asyncio.sleep(600)

uvloop.run(main())
"""


def command(model: Path, directory: Path) -> tuple[LaunchCommand, int, str]:
    port, nonce = free_port(), secrets.token_hex(8)
    fleet = Fleet(model=str(model), device="cpu", engines=1)
    launch = launch_command(
        fleet,
        engine_plan(fleet)[0],
        port=port,
        nonce=nonce,
        config_file=directory / "sglang.yaml",
        env=engine_env(fleet, os.environ),
    )
    launch.write_config_file()
    return launch, port, nonce


def living(pids: set[int]) -> set[int]:
    stats = {pid: guard.read_stat(pid) for pid in pids}
    return {pid for pid, stat in stats.items() if stat is not None and stat.state != "Z"}


def children_of(pid: int, timeout_s: float = 100) -> set[int]:
    """Wait for the launcher's children (scheduler, detokenizer): the hardest moment to stop at."""
    deadline = time.monotonic() + timeout_s
    while len(below := guard.descendants(pid)) < 2:
        assert time.monotonic() < deadline, "the launcher started no children"
        time.sleep(0.05)
    return {pid, *below}


def gone_within(pids: set[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while living(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def command_lines(pids: set[int]) -> list[bytes]:
    lines = []
    for pid in pids:
        # Libraries run short-lived programs at start-up.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return lines


async def ask(session: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    async with session.request(method, path, json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.text()


async def wait_ready(session: aiohttp.ClientSession, engine: EngineProcess, nonce: str) -> None:
    deadline = time.monotonic() + 100
    while True:
        assert not engine.exited.is_set(), engine.log_path.read_text()[-2000:]
        assert time.monotonic() < deadline, engine.log_path.read_text()[-2000:]
        try:
            status, info = await ask(session, "/model_info")
            if status == 200 and (await ask(session, "/health_generate"))[0] == 200:
                assert info["weight_version"] == nonce
                return
        except aiohttp.ClientConnectionError:
            pass  # does not listen yet
        await asyncio.sleep(0.3)


async def test_launch_prove_and_stop(tiny_model: Path, tmp_path: Path) -> None:
    launch, port, nonce = command(tiny_model, tmp_path)
    engine = await EngineProcess.start(launch.argv, launch.env, tmp_path / "1.log", name="e0")
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=30)
    key = {"Authorization": f"Bearer {launch.api_key}"}
    async with (
        aiohttp.ClientSession(url, headers=key, timeout=timeout) as session,
        aiohttp.ClientSession(url, timeout=timeout) as stranger,
    ):
        try:
            await wait_ready(session, engine, nonce)
            launch.config_file.unlink()  # it has been read
            pids = {engine.pid, *guard.descendants(engine.pid)}
            assert len(pids) >= 3
            assert engine._guard.pid in guard.descendants(os.getpid())
            assert launch.api_key.encode() not in b"".join(command_lines(pids))
            generate = {
                "input_ids": [65, 66],
                "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
            }
            update = {
                "model_path": str(tiny_model),
                "weight_version": "pinned",
                "load_format": "auto",
            }
            for path, body in (
                ("/generate", generate),
                ("/update_weights_from_disk", update),
                ("/weights_checker", {"action": "checksum"}),
                ("/model_info", None),
            ):
                assert (await ask(stranger, path, body))[0] == 401
                status, answer = await ask(session, path, body)
                assert status == 200, answer
            assert answer["weight_version"] == "pinned"
            await engine.stop(20)
        finally:
            await engine.stop(0)
    assert engine.returncode == 0
    assert not living(pids)
    assert leftovers.group_members(engine.pid) == []


def test_nothing_outlives_a_killed_daemon(tiny_model: Path, tmp_path: Path) -> None:
    launch, _, _ = command(tiny_model, tmp_path)
    log_path = tmp_path / "1.log"
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, json.dumps(launch.env), str(log_path), *launch.argv],
        stdout=subprocess.PIPE,
        text=True,
    )
    with daemon:
        assert daemon.stdout is not None
        lines = iter(daemon.stdout.readline, "")
        pid = next(int(line.split()[1]) for line in lines if line.startswith("engine"))
        try:
            children_of(pid)
            pids = set(guard.descendants(daemon.pid))
            assert pid in pids
        finally:
            daemon.kill()
        assert gone_within(pids, 10)
        assert leftovers.group_members(pid) == []
    # The file stays: only a process that is the recorded one would be killed for it.
    assert leftovers.pid_file(log_path).exists()
    assert leftovers.reap_leftovers(tmp_path) == []


@pytest.mark.parametrize("end", ["stop", "death of the guard"])
async def test_ends_during_start_up(tiny_model: Path, tmp_path: Path, end: str) -> None:
    launch, _, _ = command(tiny_model, tmp_path)
    engine = await EngineProcess.start(launch.argv, launch.env, tmp_path / "1.log", name="e0")
    try:
        pids = await asyncio.to_thread(children_of, engine.pid)
        async with asyncio.timeout(30):
            if end == "stop":
                await engine.stop(5)
            else:
                os.kill(engine._guard.pid, signal.SIGKILL)
                assert await engine.wait() == -signal.SIGKILL
                await engine.stop(0)
        assert not living(pids)
    finally:
        await engine.stop(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_port_in_use_is_not_free(host: str) -> None:
    port = free_port()
    assert is_free(port)
    with socket.create_server((host, port)):
        assert not is_free(port)
    assert is_free(port)
