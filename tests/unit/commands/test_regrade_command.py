"""``evald regrade``: its words, and what it tells of a regrade that a daemon carries out."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from evald.commands import regrade
from evald.status.view import RegradeView


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    regrade.configure(parser)
    return parser.parse_args(list(words))


def test_steps_and_sets_may_be_named_together_or_apart() -> None:
    args = parse("c.toml", "--step", "1", "2", "--step", "-1", "--set", "a", "--set", "b", "c")
    assert (args.step, args.set, args.all) == ([1, 2, -1], ["a", "b", "c"], False)
    assert parse("c.toml", "--all").step is None


@pytest.mark.parametrize("words", [[], ["--step"], ["--all", "--step", "1"], ["--step", "x"]])
def test_what_is_not_clear_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("c.toml", *words)
    assert end.value.code == 2


def test_only_news_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    view = RegradeView(ticket="t", run="r", points=9, said=["one", "two"], n_said=2)
    heard = regrade._tell(view, 0)
    assert capsys.readouterr().out == "one\ntwo\n"
    heard = regrade._tell(view, heard)
    assert capsys.readouterr().out == ""
    view.said, view.n_said = ["five", "six"], 6
    assert regrade._tell(view, heard) == 6
    assert capsys.readouterr().out == ("(2 sentences are only in the daemon's log)\nfive\nsix\n")


def test_a_results_directory_without_a_daemon_is_not_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regrade.run(parse(str(tmp_path), "--all")) == 1
    assert "none is running; name its config, and it needs none" in capsys.readouterr().err
