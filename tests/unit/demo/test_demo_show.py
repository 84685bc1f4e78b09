"""The whole show with small scripts in place of evald and the trainer."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from demo_stage import Stage

from evald.cli import main
from evald.commands import demo as command
from evald.demo import show as shows
from evald.demo.layout import DemoError, Layout
from evald.demo.show import EXIT_INTERRUPTED, Commands, Options, show

NAMES = ("copy", "reverse", "sort", "max", "add")
#: plays the trainer: publishes step 2 and ends.
TRAINER = """
import json, time
for event in ({"event": "progress", "step": 1, "loss": 2.0, "seconds": 0.1},
              {"event": "published", "step": 2}, {"event": "end", "step": 2}):
    print(json.dumps(event), flush=True)
"""
#: plays evald: writes one terminal record into the ledger once the training has ended.
EVALD = """
import json, os, pathlib, time
log = pathlib.Path(os.environ["EVALD_DEMO_DIR"], "train.log")
while not (log.exists() and '"end"' in log.read_text()):
    time.sleep(0.05)
ledger = pathlib.Path(os.environ["EVALD_DEMO_DIR"], "results", "results.jsonl")
ledger.parent.mkdir(parents=True)
metrics = {{f"eval/{{name}}": {score} for name in {names}}}
record = dict(schema=1, seq=1, time=1.0, type="point", run="demo", step=2, revision=0,
              record_id="demo/step/2/r0", outcome="ok", metrics=metrics)
ledger.write_text(json.dumps(record) + "\\n")
"""
SLEEP = "import time; time.sleep(60)"


def scripts(**code: str) -> Commands:
    """Make command lines of scripts; what is not named ends well at once."""
    return Commands(
        **{
            name: [sys.executable, "-c", code.get(name, "pass")]
            for name in ("base", "evald", "train")
        }
    )


def evald_script(score: float) -> str:
    return EVALD.format(score=score, names=NAMES)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(
        config=tmp_path / "demo.toml", directory=tmp_path / ".demo", root=tmp_path / "root"
    )


OPTIONS = Options(steps=2, every=2)


def test_success(layout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"import pathlib; pathlib.Path({str(layout.base)!r}).mkdir()"
    commands = scripts(base=base, evald=evald_script(0.9), train=TRAINER)
    assert show(OPTIONS, layout, commands) == 0
    said = capsys.readouterr().out
    assert "1 snapshots, 1 points ended; the mean went from 0.900 to 0.900" in said
    assert f"ledger    {layout.ledger}" in said
    assert "fell short" not in said
    assert layout.ledger.exists()
    assert (layout.data / "add.jsonl").exists()
    assert not layout.root.exists()
    assert not layout.base.exists()


def test_files_stay_when_asked(layout: Layout) -> None:
    options = Options(steps=2, every=2, keep_files=True)
    assert show(options, layout, scripts(evald=evald_script(0.9), train=TRAINER)) == 0
    assert layout.root.exists()


def test_falling_short_is_said_and_fails(
    layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(OPTIONS, layout, scripts(evald=evald_script(0.5), train=TRAINER)) == 1
    assert "fell short: the last mean is 0.500, below 0.85" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["base", "evald", "train"])
def test_a_child_that_fails_ends_the_demo_with_its_last_words(layout: Layout, name: str) -> None:
    code = {"evald": SLEEP, "train": SLEEP, name: "print('no luck'); raise SystemExit(7)"}
    if name == "base":
        code = {"base": code["base"]}
    with pytest.raises(DemoError, match=rf"{name} ended with exit code 7; .*\n +no luck"):
        show(OPTIONS, layout, scripts(**code))
    assert not layout.root.exists()


def test_evald_that_stops_early_is_a_fault(layout: Layout) -> None:
    with pytest.raises(DemoError, match="evald stopped before the training ended"):
        show(OPTIONS, layout, scripts(train=SLEEP))


def test_the_demo_has_a_deadline(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shows, "DEADLINE_S", 1.0)
    with pytest.raises(DemoError, match="did not end within 1 s"):
        show(OPTIONS, layout, scripts(evald=SLEEP, train=SLEEP))


def note_pid(pids: Path) -> str:
    return f"import os; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); "


def interrupt_when_up(pids: Path, number: signal.Signals) -> threading.Thread:
    """Send ``number`` to this process as soon as two children have noted their ids."""

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if pids.exists() and pids.read_text().count("\n") == 2:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_stops_the_children(
    layout: Layout, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = layout.directory / "pids"
    code = note_pid(pids) + SLEEP
    thread = interrupt_when_up(pids, number)
    assert show(OPTIONS, layout, scripts(evald=code, train=code)) == EXIT_INTERRUPTED
    thread.join()
    assert "interrupted" in capsys.readouterr().out
    for pid in pids.read_text().split():
        assert not Path("/proc", pid).exists()
    assert not layout.root.exists()


def test_a_closed_pipe_ends_the_demo(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            if "started" in self.getvalue():
                raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    assert show(OPTIONS, layout, scripts(evald=SLEEP, train=SLEEP)) == EXIT_INTERRUPTED
    assert not layout.root.exists()


def test_who_does_not_stop_is_killed_and_named(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shows, "STOP_GRACE_S", 0.3)
    pids = layout.directory / "pids"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    thread = interrupt_when_up(pids, signal.SIGTERM)
    commands = scripts(evald=deaf + note_pid(pids) + SLEEP, train=note_pid(pids) + SLEEP)
    assert show(OPTIONS, layout, commands) == EXIT_INTERRUPTED
    thread.join()
    assert "evald did not stop within 0.3 s and was killed" in capsys.readouterr().out


def test_engines_that_stay_are_named(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shows, "GONE_TIMEOUT_S", 0.2)
    stage = Stage(tmp_path / "stage")
    stage.shows(engine_pid=os.getpid())
    status = stage.layout.status
    write = (
        "import os, pathlib, shutil; "
        "board = pathlib.Path(os.environ['EVALD_DEMO_ROOT'], '.evald'); board.mkdir(); "
        f"shutil.copy({str(status)!r}, board)"
    )
    with pytest.raises(DemoError, match=f"engine processes are still there: {os.getpid()}"):
        show(OPTIONS, layout, scripts(evald=write, train=TRAINER))


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def record(options: Options) -> int:
        seen.append(options)
        return 5

    monkeypatch.setattr(shows, "show", record)
    assert main(["demo", "--steps", "9", "--every", "3", "--keep-files"]) == 5
    assert seen == [Options(steps=9, every=3, keep_files=True)]
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "0"])
    assert command.__doc__


def test_real_commands_are_this_checkout_s() -> None:
    layout = Layout.find({})
    commands = Commands.of(layout, Options())
    assert commands.evald[1:] == ["-m", "evald", "run", str(layout.config), "--exit-on-run-end"]
    assert commands.base[2] == "evald.demo.model"
    assert commands.train[2:5] == ["evald.demo.train", "--base", str(layout.base)]
