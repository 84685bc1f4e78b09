"""What others may see of a daemon, and what names and files from outside can do to it.

Tested elsewhere: the token of TCP in ``test_status_tcp`` and ``unit/status/test_listen``, deletions
in ``unit/staging/test_inside``, chat templates in ``unit/evals``, more names in ``unit/staging``.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Rig, rig, until

from evald.engines.guard import descendants
from evald.results.records import Alert
from evald.testing import write_fake_python, write_snapshot

TOKEN = "status-token-0123456789abcdef"  # noqa: S105 - a test's
SECRETS = {
    "WANDB_API_KEY": "wandb-key-of-the-user",
    "AWS_SECRET_ACCESS_KEY": "cloud-key-of-the-user",
    "HF_TOKEN": "hub-token-of-the-user",
    "SGLANG_ADMIN_TOKEN": "token-with-an-allowed-prefix",
    "UNRELATED": "a-value-that-nobody-asked-for",
}
#: what files that evald makes may be for others.
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A daemon with two engines, TCP with a token, and one point that has ended."""
    work = tmp_path_factory.mktemp("security")
    (work / "token").write_text(TOKEN)
    (work / "token").chmod(0o600)
    with (
        pytest.MonkeyPatch.context() as patch,
        rig(
            work,
            python=write_fake_python(work / "python"),
            fleet="engines = 2",
            status='listen = "127.0.0.1:0"\ntoken_file = "token"',
        ) as made,
    ):
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        made.start()
        write_snapshot(made.root / "step_1", seed=1, answer=7)
        assert made.point(1).outcome == "ok"
        until(lambda: len(api_keys(made)) == 2, "both engines have their files")
        yield made


def api_keys(r: Rig) -> dict[Path, str]:
    """Config files of the engines -> key."""
    found = {}
    for path in (r.work / "results").rglob("*"):
        if path.is_file() and (match := re.search(r"api-key['\"]?: *['\"]?(\w+)", text(path))):
            found[path] = match[1]
    return found


def text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def processes(r: Rig) -> list[int]:
    assert r.daemon is not None
    return [r.daemon.pid, *descendants(r.daemon.pid)]


def engines(r: Rig) -> list[int]:
    """Processes that run a (fake) server."""
    return [pid for pid in processes(r) if b"--weight-version" in cmdline(pid)]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def listening(pid: int) -> list[str]:
    """TCP addresses (as in /proc/net) on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    lines = []
    for table in ("tcp", "tcp6"):
        lines += Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_only_loopback_is_listened_on(node: Rig) -> None:
    addresses = [address for pid in processes(node) for address in listening(pid)]
    assert len(addresses) == 3  # two engines, and the status server that was asked for
    assert set(addresses) == {"0100007F"}


def test_without_being_asked_the_daemon_has_no_tcp(tmp_path: Path) -> None:
    with rig(tmp_path, python=write_fake_python(tmp_path / "python")) as r:
        assert listening(r.start().pid) == []
        assert stat.S_ISSOCK((tmp_path / "evald.sock").stat().st_mode)
        assert (tmp_path / "evald.sock").stat().st_mode & 0o007 == 0


def test_each_launch_has_a_key_of_its_own_in_a_private_file(node: Rig) -> None:
    keys = api_keys(node)
    assert len(set(keys.values())) == 2
    assert all(len(key) >= 32 for key in keys.values())
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def test_secrets_are_in_no_command_line(node: Rig) -> None:
    words = [*api_keys(node).values(), TOKEN, *SECRETS.values()]
    lines = [cmdline(pid) for pid in processes(node)]
    assert len(engines(node)) >= 2
    assert not [word for word in words if any(word.encode() in line for line in lines)]


def test_secrets_are_in_no_ledger_status_or_log(node: Rig) -> None:
    keys = api_keys(node)
    done = node.evald("status", str(node.config), "--json")
    assert done.returncode == 0, done.stderr
    check = node.evald("check", str(node.config))
    shown = {"status": done.stdout, "log": node.log(), "check": check.stdout + check.stderr}
    for place in (node.root / ".evald", node.work / "results"):
        for path in place.rglob("*"):
            if path.is_file() and path not in keys:
                shown[str(path)] = text(path)
    assert len(shown) > 8
    for word in (*keys.values(), TOKEN, *SECRETS.values()):
        assert [name for name, content in shown.items() if word in content] == []


def test_engines_see_an_allowed_environment_only(node: Rig) -> None:
    for pid in engines(node):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        names = {line.partition(b"=")[0].decode() for line in environ.split(b"\0")}
        assert names.isdisjoint(SECRETS)
        assert "PATH" in names


def test_files_are_nobody_elses_to_write(node: Rig) -> None:
    for place in (node.root / ".evald", node.work / "results"):
        for path in (place, *place.rglob("*")):
            mode = path.lstat().st_mode
            assert stat.S_ISLNK(mode) or not mode & _WRITABLE, f"{path} {mode:o}"
    assert node.results.stat().st_mode & 0o777 == 0o644
    assert (node.root / ".evald" / "status.json").stat().st_mode & 0o777 == 0o644
    logs = list((node.work / "results" / "engines").rglob("*.log"))
    assert {path.stat().st_mode & 0o077 for path in logs} == {0}


def test_code_in_a_snapshot_is_not_run(node: Rig) -> None:
    trap = node.work / "trap"
    code = f"open({str(trap)!r}, 'w').close()\nclass Thing: pass\n"
    directory = write_snapshot(node.root / "step_2", seed=2, answer=7, marker=None)
    for name in ("modeling_own", "tokenization_own", "configuration_own", "sitecustomize"):
        (directory / f"{name}.py").write_text(code)
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((directory / name).read_bytes())
        content["auto_map"] = {
            key: "configuration_own.Thing"
            if key == "AutoConfig"
            else ["tokenization_own.Thing"] * 2,
            "AutoModelForCausalLM": "modeling_own.Thing",
        }
        (directory / name).write_text(json.dumps(content))
    (directory / ".complete").touch()
    ended = node.point(2)
    assert (ended.outcome, ended.reason) == ("ok", "")
    assert not trap.exists()


def test_names_from_outside_lead_nowhere(node: Rig) -> None:
    before = {path for path in node.work.rglob("*") if "results" not in path.parts}
    words = {
        "a\x1b[2J\nb.request": {"kind": "reuse", "step": 5},
        "up.request": {"kind": "baseline", "run": "../../up"},
        "step_30.skip": {"reason": "busy\x1b[2J", "detail": "x"},
        "step_31.skip": {"reason": "../x"},
        "step_32.skip": {"reason": "busy", "run": "a/b"},
        "step_33.skip": {"reason": "busy", "detail": "two\nlines \x1b[31m\u202e"},
    }
    for name, content in words.items():
        (node.root / name).write_text(json.dumps(content))
    for name in ("..evil", "\x1b[2J", "-rf", "a b"):
        write_snapshot(node.root / name / "step_34", seed=34, answer=7)
    write_snapshot(node.root / "\x1b[31mred", seed=35, answer=7)
    latin = node.root / os.fsdecode(b"caf\xe9")  # no UTF-8
    latin.mkdir()
    (latin / ".complete").touch()
    escaped = write_snapshot(node.root / "step_36", seed=36, answer=7, marker=None)
    (escaped / ".complete").write_text(json.dumps({"run": "../../up", "step": 36}))
    ended = node.point(36)
    assert ended.reason == "invalid_snapshot"
    assert "'../../up', which cannot be a part of file and metric names" in ended.detail
    assert node.point(33).detail == "two\\nlines \\x1b[31m\\u202e"
    until(lambda: node.log().count("staging_file_ignored") >= 5, "the broken words are told")
    until(lambda: "snapshot_misnamed" in node.log(), "the odd name is told")
    until(lambda: "caf\\\\udce9" in node.log(), "so is one that is not UTF-8")
    steps = {point.step for point in node.points()}
    assert steps - {2} == {1, 33, 36}
    raw = node.results.read_bytes() + node.log().encode()
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw)
    shown = [r.detail for r in node.records() if isinstance(r, Alert)]
    assert all(detail.isprintable() for detail in shown)
    for point in node.points():
        assert all(re.fullmatch(r"[\w/@.+-]+", name) for name in point.metrics)
    samples = node.work / "results" / "samples"
    assert {path.name for path in samples.iterdir()} == {"t"}
    assert {path for path in node.work.rglob("*") if "results" not in path.parts} == before


def test_a_terminal_is_commanded_by_no_name() -> None:
    """The same log on a terminal, where it is not JSON."""
    code = (
        "import structlog; from evald.log import configure_logging\n"
        "configure_logging('info')\n"
        "structlog.get_logger().info('seen', name='\\x1b[2Jevil', detail='a\\nb')\n"
    )
    primary, secondary = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], stderr=secondary, check=True, timeout=60)
        printed = os.read(primary, 10_000)
    finally:
        os.close(primary)
        os.close(secondary)
    assert b"evil" in printed
    assert b"\x1b[2J" not in printed
