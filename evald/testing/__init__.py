"""Fakes that users can use too: tiny models and snapshots, and an engine with scripted faults.

``python -m evald.testing --model-path DIR --port N`` runs the fake engine as a process of its own.
"""

from evald.testing.fake_engine import FakeEngine, Fault
from evald.testing.fake_launcher import FakeLauncher, FakeProcess, write_fake_python
from evald.testing.snapshots import (
    Tensor,
    model_tensors,
    read_safetensors,
    write_base_model,
    write_safetensors,
    write_snapshot,
)

__all__ = [
    "FakeEngine",
    "FakeLauncher",
    "FakeProcess",
    "Fault",
    "Tensor",
    "model_tensors",
    "read_safetensors",
    "write_base_model",
    "write_fake_python",
    "write_safetensors",
    "write_snapshot",
]
