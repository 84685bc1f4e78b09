"""What is known before start."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evald import preflight as module
from evald.config import Config, EvalSet, Fleet, Results, Staging, Status
from evald.errors import ConfigError
from evald.preflight import preflight
from evald.testing import write_base_model


def make_config(tmp_path: Path, **tables: Any) -> Config:
    write_base_model(tmp_path / "base")
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=", "label": 2}\n')
    fleet = {"device": "cpu", "engines": 1} | tables.get("fleet", {})
    return Config(
        staging=Staging(root=str(tmp_path / "root")),
        results=Results(dir=str(tmp_path / "out"), **tables.get("results", {})),
        fleet=Fleet(model=str(tmp_path / "base"), **fleet),
        eval=[EvalSet(name="q", path=str(tmp_path / "q.jsonl"))],
    )


def test_a_good_config_has_its_peak_size_as_the_only_note(tmp_path: Path) -> None:
    checked = preflight(make_config(tmp_path))
    assert [len(loaded.questions) for loaded in checked.sets] == [1]
    (note,) = checked.notes
    assert note.startswith("the staging root holds up to 5 snapshots")


def test_a_group_that_does_not_exist_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"results\.group: .* there is no such group"):
        preflight(make_config(tmp_path, results={"group": "no-such-group"}))


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that refuses as one of another user with mode 0700 does."""
    directory = tmp_path / "closed"
    directory.mkdir()
    stat, access = Path.stat, os.access

    def refusing_stat(path: Path, **options: Any) -> os.stat_result:
        if directory in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refusing_stat)
    monkeypatch.setattr(os, "access", lambda path, mode: path != directory and access(path, mode))
    return directory


def test_a_closed_directory_is_named(tmp_path: Path, closed: Path) -> None:
    good = make_config(tmp_path)
    assert good.fleet is not None
    changed = msgspec.structs.replace(
        good,
        staging=Staging(root=str(closed / "root")),
        results=Results(dir=str(closed / "deep" / "out")),
        status=Status(socket=str(closed / "evald.sock")),
        fleet=msgspec.structs.replace(good.fleet, model=str(closed / "base")),
    )
    with pytest.raises(ConfigError) as error:
        preflight(changed)
    user = f"the daemon's user (uid {os.getuid()})"
    refused = f"{user} may not write to {closed}; change its mode"
    hidden = f"cannot look for {closed}/base: Permission denied; let {user} into the directories"
    assert error.value.problems == [
        f"fleet.model: {hidden} above it",
        f"staging.root: {refused}",
        f"results.dir: {refused}",
        f"status.socket: {refused}",
    ]


def test_cuda_without_a_gpu_is_worth_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, fleet={"device": "cuda"})
    monkeypatch.setattr(module, "GPU_DEVICES", (str(tmp_path / "gpu"),))
    assert "this machine shows no GPU" in preflight(config).notes[-1]
    (tmp_path / "gpu").touch()
    assert "GPU" not in "".join(preflight(config).notes)
