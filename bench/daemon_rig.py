"""A daemon with its surroundings, as its tests have it: they are in no package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from rig import Rig, ask, rig, until

__all__ = ["Rig", "ask", "rig", "until"]
