import asyncio
import contextlib
from collections.abc import Callable

import pytest

from evald.pulse import Pulse
from evald.status import herald
from evald.status.herald import Herald, status_line
from evald.status.view import EngineView, StatusView
from evald.status.watchdog import Watchdog


def view(**fields: object) -> StatusView:
    known: dict[str, object] = {
        "version": "1",
        "pid": 1,
        "beat": 1,
        "time": 1.0,
        "uptime_s": 1.0,
        "state": "serving",
        "run": "a",
        "results": "r",
        "cap": 2,
    }
    return StatusView(**(known | fields))  # type: ignore[arg-type]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []

    def note(message: str) -> bool:
        messages.append(message)
        return True

    monkeypatch.setattr(herald, "notify", note)
    return messages


def herald_of(pulse: Pulse, watchdog_s: float | None = 0.04) -> Herald:
    dog = Watchdog(lambda: [pulse], excuse=str, within_s=60)
    return Herald(view, watchdog=dog, watchdog_s=watchdog_s)


async def run_until(one: Herald, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(one.run())
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_ready_comes_first_and_then_the_watchdog_is_fed(said: list[str]) -> None:
    await run_until(herald_of(Pulse("x")), lambda: len(said) > 3)
    line = "STATUS=serving; 0 of 0 engines ready; 0 running, 0 queued"
    assert said[0] == f"READY=1\n{line}"
    assert set(said[1:]) == {f"WATCHDOG=1\n{line}"}


async def test_it_is_not_fed_while_a_loop_stands_still(said: list[str]) -> None:
    pulse = Pulse("staging")
    pulse.rest("scanning", -1.0)
    one = herald_of(pulse)
    await run_until(one, lambda: len(said) > 2)
    assert said[1] == "STATUS=stuck, staging: 'scanning' since 0 s"
    assert not any("WATCHDOG" in message for message in said)
    pulse.beat()
    await run_until(one, lambda: any("WATCHDOG=1" in message for message in said))


async def test_a_reload_is_begun_and_ended_however_it_goes(said: list[str]) -> None:
    one = herald_of(Pulse("x"))
    with one.reloading():  # while it starts
        pass
    assert said == []
    await run_until(one, lambda: bool(said))
    said.clear()
    with contextlib.suppress(ZeroDivisionError), one.reloading():
        assert said[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
        raise ZeroDivisionError
    assert said[1].startswith("READY=1\nSTATUS=serving")


def test_a_stop_says_how_long_it_may_take(said: list[str]) -> None:
    herald_of(Pulse("x")).stopping(90.5)
    assert said[0].startswith("STOPPING=1\nEXTEND_TIMEOUT_USEC=90500000\n")


def test_the_line_shows_engines_that_come_up_the_disk_and_the_config() -> None:
    states = ["serving", "starting", "starting", "quarantined", "ready"]
    engines = [EngineView(name=f"e{i}", state=state) for i, state in enumerate(states)]
    line = status_line(
        view(
            state="paused",
            engines=engines,
            not_written="cannot write: full\nreally",
            config_fault="needs a restart: fleet.gpus",
        )
    )
    assert line == (
        "paused (cannot write: full\\nreally); 2 of 5 engines ready, 2 starting, 1 quarantined; "
        "0 running, 0 queued; needs a restart: fleet.gpus"
    )
