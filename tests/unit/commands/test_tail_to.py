"""``evald tail --to``: what the command itself adds to the sinks."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path

import pytest
from sink_cases import Book, ended

from evald import cli
from evald.commands import tail
from evald.errors import EvaldError


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path / "results")
    book.add(ended(1, a=0.5), ended(1, run="other", a=0.75))
    return book


def call(*argv: object) -> int:
    return cli.main(["tail", *(str(word) for word in argv)])


def test_it_delivers_and_goes_on_where_it_stopped(
    book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows"
    words = (book.path.parent, "--to", "jsonl", "--dir", rows, "--once")
    assert call(*words, "--run", "demo") == 0
    assert capsys.readouterr() == ("", "evald: 1 row delivered\n")
    assert call(*words) == 0
    assert capsys.readouterr().err == "evald: 1 row delivered\n"
    assert json.loads((rows / "other.jsonl").read_text())["eval/a"] == 0.75


def test_a_ledger_that_does_not_exist_yet_is_waited_for_until_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows" / "demo.jsonl"
    found: list[bool] = []

    def write_and_stop() -> None:
        Book(tmp_path / "results").add(ended(1, a=0.5))
        stop = threading.Event()
        for _ in range(500):
            found[:] = [rows.exists()]
            if found[0]:
                break
            stop.wait(0.02)
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Timer(0.2, write_and_stop)
    thread.start()
    assert call(tmp_path / "results", "--to", "jsonl") == 0
    thread.join()
    assert found == [True]
    waited = f"evald: {tmp_path}/results/results.jsonl does not exist yet\n"
    assert capsys.readouterr().err == f"{waited}evald: 1 row delivered\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--project", "p"), "--project wants --to"),
        (("--dir", "d"), "--dir wants --to"),
        (("--to", "jsonl", "--mode", "offline"), "--mode wants --to wandb"),
        (("--to", "jsonl", "--samples", "3"), "--samples does not go with --to jsonl"),
        (("--to", "wandb", "--id", "x"), "--id and --name want --run"),
        (("--to", "jsonl", "--after", "3"), "--after does not go with --to"),
        (("--to", "wandb", "--samples", "0"), "argument --samples: invalid"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        call("results", *words)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sink", "module", "sentence"),
    [
        ("wandb", "wandb", "cannot log to W&B: .*pip install 'evald\\[wandb\\]'"),
        ("tensorboard", "tensorboard.compat.proto", "pip install 'evald\\[tensorboard\\]'"),
    ],
)
def test_a_missing_extra_is_named(
    sink: str, module: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    parser = argparse.ArgumentParser()
    tail.configure(parser)
    with pytest.raises(EvaldError, match=sentence):
        tail.run(parser.parse_args([str(tmp_path), "--to", sink, "--once"]))
