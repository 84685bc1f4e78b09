from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evald.errors import EvalSkip
from evald.evals import encoding_process
from evald.evals.chat_template import ChatTemplate, PromptError
from evald.evals.encoding import Encoding, Fault
from evald.evals.encoding_process import EncodingProcess
from evald.evals.prompts import ModelLimits, TokenizerFiles, tokenizer_digest
from evald.evals.sets import LoadedSet, load_set

LIMITS = ModelLimits(vocab_size=320, context_len=700)
#: a template that takes some milliseconds.
SLOW = "{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}"


@pytest.fixture
def process() -> Iterator[EncodingProcess]:
    with closing(EncodingProcess()) as process:
        yield process


def children(pid: int | str = "self") -> list[str]:
    """Processes of one that encode, zombies too."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [pid for path in found for pid in path.read_text().split()]
    return [pid for pid in pids if b"encoding_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def sets_of_all_kinds(make_set: Any) -> list[LoadedSet]:
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": chat, "label": 10**30, "t": [{"name": "x"}]},
        {"prompt": "x" * 400, "label": 1},
        {"prompt": [{"role": "user", "content": ""}], "label": 1},
    ]
    scored = [{"prompt": "2+2=", "label": "B"}]
    return [
        load_set(make_set(rows, "asked", tool_key="t")),
        load_set(make_set(scored, "choice", kind="loglikelihood_choice", choices="AB")),
        load_set(make_set(scored, "text", kind="perplexity", window_tokens=3)),
        load_set(make_set(scored, "own", kind="custom", function="function_cases:echo")),
    ]


def test_what_comes_back_is_what_this_process_would_make(
    make_model: Any, make_set: Any, process: EncodingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ tools[0].name if tools }}{{ messages[0].content or '\\ud800' }}<think>"
    files = TokenizerFiles.read(make_model(template=template, bos=True))
    here = Encoding()
    monkeypatch.setattr(encoding_process, "_BATCH_BYTES", 100)
    assert process.digest(files.content) == tokenizer_digest(files.content)
    for encoder in (here, process):
        encoder.load(files, LIMITS)
    for one in sets_of_all_kinds(make_set):
        encoded = process.encode(one.eval_set, one.questions)
        assert encoded == here.encode(one.eval_set, one.questions)
        assert len(encoded) == len(one.questions)
        faults = [fault.too_long for fault in encoded if isinstance(fault, Fault)]
        assert faults == ([True, False] if one.name == "asked" else [])


def test_faults_of_tokenizer_and_set_are_said_as_here(
    make_model: Any, make_set: Any, process: EncodingProcess
) -> None:
    files = TokenizerFiles.read(make_model())
    with pytest.raises(PromptError, match="cannot read tokenizer"):
        process.digest(b"{")
    with pytest.raises(PromptError, match="cannot load tokenizer"):
        process.load(TokenizerFiles(b"{}", files.template), LIMITS)
    process.load(files, LIMITS)
    eval_set = make_set([], stop_token_ids=[999])
    with pytest.raises(PromptError, match="stop_token_ids: token None has id 999"):
        process.encode(eval_set, [])


def test_a_process_that_dies_is_the_fault_of_what_it_had_to_read(
    make_model: Any, process: EncodingProcess
) -> None:
    files = TokenizerFiles.read(make_model())
    digest = process.digest(files.content)
    (pid,) = children()
    # (what a stop sends to all of the daemon's processes is none of its business)
    os.kill(int(pid), signal.SIGTERM)
    assert process.digest(files.content) == digest
    os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(PromptError, match="ended with exit code -9"):
        process.digest(files.content)
    assert children() == []
    # another one reads the next file
    assert process.digest(files.content) == digest


def test_encoding_is_given_up_at_once(
    make_model: Any, make_set: Any, process: EncodingProcess
) -> None:
    files = TokenizerFiles(TokenizerFiles.read(make_model()).content, ChatTemplate(SLOW, {}))
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "label": 1} for i in range(3000)]
    loaded = load_set(make_set(rows))
    process.load(files, LIMITS)
    closer = threading.Timer(0.3, process.close)
    began = time.monotonic()
    closer.start()
    with pytest.raises(EvalSkip, match="nobody wants them"):
        process.encode(loaded.eval_set, loaded.questions)
    closer.join()
    assert time.monotonic() - began < 5
    assert children() == []
    with pytest.raises(EvalSkip, match="nobody wants them"):
        process.encode(loaded.eval_set, loaded.questions)


DAEMON = """
import asyncio, sys
from pathlib import Path
from evald.config import EvalSet
from evald.evals.encoding_process import EncodingProcess
from evald.evals.prompts import ModelLimits, TokenizerFiles
from evald.evals.rows import Question
async def main():
    process = EncodingProcess()
    files = TokenizerFiles.read(Path(sys.argv[1]))
    await asyncio.to_thread(process.load, files, ModelLimits())
    print("loaded", flush=True)
    rows = [Question(id=str(i), prompt=[{"role": "user", "content": "x"}]) for i in range(9000)]
    await asyncio.to_thread(process.encode, EvalSet(name="toy"), rows)
asyncio.run(main())
"""


def test_it_dies_with_a_daemon_that_is_killed(make_model: Any) -> None:
    words = [sys.executable, "-c", DAEMON, make_model(template=SLOW)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"loaded\n"
        (pid,) = children(daemon.pid)
        stat = Path(f"/proc/{pid}/stat")
        before = cpu_ticks(stat)
        deadline = time.monotonic() + 20
        while cpu_ticks(stat) < before + 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        daemon.kill()
        daemon.wait()
        deadline = time.monotonic() + 30
        while stat.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not stat.exists()


def cpu_ticks(stat: Path) -> int:
    """What a process has worked so far."""
    return int(stat.read_text().rpartition(")")[2].split()[11])
