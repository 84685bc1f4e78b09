from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evald.config_load import load_config
from evald.errors import ConfigError
from evald.evals.graders import Grade, GraderFailed, Rules, Sample, grader_version
from evald.evals.grading import Grading
from evald.evals.user_code import unready_graders
from evald.evals.worker_pool import WorkerPool
from evald.preflight import preflight

MODULE = """
import asyncio, os, subprocess, sys, time
print("imported", flush=True)
CALLS = 0
def equal(response, reference, metadata):
    print("noise")
    return response == reference
async def calls(response, reference, metadata):
    global CALLS
    await asyncio.sleep(0)
    CALLS += 1
    return {"score": 1, "answer": str(CALLS), "reason": f"{os.getpid()}"}
def broken(response, reference, metadata):
    raise ValueError("a bad\\nday")
def leaves(response, reference, metadata):
    sys.exit(3)
def spawns(response, reference, metadata):
    subprocess.run(["sh", "-c", f"setsid sleep 300 & echo $! > {response}"])
    time.sleep(300)
def hungry(response, reference, metadata):
    return len(bytearray(1 << 30))
def forks(response, reference, metadata):
    return 1 if response == "fork" and os.fork() == 0 else 0
def reads(response, reference, metadata):
    return len(subprocess.run(["cat"], stdout=subprocess.PIPE).stdout)
def stray(response, reference, metadata):
    from __main__ import Reply, frame
    for pipe in range(3, 10):
        try:
            os.write(pipe, frame(Reply(number=int(response))))
        except OSError:
            pass
    return 1
def sees(response, reference, metadata):
    return {"score": 0, "reason": repr({k: os.environ.get(k) for k in ("MINE", "OTHER")})}
"""


@pytest.fixture
async def grading() -> AsyncIterator[Grading]:
    workers = WorkerPool(size=1)
    environ = {**os.environ, "MINE": "m", "OTHER": "o"}
    made = Grading(workers, environ=environ)
    yield made
    await made.close()
    await workers.close()


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


def python(module: Path, function: str, **config: Any) -> Rules:
    whole = {"function": f"mine:{function}", "cwd": str(module.parent), "concurrency": 1, **config}
    return Rules("python", config=whole)


def command(*argv: str, **config: Any) -> Rules:
    return Rules("command", config={"argv": list(argv), "cwd": "/", **config})


def sample(response: str = "r", label: Any = "r", metadata: Any = None) -> Sample:
    return Sample(response=response, label=label, metadata=metadata, prompt="p?", question="q1")


async def failure(grading: Grading, rules: Rules, *, timeout_s: float = 30) -> str:
    with pytest.raises(GraderFailed) as caught:
        await grading.grade(rules, sample(), timeout_s=timeout_s)
    return str(caught.value)


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        await asyncio.sleep(0.02)


def rewrite(path: Path, content: str) -> None:
    path.write_text(content)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- python --------------------------------------------------------------------------------------


async def test_a_function_grades_in_a_worker_that_lives_on(grading: Grading, module: Path) -> None:
    rules = python(module, "calls")
    grades = [await grading.grade(rules, sample(), timeout_s=30) for _ in range(3)]
    assert [grade.answer for grade in grades] == ["1", "2", "3"]
    assert len({grade.reason for grade in grades}) == 1
    assert grades[0].reason != str(os.getpid())
    big = sample("r", {"n": 10**30, "text": "\u00e9"})
    assert (await grading.grade(python(module, "equal"), big, timeout_s=30)).score == 0.0


async def test_boxes_and_thinking_are_taken_off_before_the_function_is_asked(
    grading: Grading, module: Path
) -> None:
    rules = Rules("boxed_python", config=python(module, "equal").config)
    thought = sample("<think>\\boxed{no}</think>\\boxed{r}")
    assert (await grading.grade(rules, thought, timeout_s=30)).score == 1.0
    assert (await grading.grade(rules, sample("r"), timeout_s=30)).no_answer


async def test_what_goes_wrong_in_a_function_costs_its_sample_only(
    grading: Grading, module: Path
) -> None:
    assert await failure(grading, python(module, "broken")) == (
        "mine:broken raised ValueError: a bad day"
    )
    assert "died while it worked" in await failure(grading, python(module, "leaves"))
    hungry = python(module, "hungry", max_memory_bytes=1 << 29)
    assert "mine:hungry raised MemoryError" in await failure(grading, hungry)
    assert (await grading.grade(python(module, "equal"), sample(), timeout_s=30)).score == 1.0


async def test_only_the_listed_environment_is_seen(grading: Grading, module: Path) -> None:
    grade = await grading.grade(python(module, "sees", pass_env=["MINE"]), sample(), timeout_s=30)
    assert grade.reason == "{'MINE': 'm', 'OTHER': None}"


async def test_a_function_that_hangs_is_killed_with_all_that_it_started(
    grading: Grading, module: Path, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    rules = python(module, "spawns")
    with pytest.raises(GraderFailed, match="took longer than 2 s and was killed"):
        await grading.grade(rules, sample(str(pid_file)), timeout_s=2)
    pid = int(pid_file.read_text())
    await until(lambda: not alive(pid), "the orphan in a session of its own is gone")


async def test_a_module_that_changes_meanwhile_is_not_mixed_in(
    grading: Grading, module: Path, make_rules: Any
) -> None:
    rules = make_rules(python(module, "equal"))
    assert (await grading.grade(rules, sample(), timeout_s=30)).score == 1.0
    rewrite(module, MODULE.replace("==", "!="))
    # the worker that has the old one goes on with it; a new one would have the new one
    assert (await grading.grade(rules, sample(), timeout_s=30)).score == 1.0
    await grading.close()
    assert "the files of grader 'python' have changed since evald started" in await failure(
        grading, rules
    )


@pytest.fixture
def make_rules(tmp_path: Path) -> Callable[[Rules], Rules]:
    """Rules as a loaded set has them, with the grader's version."""

    def make(rules: Rules) -> Rules:
        table = {"grader": rules.grader, "grader_config": rules.config}
        (one,) = config_of(tmp_path, table).eval
        return Rules.of(one, version=grader_version(one))

    return make


def config_of(work: Path, table: dict[str, Any]) -> Any:
    """Write and load a config with one eval set."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if key[-6:] != "config"]
    settings = table.get("grader_config", {})
    lines += ["[eval.grader_config]", *(f"{k} = {json.dumps(v)}" for k, v in settings.items())]
    (work / "toy.jsonl").write_text('{"prompt": "p", "label": "r"}\n')
    (work / "root").mkdir(exist_ok=True)
    path = work / "config.toml"
    path.write_text(
        f'[staging]\nroot = "{work}/root"\n[results]\ndir = "results"\n'
        '[attached]\nmodel = "model"\nurls = ["http://127.0.0.1:9"]\n'
        '[[eval]]\nname = "toy"\npath = "toy.jsonl"\n' + "\n".join(lines)
    )
    return load_config(path)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("mine:equal", ""),
        ("mine:absent", "cannot import mine:absent: AttributeError"),
        ("absent:f", "cannot import absent:f: ModuleNotFoundError: No module named 'absent'"),
        ("mine:MODULE.x", "cannot import mine:MODULE.x: AttributeError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_before_anything_starts(
    module: Path, base: Path, function: str, fault: str
) -> None:
    table = {"grader": "python", "grader_config": {"function": function}}
    config = config_of(module.parent, table)
    base.rename(module.parent / "model")
    if not fault:
        assert len(preflight(config).sets) == 1
        return
    with pytest.raises(ConfigError, match=f"eval set 'toy': grader 'python': {fault}"):
        preflight(config)


def test_a_module_that_ends_the_process_is_named_too(module: Path) -> None:
    module.write_text("import sys; sys.exit(9)")
    config = config_of(module.parent, {"grader": "python", "grader_config": {"function": "mine:f"}})
    (sentence,) = unready_graders(config.eval, os.environ)
    assert "the process that imports it ended with exit code 9" in sentence


# --- command -------------------------------------------------------------------------------------


async def test_a_program_reads_json_and_writes_json(grading: Grading) -> None:
    code = "import json, sys; print(json.dumps({'score': 1, 'reason': sys.stdin.read()}))"
    rules = command(sys.executable, "-c", code)
    grade = await grading.grade(rules, sample("r\x00\u00e9", {"a": 1}, [2]), timeout_s=30)
    assert json.loads(grade.reason) == {
        "response": "r\x00\u00e9",
        "reference": {"a": 1},
        "metadata": [2],
        "prompt": "p?",
        "question": "q1",
    }
    assert await grading.grade(command("echo", "0.5"), sample("x" * 500_000), timeout_s=30) == (
        Grade(0.5, reason="answer: -")
    )


@pytest.mark.parametrize(
    ("shell", "sentence"),
    [
        ("echo oops >&2; echo 1; exit 3", "the grader sh ended with exit code 3; it said: oops"),
        ("kill -9 $$", "the grader sh was killed by signal 9; it said: nothing"),
        ("echo hello", "the grader wrote 'hello', which is no JSON"),
        ("true", "the grader wrote 'nothing', which is no JSON"),
        ("echo '{}'", "the grader's answer has no 'score'"),
        ("yes 11111111", "the grader sh wrote more than 1048576 bytes"),
        ("yes >&2", "took longer than 1 s and was killed"),
    ],
)
async def test_a_program_that_does_not_grade_is_a_grader_error(
    grading: Grading, shell: str, sentence: str
) -> None:
    assert sentence in await failure(grading, command("sh", "-c", shell), timeout_s=1)


async def test_a_program_that_is_not_there_is_a_grader_error(grading: Grading) -> None:
    assert "cannot start the grader /nowhere/x: [Errno 2]" in await failure(
        grading, command("/nowhere/x")
    )


async def test_nothing_that_a_program_starts_is_left(grading: Grading, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    start = f"setsid sleep 300 & echo $! >> {pids}; sleep 301 & echo $! >> {pids}; "
    ends = command("sh", "-c", start + "echo 1")
    assert (await grading.grade(ends, sample(), timeout_s=30)).score == 1.0
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    pids.unlink()
    hangs = command("sh", "-c", start + f"echo $$ >> {pids}; sleep 302")
    assert "was killed" in await failure(grading, hangs, timeout_s=1.5)
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 3
    await until(lambda: not any(map(alive, found)), "the whole tree is gone")


async def test_a_program_has_the_memory_that_it_is_given(grading: Grading) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])"
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    argv = (sys.executable, "-c", code)
    # not what a worker may ask for itself
    assert (await grading.grade(command(*argv), sample(), timeout_s=30)).score == own
    tight = command(*argv, max_memory_bytes=1 << 28)
    assert (await grading.grade(tight, sample(), timeout_s=30)).score == 1 << 28


async def test_what_a_grader_forks_off_gives_no_score(grading: Grading, module: Path) -> None:
    rules = python(module, "forks")
    grades = [await grading.grade(rules, sample(r), timeout_s=30) for r in ("a", "fork", *"bcd")]
    assert [grade.score for grade in grades] == [0.0] * 5


async def test_an_answer_out_of_turn_is_no_score(grading: Grading, module: Path) -> None:
    for number in ("0", "7"):
        with pytest.raises(GraderFailed, match="out of turn"):
            await grading.grade(python(module, "stray"), sample(number), timeout_s=30)
    assert (await grading.grade(python(module, "equal"), sample(), timeout_s=30)).score == 1.0


async def test_a_program_of_a_grader_finds_no_input(grading: Grading, module: Path) -> None:
    assert (await grading.grade(python(module, "reads"), sample(), timeout_s=30)).score == 0


async def test_a_signal_to_the_whole_group_still_ends_a_program(grading: Grading) -> None:
    # programs do not inherit what workers do about signals
    shell = "sleep 300 & kill -TERM $!; wait $!; echo $?"
    grade = await grading.grade(command("sh", "-c", shell), sample(), timeout_s=30)
    assert grade.score == 128 + signal.SIGTERM


async def test_a_script_that_changes_meanwhile_is_not_mixed_in(
    grading: Grading, tmp_path: Path, make_rules: Any
) -> None:
    script = tmp_path / "grade.sh"
    rewrite(script, "echo 1")
    rules = make_rules(command("sh", "grade.sh", cwd=str(tmp_path)))
    assert (await grading.grade(rules, sample(), timeout_s=30)).score == 1.0
    rewrite(script, "echo 0")
    assert "the files of grader 'command' have changed" in await failure(grading, rules)


DAEMON = """
import asyncio, sys
from evald.evals.graders import Rules, Sample
from evald.evals.grading import Grading
from evald.evals.worker_pool import WorkerPool
async def main():
    grading = Grading(WorkerPool())
    rules = Rules("command", config={"argv": ["sh", "-c", sys.argv[1]], "cwd": "/"})
    await grading.grade(rules, Sample(response="r", label=1), timeout_s=600)
asyncio.run(main())
"""


async def test_programs_end_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    shell = f"setsid sleep 303 & echo $! >> {pids}; echo $$ >> {pids}; wait"
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", DAEMON, shell)
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "it runs")
    found = [int(pid) for pid in pids.read_text().split()]
    assert all(map(alive, found))
    daemon.kill()
    await daemon.wait()
    await until(lambda: not any(map(alive, found)), "nothing is left")
