"""Results of a daemon that is asked over TCP: rows, and the samples behind them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sink_cases import Book, ended, set_done
from status_stage import TOKEN, stage
from wandb_file import WandbFile
from wandb_reader import LIMIT_S, environment, files

from evald.results.samples import SampleRecord


def sample(question: str, score: float) -> bytes:
    record = SampleRecord(
        question=question,
        sample=0,
        digest="d",
        config="c",
        status="scored",
        score=score,
        response=f"{question}: {score}",
    )
    return msgspec.json.encode(record) + b"\n"


async def tail(directory: Path, url: str, *options: object, token: str = TOKEN) -> tuple[int, str]:
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "evald", "tail", url, "--once", "--dir", str(directory)),
        *(str(word) for word in options),
        env=environment(directory, EVALD_TOKEN=token),
        cwd=directory,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        _, said = await reader.communicate()
    return reader.returncode or 0, said.decode()


async def test_rows_and_tables_come_from_the_daemon(tmp_path: Path) -> None:
    async with stage(tmp_path / "node") as node:
        await node.ledger.append(set_done(10, "math", 0.5))
        await node.ledger.append(ended(10, math=0.5))
        await node.ledger.append(set_done(20, "math", 0.75))
        await node.ledger.append(ended(20, math=0.75))
        for step, score in ((10, 0), (20, 1)):
            path = node.ledger.path.parent / f"samples/demo/step_{step}.r0/math.jsonl"
            path.parent.mkdir(parents=True)
            path.write_bytes(sample("q1", score) + sample("q2", 0.5))
        code, said = await tail(tmp_path, node.url, "--to", "jsonl")
        assert (code, said) == (0, "evald: 4 rows delivered\n")
        code, said = await tail(
            tmp_path, node.url, "--to", "wandb", "--mode", "offline", "--samples", 5
        )
        assert code == 0, said
        code, said = await tail(tmp_path, node.url, "--to", "jsonl", token="x" * 20)
        assert code == 1
        assert "it refuses the token" in said
    lines = (tmp_path / "demo.jsonl").read_text().splitlines()
    assert [json.loads(line)["eval/math"] for line in lines if "eval/math" in line] == [0.5, 0.75]
    code, said = await tail(tmp_path, node.url, "--to", "jsonl")
    assert code == 1
    assert "none is running there; what it had told was delivered" in said
    book = Book(tmp_path / "unused")
    (path,) = files(book)
    (_, first, _, second) = WandbFile(path).history
    assert "eval/math/flips" not in first
    assert table(path, second["eval/math/samples.path"])["data"][0][:3] == ["q1", 0, 1]
    assert table(path, second["eval/math/flips.path"])["data"] == [
        ["q1", 0, 0, 1, "q1: 0", "q1: 1", "null", ""]
    ]


def table(run: Path, name: str) -> dict[str, Any]:
    """What W&B has put beside its file for a table."""
    found: dict[str, Any] = json.loads((run.parent / "files" / name).read_text())
    return found


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
