"""Fixtures: a near host, a spool to push from, a staging root to push into."""

from __future__ import annotations

from pathlib import Path

import pytest
from far_host import NearHost


@pytest.fixture
def near(tmp_path: Path) -> NearHost:
    return NearHost(tmp_path)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "spool"
    path.mkdir()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "a root's"  # everything on its way is quoted
    path.mkdir()
    return path
