"""Every bench has a goal, says how it is run, and stands in the script and in the table."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ

BENCH = Path(__file__).parents[2] / "bench"
#: scripts that print figures under their own name; the other files are parts of these.
BENCHES = sorted(
    path.stem for path in BENCH.glob("*.py") if f'"name": "{path.stem}"' in path.read_text()
)
#: one process for all: most of a bench's start is what it imports.
ASK_ALL = """
import contextlib, io, json, runpy, sys
bench, *names = sys.argv[1:]
sys.path.insert(0, bench)
said = {}
for name in names:
    sys.argv[:] = [name, "--help"]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(f"{bench}/{name}.py", run_name="__main__")
    except SystemExit as end:
        said[name] = [end.code, text.getvalue()]
print(json.dumps(said))
"""


@pytest.mark.parametrize("name", BENCHES)
def test_its_docstring_names_a_goal(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((BENCH / f"{name}.py").read_text())) or ""
    assert re.search(r"\bgoals?\b", docstring, re.IGNORECASE)


def test_all_say_how_they_are_run() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK_ALL, str(BENCH), *BENCHES],
        capture_output=True,
        text=True,
        timeout=100,
        env=plain_environ(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said) == BENCHES
    for name, (code, text) in said.items():
        assert (name, code) == (name, 0)
        assert "usage:" in text


@pytest.mark.parametrize("file", ["run_all.sh", "README.md"])
def test_the_script_and_the_table_have_all_of_them(file: str) -> None:
    assert len(BENCHES) > 10
    words = set(re.findall(r"\w+", (BENCH / file).read_text()))
    assert set(BENCHES) - words == set()


@pytest.mark.parametrize("file", ["run_all.sh", "gpu.sh"])
def test_the_scripts_run_nothing_that_is_not_there(file: str) -> None:
    path = BENCH / file
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
    text = path.read_text()
    run = re.findall(r"^  bench \d+ (\w+)", text, re.MULTILINE)
    run += re.findall(r"bench/(\w+)\.py", text)
    assert run
    assert [name for name in run if name not in BENCHES] == []
    assert path.stat().st_mode & 0o100
