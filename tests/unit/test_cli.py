"""The command line: parsing, exit codes, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evald.cli import main
from evald.testing import write_base_model


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from evald.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'uvloop', 'msgspec', 'structlog', 'tokenizers', 'torch', 'jinja2'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("run", "check", "eval", "status", "regrade", "push", "tail", "wait", "demo"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize(
    "command", ["run", "check", "eval", "status", "regrade", "push", "tail", "wait", "demo"]
)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert command in capsys.readouterr().out


def test_a_bad_config_is_exit_code_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[staging]\nroot = '/dev/shm/x'\nkep = 3\n")
    for command in ("check", "run"):
        assert main([command, str(config)]) == 78
        assert "staging.kep: unknown key; did you mean 'keep'?" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evald.config_load.load_config", interrupted)
    assert main(["check", "c.toml"]) == 130


def test_check_speaks_to_a_person_alone(tmp_path: Path) -> None:
    write_base_model(tmp_path / "base")
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=", "label": 2}\n')
    (tmp_path / "c.toml").write_text(
        "[staging]\nroot = 'root'\n[results]\ndir = 'out'\n"
        "[fleet]\nmodel = 'base'\ndevice = 'cpu'\n[[eval]]\nname = 'q'\npath = 'q.jsonl'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "evald", "check", "c.toml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "eval set q: 1 questions" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "config is good"
    assert not any(line.startswith("{") for line in done.stdout.splitlines())
    for words in (["c.toml"], ["none.toml"]):  # such as ``2>&1 | head``
        assert _unread(["check", *words], tmp_path) == 141


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "2>&-", "0<&- 2>&-", "1>&-"])
def test_it_works_without_standard_streams(tmp_path: Path, closed: str) -> None:
    """What it opens and starts takes no place of theirs, and words for a closed one are lost."""
    code = (
        "import os, subprocess, sys\n"
        "from evald import cli\n"
        "def see(_argv):\n"
        "    print('out'); print('err', file=sys.stderr); sys.stdin.read()\n"
        "    kinds = [os.fstat(number) for number in range(3)]\n"
        "    subprocess.run(['sh', '-c', 'echo out; echo err >&2; cat'], check=True)\n"
        "    return 7\n"
        "cli._main = see\n"
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == ("" if "1>" in closed else "out\nout\n")


def _unread(words: list[str], where: Path) -> int:
    """Run a command of which nobody reads a word; what it says of that at its end is an error."""
    code = "import sys; from evald.cli import main; sys.exit(main(sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        command = [sys.executable, "-c", code, *words]
        return subprocess.call(command, stdout=nobody, stderr=nobody, cwd=where, timeout=30)


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 2
