import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from evald.commands import status, tail, wait
from evald.config import Config, Fleet, Results, Staging
from evald.point import Kind, Outcome
from evald.results import locate
from evald.results.records import Alert, PointRecord
from evald.status.view import (
    EngineView,
    PointView,
    RegradeView,
    SetView,
    StagingView,
    StatusView,
)


def call(command: ModuleType, *argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return int(command.run(parser.parse_args([str(word) for word in argv])))


def point(step: int, outcome: Outcome = Outcome.OK, reason: str = "", detail: str = "") -> bytes:
    record = PointRecord(
        seq=step,
        run="a",
        step=step,
        record_id=f"a/step/{step}/r0",
        outcome=outcome,
        reason=reason,
        detail=detail,
    )
    return msgspec.json.encode(record) + b"\n"


OTHER = (
    msgspec.json.encode(Alert(seq=9, run="a", step=0, record_id="x", name="n", detail="d"))
    + b'\n{"schema":1,"seq":10,"type":"future"}\nno json\n'
)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def later(action: Callable[[], object], delay_s: float = 0.3) -> threading.Timer:
    timer = threading.Timer(delay_s, action)
    timer.start()
    return timer


# --- wait


def test_wait_is_content_with_exactly_n(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.write_bytes(point(1) + OTHER + point(2, Outcome.SKIPPED, "busy"))
    assert call(wait, ledger.parent, "--points", 2, "--settle", 0) == 0
    assert capsys.readouterr().out == "2 points have ended: 1 ok, 1 skipped\n"


def test_wait_for_none(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(wait, ledger, "--points", 0, "--settle", 0) == 0
    assert capsys.readouterr().out == "0 points have ended: none\n"


def test_wait_waits(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = later(lambda: ledger.write_bytes(point(1)))
    begun_s = time.monotonic()
    assert call(wait, ledger, "--points", 1, "--ok", "--settle", 0.2, "--timeout", 20) == 0
    assert time.monotonic() - begun_s >= 0.5
    assert capsys.readouterr().out == "1 point has ended: 1 ok\n"
    timer.join()


def test_wait_refuses_more_than_n(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.write_bytes(point(1) + point(2) + point(3))
    assert call(wait, ledger, "--points", 1) == 1
    assert capsys.readouterr().err == (
        "evald: 3 points have ended, expected exactly 1: a/step/2/r0, a/step/3/r0 too many\n"
    )


def test_wait_sees_one_too_many_while_it_settles(ledger: Path) -> None:
    ledger.write_bytes(point(1))
    timer = later(lambda: ledger.write_bytes(point(1) + point(2)))
    assert call(wait, ledger, "--points", 1, "--settle", 20) == 1
    timer.join()


def test_the_same_point_ended_twice_counts_twice(ledger: Path) -> None:
    ledger.write_bytes(point(1) + point(1))
    assert call(wait, ledger, "--points", 1) == 1


def test_wait_ok_fails_at_once_and_says_why(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.write_bytes(
        point(1) + point(2, Outcome.SKIPPED, "busy", "too many") + point(3, Outcome.PARTIAL)
    )
    assert call(wait, ledger, "--points", 9, "--ok") == 1
    assert capsys.readouterr().err == (
        "evald: not every point is ok: a/step/2/r0 is skipped busy (too many); "
        "a/step/3/r0 is partial\n"
    )


def test_wait_times_out(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.write_bytes(point(1))
    assert call(wait, ledger, "--points", 2, "--timeout", 0.2) == 3
    assert "1 of 2 points have ended after 0.2 s in" in capsys.readouterr().err


def test_wait_begins_again_with_a_new_ledger(ledger: Path) -> None:
    ledger.write_bytes(point(1))

    def replace() -> None:
        ledger.unlink()
        ledger.write_bytes(point(2) + point(3))

    timer = later(replace)
    assert call(wait, ledger, "--points", 2, "--settle", 0, "--timeout", 20) == 0
    timer.join()


def test_wait_needs_a_count_that_can_be() -> None:
    with pytest.raises(SystemExit) as stop:
        call(wait, "x", "--points", "-1")
    assert stop.value.code == 2


def test_wait_is_interrupted(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_delay_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert call(wait, ledger, "--points", 1) == 130


# --- tail


def test_tail_once_prints_records_after_a_seq(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tail, ledger, "--once") == 0
    assert capsys.readouterr().err == f"evald: {ledger} does not exist yet\n"
    ledger.write_bytes(point(1) + point(2) + OTHER + b"{torn")
    assert call(tail, ledger.parent, "--once", "--after", 1) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert printed.encode() == point(2) + OTHER.removesuffix(b"no json\n")


def test_a_config_names_its_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = Config(
        staging=Staging(root="/r"),
        results=Results(dir=str(tmp_path)),
        fleet=Fleet(model="m"),
        eval=[],
    )
    monkeypatch.setattr(locate, "load_config", lambda _path: config)
    assert locate.results_file("demo.toml") == tmp_path / "results.jsonl"


def test_a_file_is_meant_as_one_whatever_its_name(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.touch()
    assert locate.results_file(str(copy)) == copy
    assert locate.results_file(str(tmp_path)) == tmp_path / "results.jsonl"
    assert locate.results_file("missing/x.jsonl") == Path("missing/x.jsonl")


# --- status


VIEW = StatusView(
    version="0.1",
    pid=42,
    beat=7,
    time=1.0,
    uptime_s=3725.0,
    state="serving",
    run="demo",
    results="/results/" + "long/" * 30,
    cap=2,
    queued=[PointView(run="demo", step=80, revision=1, kind="step", state="queued", since_s=75)],
    running=[
        PointView(
            run="demo",
            step=40,
            revision=0,
            kind=Kind.STEP,
            state="evaluating",
            since_s=12.0,
            sets=[
                SetView(name="copy", done=50, total=100, score=0.25),
                SetView(name="sort", done=0, total=0),
            ],
        )
    ],
    ended={"ok": 3, "partial": 0, "skipped": 1},
    engines=[
        EngineView(
            name="engine-0",
            state="serving",
            weight_version="demo:40:abcdef01:x",
            in_flight=8,
            restarts=2,
            detail="restarted",
        ),
        EngineView(name="engine-1", state="starting"),
    ],
    staging=StagingView(root="/staging", used_bytes=3 << 20, free_bytes=5 << 40, snapshots=2),
    regrades=[
        RegradeView(ticket="a", run="demo", state="done", points=9),
        RegradeView(ticket="b", run="demo", points=7, points_done=2, samples=40, samples_done=30),
    ],
    last_seq=9,
)


def test_status_shows_everything_that_matters() -> None:
    text = "\n".join(status.render(VIEW))
    for part in (
        "serving  run demo  pid 42  up 1h02m",
        "2 snapshots, 3.0 MiB used, 5.0 TiB free",
        "3 ok, 0 partial, 1 skipped",
        "engine-0   serving        8 in flight  demo:40:abcdef01:x  2 restarts  restarted",
        "engine-1   starting       0 in flight  -",
        "running (1 of 2)",
        "step 40        evaluating  12s",
        "##########..........     50/100  score 0.250",
        "....................      0/0",
        "queued (1)",
        "step 80 r1     queued      1m15s",
        "regrade  run demo: 2 of 7 points, and 30 of 40 samples of the next one",
    ):
        assert part in text
    assert text.count("regrade") == 1


def test_an_idle_status_is_short_and_whole() -> None:
    idle = msgspec.structs.replace(
        VIEW, queued=[], running=[], ended={}, engines=[], staging=None, regrades=[], results="/r"
    )
    assert status.render(idle) == [
        "evald 0.1  serving  run demo  pid 42  up 1h02m",
        "results  /r (seq 9)",
        "ended    none",
        "engines  none",
        "running (0 of 2)",
        "queued (0)",
    ]


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (7 << 30, "7.0 GiB")]
)
def test_sizes_are_readable(n_bytes: int, text: str) -> None:
    assert status._size(n_bytes) == text
