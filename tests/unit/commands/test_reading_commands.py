import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from evald.commands import tail, wait
from evald.config import Config, Fleet, Results, Staging
from evald.point import Outcome
from evald.results import locate
from evald.results.records import Alert, PointRecord


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
