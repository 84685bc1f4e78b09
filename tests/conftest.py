"""What all tests share."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from browser import chromium
from export_rig import TwoRanks, run_two_ranks
from plain_environ import plain_environ

from evald.engines import readiness, supervision
from evald.engines.state import RestartPolicy
from evald.testing import write_base_model

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background job ignores it, and so would every command that a test interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """A command that a test runs in this process sends logs to that test's own stderr."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines come back at once, and a dead one is waited for a moment only."""
    monkeypatch.setattr(RestartPolicy, "FIRST_S", 0.02)
    monkeypatch.setattr(readiness, "DEATH_NOTICE_S", 0.2)
    monkeypatch.setattr(supervision, "DEATH_NOTICE_S", 0.2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Base model of fake engines: it answers 0."""
    return write_base_model(tmp_path / "base", answer=0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base model of the real engines: Qwen3 in miniature, untrained, with tokenizer and template.

    Built in a process of its own: this one, like the daemon, does without torch.
    """
    directory = tmp_path_factory.mktemp("tiny-model")
    command = [sys.executable, "-m", "evald.demo.model", str(directory)]
    subprocess.run(command, check=True, timeout=100, env=plain_environ())
    return directory


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """A training job of two processes that has exported its weights in every way."""
    return run_two_ranks(tmp_path_factory.mktemp("two-ranks"))


@pytest.fixture(scope="session")
def chromium_url() -> Iterator[str]:
    """A browser for all tests of pages; each opens a tab of its own."""
    with chromium() as url:
        yield url
