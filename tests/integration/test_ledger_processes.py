"""The ledger between processes: one writer, killed at any moment, and readers beside it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from evald.config import Results
from evald.errors import LedgerError
from evald.results.follow import Follower, read_records
from evald.results.ledger import Ledger

WRITER = """
import asyncio, sys
from evald.config import Results
from evald.point import Outcome
from evald.results.ledger import Ledger
from evald.results.records import Accepted, PointRecord

async def main():
    ledger = Ledger.open(Results(dir=sys.argv[1]))
    print("open", flush=True)
    sys.stdin.readline()
    step = ledger.last_seq
    while True:
        step += 1
        name = f"a/step/{step}/r0"
        await ledger.append(Accepted(run="a", step=step, record_id=name + "/accepted",
            directory="/d" * 2000, size_bytes=1, fingerprint="f"))
        print(ledger.last_seq, flush=True)
        await ledger.append(PointRecord(run="a", step=step, record_id=name, outcome=Outcome.OK))
        print(ledger.last_seq, flush=True)

asyncio.run(main())
"""


@contextmanager
def writer(results: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the ledger, and appends once it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(results)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("lifetime_s", [0.05, 0.11, 0.2, 0.31])
def test_kill_9_loses_nothing_that_was_confirmed(tmp_path: Path, lifetime_s: float) -> None:
    with writer(tmp_path) as process:
        go(process)
        time.sleep(lifetime_s)
        process.kill()
        assert process.stdout is not None
        confirmed = [int(line) for line in process.stdout.read().splitlines()]
    ledger = Ledger.open(Results(dir=str(tmp_path)))
    ledger.close()
    assert ledger.last_seq >= (confirmed[-1] if confirmed else 0)
    records = read_records(tmp_path / "results.jsonl")
    assert [record.seq for record in records] == list(range(1, ledger.last_seq + 1))
    assert len(ledger.index.ended_points()) == ledger.last_seq // 2


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    config = Results(dir=str(tmp_path))
    with writer(tmp_path) as process:
        with pytest.raises(LedgerError, match=rf"another evald \(pid {process.pid}\) writes to"):
            Ledger.open(config)
        process.kill()
        process.wait(timeout=20)
        Ledger.open(config).close()


def test_a_reader_beside_the_writer_sees_each_record_once_across_rotation(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    seen: list[bytes] = []
    with Follower(path) as follower:
        for life in range(2):
            with writer(tmp_path) as process:
                go(process)
                deadline_s = time.monotonic() + 20
                count = len(seen) + 20
                while len(seen) < count:
                    assert time.monotonic() < deadline_s
                    seen += follower.read()
                process.kill()
                process.wait(timeout=20)
            if life == 0:
                Ledger.open(Results(dir=str(tmp_path))).close()  # as a restart does
                seen += follower.read()
                first = path.read_bytes().splitlines()
                assert seen == first
                path.rename(tmp_path / "old.jsonl")
        Ledger.open(Results(dir=str(tmp_path))).close()
        seen += follower.read()
    assert seen == first + path.read_bytes().splitlines()
    assert follower.restarts == 1


def evald(*argv: object) -> list[str]:
    # a job in the background of a shell ignores Ctrl-C, and so would whatever it starts
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from evald.cli import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code, *map(str, argv)]


def test_tail_follows_a_live_ledger_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    command = evald("tail", tmp_path, "--after", 2)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tail:
        try:
            assert tail.stdout is not None
            with writer(tmp_path) as process:
                go(process)
                lines = [tail.stdout.readline() for _ in range(3)]
            tail.send_signal(signal.SIGINT)
            _rest, errors = tail.communicate(timeout=20)
        finally:
            tail.kill()
    assert [msgspec.json.decode(line)["seq"] for line in lines] == [3, 4, 5]
    # a hint is all that it may say, if it was there before the ledger
    assert errors in {b"", f"evald: {tmp_path / 'results.jsonl'} does not exist yet\n".encode()}
    assert tail.returncode == 130


@pytest.mark.parametrize("growing", [False, True], ids=["idle", "growing"])
def test_tail_ends_when_its_reader_goes(tmp_path: Path, *, growing: bool) -> None:
    command = evald("tail", tmp_path)
    with (
        writer(tmp_path) as process,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tail,
    ):
        try:
            assert tail.stdout is not None
            go(process)
            tail.stdout.readline()
            if not growing:
                process.kill()
                process.wait(timeout=20)
                newest = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)[-1]
                while tail.stdout.readline() != newest:
                    pass  # nothing is left to print: only the closed pipe can end it
            tail.stdout.close()
            assert tail.wait(timeout=10) == 0
            assert tail.stderr is not None
            assert tail.stderr.read() == b""
        finally:
            tail.kill()
