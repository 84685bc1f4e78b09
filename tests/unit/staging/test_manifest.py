import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from staging_cases import FUZZ, refusal

from evald.errors import InvalidSnapshot
from evald.staging import manifest
from evald.staging.manifest import Manifest, parse_manifest, read_manifest


def parse(content: bytes, step: int | None = 4) -> Manifest:
    return parse_manifest(content, name=".complete", step=step)


@pytest.mark.parametrize("content", [b"", b" \n", b"{}"])
def test_nothing_is_a_manifest(content: bytes) -> None:
    assert parse(content) == Manifest()
    assert not parse(content).is_hashed


def test_all_fields_are_read_and_others_ignored(tmp_path: Path) -> None:
    content = {
        "schema": 1,
        "step": 4,
        "run": "run-1",
        "files": {"a": {"size": 3, "xxh3": "0123456789abcdef", "more": 1}, "b": {}},
        "export_s": 1.5,
        "stall_s": 0,
        "final": True,
    }
    (tmp_path / ".complete").write_text(json.dumps(content))
    found = read_manifest(tmp_path / ".complete", step=4)
    assert (found.step, found.run, found.export_s, found.stall_s) == (4, "run-1", 1.5, 0)
    assert found.final
    assert found.is_hashed
    assert found.files["a"].size == 3
    assert found.files["b"].size is None


def test_the_step_is_compared_only_with_a_step() -> None:
    assert parse(b'{"step": 9}', step=None).step == 9


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"done", "neither empty nor a manifest in JSON"),
        (b"[1]", "neither empty nor a manifest in JSON"),
        (b"[" * 100_000, "neither empty nor a manifest in JSON"),
        (b'{"step": "4"}', "$.step"),
        (b'{"files": {"a": {"size": -1}}}', "$.files"),
        (b'{"files": {"a": {"xxh3": "12"}}}', "$.files"),
        (b'{"step": 5}', "manifest of step 5, but the directory's name says 4"),
        (b'{"run": "a/b"}', "names run 'a/b'"),
        (b'{"run": "' + b"x" * 999 + b'"}', "names run 'xxx"),
    ],
)
def test_faults_are_told(content: bytes, sentence: str) -> None:
    with pytest.raises(InvalidSnapshot) as caught:
        parse(content)
    assert sentence in caught.value.detail
    assert len(caught.value.detail) < 600


def test_a_huge_marker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_BYTES", 8)
    (tmp_path / ".complete").write_bytes(b" " * 9)
    with pytest.raises(InvalidSnapshot, match="larger than 8 bytes"):
        read_manifest(tmp_path / ".complete", step=4)


@FUZZ
@given(
    st.binary()
    | st.dictionaries(
        st.sampled_from(["step", "run", "files", "final", "export_s"]),
        st.none() | st.integers() | st.text() | st.dictionaries(st.text(), st.integers()),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_manifest_or_invalid(content: bytes) -> None:
    assert ".complete" in (refusal(lambda: parse(content)) or ".complete")
