from pathlib import Path

import pytest
from staging_cases import base_model, snapshot, staging

from evald.errors import SnapshotGone
from evald.point import PointKey
from evald.staging import candidate as candidate_module
from evald.staging.candidate import Reader
from evald.staging.scan import FoundSnapshot, Layout, scan


def reader_and_found(root: Path) -> tuple[Reader, FoundSnapshot]:
    config = staging(root)
    layout = Layout(config)
    return Reader(config, layout, "run", base_model()), scan(layout).marked[0]


def failing_marker(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(candidate_module, "read_manifest", fail)


def test_the_manifest_goes_with_the_candidate(tmp_path: Path) -> None:
    snapshot(
        tmp_path / "step_4", manifest={"run": "named", "final": True, "export_s": 2, "stall_s": 1}
    )
    reader, found = reader_and_found(tmp_path)
    candidate = reader.look(found)
    reader.judge(candidate, hashed=False)
    assert candidate.run == "named"
    point = candidate.point(PointKey("named", 4))
    assert point.snapshot.final
    assert (point.snapshot.export_s, point.snapshot.stall_s) == (2, 1)
    assert point.snapshot.digest is not None


def test_a_marker_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(tmp_path / "step_4")
    reader, found = reader_and_found(tmp_path)
    failing_marker(monkeypatch, FileNotFoundError(2, "gone"))
    with pytest.raises(SnapshotGone, match="it, or its marker, vanished"):
        reader.look(found)


def test_a_marker_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = snapshot(tmp_path / "step_4")
    reader, found = reader_and_found(tmp_path)
    failing_marker(monkeypatch, PermissionError(13, "Permission denied"))
    candidate = reader.look(found)
    assert candidate.fault == (
        f"cannot read marker {directory}/.complete: Permission denied; write it with 0644"
    )
    reader.judge(candidate, hashed=True)
    assert candidate.digest is None


def test_a_snapshot_that_changes_meanwhile(tmp_path: Path) -> None:
    directory = snapshot(tmp_path / "step_4")
    reader, found = reader_and_found(tmp_path)
    candidate = reader.look(found)
    (directory / "late.json").touch()
    with pytest.raises(SnapshotGone, match="changed while it was validated"):
        reader.judge(candidate, hashed=False)
