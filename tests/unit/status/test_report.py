"""``evald report``: one file, which is safe and asks for nothing."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from training_run import HOSTILE, make_run, write_samples

from evald.commands import report
from evald.errors import EvaldError
from evald.status.assets import page_dir
from evald.status.bundle import bundle


def write_run(results: Path, n_points: int = 10) -> Path:
    results.mkdir(exist_ok=True)
    lines = []
    for seq, record in enumerate(make_run("demo", n_points), start=1):
        record.seq = seq
        lines.append(msgspec.json.encode(record) + b"\n")
    (results / "results.jsonl").write_bytes(b"".join(lines))
    write_samples(results, "demo", 20 * n_points, seed=1)
    return results


def call(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    report.configure(parser)
    return report.run(parser.parse_args([str(word) for word in argv]))


def data_of(path: Path) -> dict[str, Any]:
    match = re.search(r'id="evald-report">(.*?)</script>', path.read_text(), re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_everything_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = write_run(tmp_path / "r"), tmp_path / "report.html"
    with (results / "results.jsonl").open("ab") as ledger:
        ledger.write(b'{"type": "point", "schema": 1, "se')  # a daemon writes at this moment
    assert call(results, "-o", out, "--samples", 5) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 11 points, 15 samples, 0.")
    text, data = out.read_text(), data_of(out)
    assert not re.search(r"(src|href)=.http|url\(|@import|//# source", text)
    steps = [one["step"] for one in data["batch"]["records"] if one["type"] == "point"]
    assert steps == [0, *range(20, 201, 20)]
    assert {one["set"]: len(one["samples"]) for one in data["samples"]} == {
        "aime": 5, "gpqa-diamond": 5, "math500": 5,
    }  # fmt: skip
    assert data["samples"][0]["n_found"] > 5
    assert out.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]


def test_hostile_text_stays_in_the_data(tmp_path: Path) -> None:
    results, out = write_run(tmp_path / "r"), tmp_path / "report.html"
    assert call(results, "-o", out, "--samples", 60) == 0
    text = out.read_text()
    assert HOSTILE in [s["response"] for s in data_of(out)["samples"][0]["samples"]]
    assert text.count("<script") == text.count("</script") == 3
    # and only what was written for the page may run
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in text


def test_long_texts_are_cut_and_pruned_samples_left_out(tmp_path: Path) -> None:
    results, out = write_run(tmp_path / "r"), tmp_path / "report.html"
    directory = results / "samples" / "demo" / "step_200.r0"
    (directory / "math500.jsonl").unlink()
    line = json.loads((directory / "aime.jsonl").read_bytes().splitlines()[0])
    line |= {"response": "x" * 50_000, "score": 0.0, "reference": ["y" * 50_000, 3]}
    (directory / "aime.jsonl").write_text(json.dumps(line) + "\n")
    assert call(results, "-o", out) == 0
    aime, gpqa = data_of(out)["samples"]
    assert (aime["set"], gpqa["set"]) == ("aime", "gpqa-diamond")
    response = aime["samples"][0]["response"]
    assert "... (46000 characters) ..." in response
    assert len(response) < 4100
    assert len(aime["samples"][0]["reference"][0]) < 4100
    assert call(results, "-o", out, "--samples", 0) == 0
    assert data_of(out)["samples"] == []


def test_from_a_config_samples_come_with_their_prompts(tmp_path: Path) -> None:
    results, out = write_run(tmp_path / "r"), tmp_path / "report.html"
    rows = [{"prompt": f"What is 3 * {n}?", "label": "0"} for n in range(60)]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "node.toml").write_text(
        f"""
run = "demo"
[staging]
root = "/dev/shm/none"
[results]
dir = "{results}"
[fleet]
model = "{tmp_path}"
engines = 1
[defaults]
grader = "exact"
[[eval]]
name = "aime"
path = "aime.jsonl"
[[eval]]
name = "math500"
path = "is_not_there.jsonl"
"""
    )
    assert call(tmp_path / "node.toml", "-o", out) == 0
    aime, _, math500 = data_of(out)["samples"]
    assert {one["prompt"].partition("*")[0] for one in aime["samples"]} == {"What is 3 "}
    assert [one for one in math500["samples"] if "prompt" in one] == []


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(EvaldError, match=r"cannot report on .*: it has no records; give a results"):
        call(tmp_path)
    with pytest.raises(EvaldError, match="cannot take -1 samples: give --samples 0 or more"):
        call(tmp_path, "--samples", -1)
    results = write_run(tmp_path / "r")
    with pytest.raises(EvaldError, match=r"cannot write .*: No such file.*; name another file"):
        call(results, "-o", tmp_path / "missing" / "x.html")


def test_the_bundle_understands_all_modules_of_the_page() -> None:
    page = page_dir()
    text = bundle(page, "app.js")
    for path in page.iterdir():
        if not path.name.endswith(".js"):
            continue
        source = path.read_text(encoding="utf-8")
        assert f'modules["{path.name}"] =' in text
        assert len(source.splitlines()) <= 300
        for name in re.findall(
            r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", source
        ):
            raise AssertionError(f"{path.name}: {name}")
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)
    assert "</script" not in text


def test_what_is_no_file_stays_and_a_link_stays_a_link(tmp_path: Path) -> None:
    results = write_run(tmp_path / "r")
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file.html"
    os.mkfifo(pipe)
    with pytest.raises(EvaldError, match=r"cannot write .*/pipe: it is no file; name another"):
        call(results, "-o", pipe)
    assert pipe.is_fifo()
    file.touch()
    link.symlink_to(file)
    assert call(results, "-o", link) == 0
    assert link.is_symlink()
    assert file.stat().st_size > 1000
