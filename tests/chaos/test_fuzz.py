"""Whatever stands in a file, evald reads it or says in its own words why not."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evald.config import Config, Results
from evald.config_load import load_config
from evald.errors import ConfigError, InvalidSnapshot, LedgerError
from evald.point import Outcome
from evald.results.follow import read_records
from evald.results.ledger import Ledger
from evald.results.records import Accepted, AnyRecord, PointRecord
from evald.results.samples import SampleJournal, SampleRecord
from evald.staging.manifest import parse_manifest
from evald.staging.validate import BaseModel, validate
from evald.staging.words import BrokenWord, RequestWord, RunEndWord, SkipWord, read_word
from evald.testing import model_tensors, write_snapshot

from .mutations import FUZZ, mutated
from .setting import CONFIG, FAKE

TENSORS = dict(list(model_tensors().items())[-3:])
MANIFEST = {
    "schema": 1,
    "step": 40,
    "run": "r",
    "files": {"model.safetensors": {"size": 139_000, "xxh3": "0123456789abcdef"}},
    "export_s": 1.5,
    "stall_s": 0.5,
    "final": False,
}
WORDS: list[tuple[Any, dict[str, Any]]] = [
    (SkipWord, {"reason": "export_failed", "detail": "rank 3 is gone", "run": "r"}),
    (RequestWord, {"kind": "reuse", "step": 40, "path": "/checkpoints/40", "run": "r"}),
    (RunEndWord, {"last_step": 40, "run": "r"}),
]
RECORDS: list[AnyRecord] = [
    Accepted(
        seq=1, run="r", step=1, record_id="r/step/1/r0/accepted", directory="/x/step_1",
        size_bytes=1, fingerprint="f", digest="d",
    ),
    PointRecord(
        seq=2, run="r", step=1, record_id="r/step/1/r0", outcome=Outcome.OK,
        metrics={"eval/a": 0.5}, provenance={"sets": {"a": {"config": "c"}}},
    ),
]  # fmt: skip
LEDGER = b"".join(msgspec.json.encode(record) + b"\n" for record in RECORDS)
SAMPLES = b"".join(
    msgspec.json.encode(
        SampleRecord(
            question=str(number), sample=0, digest="d", config="c", status="scored", score=1.0
        )
    )
    + b"\n"
    for number in range(3)
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshot")
    write_snapshot(path, tensors=TENSORS, shards=2, tokenizer=False, marker=None)
    return path


@pytest.fixture(scope="module")
def base(directory: Path) -> BaseModel:
    return BaseModel.read(directory)


def check(directory: Path, base: BaseModel, name: str, content: bytes) -> None:
    """Validate the snapshot with other ``content`` in one of its files, then put that back."""
    whole = (directory / name).read_bytes()
    (directory / name).write_bytes(content)
    try:
        with suppress(InvalidSnapshot):
            validate(directory, base)
    finally:
        (directory / name).write_bytes(whole)
    validate(directory, base)


@FUZZ
@given(data=st.data())
def test_a_shard(directory: Path, base: BaseModel, data: st.DataObject) -> None:
    name = "model-00001-of-00002.safetensors"
    whole = (directory / name).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = data.draw(mutated(whole[8 : 8 + length]))
    told = data.draw(st.sampled_from([len(header), length, 0, 2**63, len(header) + 1]))
    check(directory, base, name, struct.pack("<Q", told) + header + whole[8 + length :])


@FUZZ
@given(data=st.data())
def test_an_index(directory: Path, base: BaseModel, data: st.DataObject) -> None:
    name = "model.safetensors.index.json"
    check(directory, base, name, data.draw(mutated((directory / name).read_bytes())))


@FUZZ
@given(data=st.data())
def test_the_model_s_config(directory: Path, base: BaseModel, data: st.DataObject) -> None:
    check(
        directory, base, "config.json", data.draw(mutated((directory / "config.json").read_bytes()))
    )


@FUZZ
@given(content=mutated(json.dumps(MANIFEST).encode()))
def test_a_marker(content: bytes) -> None:
    with suppress(InvalidSnapshot):
        parse_manifest(content, name=".complete", step=40)


@FUZZ
@given(which=st.integers(0, 2), data=st.data())
def test_a_word(tmp_path: Path, which: int, data: st.DataObject) -> None:
    word, content = WORDS[which]
    path = tmp_path / "word"
    path.write_bytes(data.draw(mutated(json.dumps(content).encode())))
    with suppress(BrokenWord):
        read_word(path, word)


@FUZZ
@given(
    content=mutated(
        CONFIG.format(
            run="r", root="/r", staging="", dispatch="", results="/x", results_table="", work="/w",
            engines=1, times=FAKE, python="", grader="exact",
        ).encode()
        + b'[[eval]]\nname = "a"\npath = "a.jsonl"\n'
    )
)  # fmt: skip
def test_a_config(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with suppress(ConfigError):
        assert isinstance(load_config(path, environ={}), Config)


@FUZZ
@given(content=mutated(LEDGER))
def test_a_ledger(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    with suppress(LedgerError):
        read_records(path)
    with suppress(LedgerError):
        Ledger.open(Results(dir=str(tmp_path))).close()
        # what could be opened once can be opened again, and read
        Ledger.open(Results(dir=str(tmp_path))).close()
        read_records(path)


@FUZZ
@given(content=mutated(SAMPLES))
def test_a_journal_of_samples(tmp_path: Path, content: bytes) -> None:
    journal = SampleJournal(tmp_path, "a")
    journal.path.write_bytes(content)
    assert len(journal.load("d", "c")) <= content.count(b"\n") + 1
    journal.close()
