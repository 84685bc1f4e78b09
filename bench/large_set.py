"""A set of 20,000 questions: how much memory the daemon needs, with a kill -9 in the middle.

Starts a real daemon with a fake engine whose answers are 8,000 characters long, on prompts of
about 1,000 characters and with a tokenizer of 262,144 tokens; kills it once half of the samples lie
on disk, starts it again, and lets it finish. Memory is the kernel's own high-water mark (VmHWM) of
the daemon's process; engines and workers are processes of their own. In the end all samples are
graded again (`evald regrade`) by the same daemon.

Goal: below 300 MB. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from evald.results.follow import read_records
from evald.results.records import PointRecord
from evald.testing import write_base_model, write_fake_python, write_snapshot

VOCABULARY = 262_144
PROMPT_CHARS = 1000
LIMIT_MB = 300.0

CONFIG = """
run = "bench"
[staging]
root = "{root}"
[results]
dir = "{work}/results"
[fleet]
model = "{work}/base"
device = "cpu"
engines = 1
python = "{work}/python"
[[eval]]
name = "large"
path = "{work}/large.jsonl"
grader = "boxed_exact"
max_response_len = 20000
n_samples_per_eval_prompt = {samples}
"""


def main() -> int:
    """Run the bench; the exit code is 1 when the daemon needs more than 300 MB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3,000 questions instead of 20,000")
    parser.add_argument("--questions", type=int, default=None)
    parser.add_argument("--samples", type=int, default=1, help="for each question")
    parser.add_argument("--chars", type=int, default=8000, help="length of each response")
    args = parser.parse_args()
    questions = args.questions or (3000 if args.quick else 20_000)
    work = Path(tempfile.mkdtemp(prefix="evald-bench-"))
    root = Path(tempfile.mkdtemp(prefix="evald-bench-", dir="/dev/shm"))
    try:
        write_world(work, root, questions, args.samples, args.chars)
        figures = measure(work, root, samples=questions * args.samples, chars=args.chars)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(root)
    print(json.dumps({"name": "large_set", "questions": questions, **figures}))
    return 0 if figures["daemon_rss_mb"] < LIMIT_MB else 1


def write_world(work: Path, root: Path, questions: int, samples: int, chars: int) -> None:
    """Write model, data and config."""
    base = write_base_model(
        work / "base", vocab_size=VOCABULARY + 256, max_position_embeddings=32768
    )
    write_tokenizer(base / "tokenizer.json")
    rng = random.Random(1)  # noqa: S311 - test data, no secret
    words = [f"word{number}" for number in range(1000)]
    with (work / "large.jsonl").open("w") as file:
        for number in range(questions):
            prompt = f"{number}: " + " ".join(rng.choices(words, k=PROMPT_CHARS // 8))
            file.write(json.dumps({"prompt": prompt, "label": "7"}) + "\n")
    write_fake_python(work / "python", response_chars=chars)
    (work / "config.toml").write_text(CONFIG.format(root=root, work=work, samples=samples))


def write_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer as large as those of current models."""
    rng = random.Random(0)  # noqa: S311 - test data, no secret
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet.copy()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = []
    while len(vocabulary) < VOCABULARY:
        pair = rng.choice(tokens), rng.choice(alphabet)
        merged = "".join(pair)
        if merged not in vocabulary and len(merged) <= 12:  # noqa: PLR2004 - as long as words are
            vocabulary[merged] = len(vocabulary)
            merges.append(pair)
            tokens.append(merged)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def measure(work: Path, root: Path, *, samples: int, chars: int) -> dict[str, float]:
    """Evaluate one snapshot in two lives of the daemon."""
    journal = work / "results" / "samples" / "bench" / "step_1.r0" / "large.jsonl"
    ledger = work / "results" / "results.jsonl"
    began = time.perf_counter()
    with running_daemon(work, root) as daemon:
        started_mb = memory_mb(daemon.pid, "VmHWM")
        write_snapshot(root / "step_1", seed=1, answer=7)
        wait_for(lambda: size_of(journal) > samples * chars / 2, daemon, "half of the samples")
        first_mb = memory_mb(daemon.pid, "VmHWM")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(timeout=60)
    with running_daemon(work, root) as daemon:
        wait_for(lambda: points(ledger), daemon, "the point's end")
        second_mb = memory_mb(daemon.pid, "VmHWM")
        at_end_mb = memory_mb(daemon.pid, "VmRSS")
        wall_s = time.perf_counter() - began
        subprocess.run(
            [sys.executable, "-m", "evald", "regrade", str(work / "config.toml"), "--step", "1"],
            check=True,
            stdout=sys.stderr,
        )
        regrade_s = time.perf_counter() - began - wall_s
        third_mb = memory_mb(daemon.pid, "VmHWM")
    point, regraded = points(ledger)
    for one in (point, regraded):
        if (one.outcome, one.counts.n_scored, one.metrics["eval/large"]) != ("ok", samples, 1):
            raise SystemExit(f"the point did not end as it must: {one}")
    return {
        "samples": samples,
        "resumed": point.counts.n_resumed,
        "on_disk_mb": round(journal.stat().st_size / 1e6, 1),
        "wall_s": round(wall_s, 1),
        "regrade_s": round(regrade_s, 1),
        "started_rss_mb": started_mb,
        "before_kill_rss_mb": first_mb,
        "after_resume_rss_mb": second_mb,
        "at_end_rss_mb": at_end_mb,
        "after_regrade_rss_mb": third_mb,
        "daemon_rss_mb": max(first_mb, third_mb),
    }


@contextmanager
def running_daemon(work: Path, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon that serves when the block begins."""
    status = root / ".evald" / "status.json"
    with (work / "evald.log").open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "evald", "run", str(work / "config.toml")],
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: is_serving(status, daemon.pid), daemon, "the daemon")
        yield daemon
    except SystemExit:
        print((work / "evald.log").read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=120)


def is_serving(status: Path, pid: int) -> bool:
    """Whether the status is that of this daemon, and says that it serves."""
    if not status.exists():
        return False
    content = json.loads(status.read_bytes())
    return bool(content["pid"] == pid and content["state"] == "serving")


def wait_for(condition: Callable[[], object], daemon: subprocess.Popen[bytes], what: str) -> None:
    """Poll until ``condition`` is true, for half an hour at most."""
    deadline = time.monotonic() + 1800
    while not condition():
        if daemon.poll() is not None:
            raise SystemExit(f"the daemon ended with {daemon.returncode} before {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"it took too long: {what}")
        time.sleep(0.05)


def size_of(path: Path) -> int:
    """Bytes of a file, 0 without one."""
    return path.stat().st_size if path.exists() else 0


def points(ledger: Path) -> list[PointRecord]:
    """All terminal records."""
    return [record for record in read_records(ledger) if isinstance(record, PointRecord)]


def memory_mb(pid: int, field: str) -> float:
    """Memory of a process: "VmRSS" is resident now, "VmHWM" was at most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise SystemExit(f"the daemon (pid {pid}) has gone")


if __name__ == "__main__":
    raise SystemExit(main())
