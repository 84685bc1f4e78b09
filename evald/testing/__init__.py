"""Fakes that users can use too: tiny models, snapshots, an engine and a daemon with scripts.

``python -m evald.testing --model-path DIR --port N`` runs the fake engine as a process of its own.
"""

from evald.testing.decode_model import Decode
from evald.testing.fake_daemon import Ending, FakeDaemon
from evald.testing.fake_engine import FakeEngine
from evald.testing.fake_launcher import (
    FakeLauncher,
    FakeProcess,
    FakeServer,
    serve_fake,
    write_fake_python,
)
from evald.testing.fake_ranks import FakeRanks
from evald.testing.fake_router import FakeRouter
from evald.testing.fake_trainer import FakeTrainer
from evald.testing.faults import Fault
from evald.testing.hostile_answers import hostile_answers
from evald.testing.snapshots import (
    Tensor,
    model_tensors,
    read_safetensors,
    write_base_model,
    write_safetensors,
    write_snapshot,
)

__all__ = [
    "Decode",
    "Ending",
    "FakeDaemon",
    "FakeEngine",
    "FakeLauncher",
    "FakeProcess",
    "FakeRanks",
    "FakeRouter",
    "FakeServer",
    "FakeTrainer",
    "Fault",
    "Tensor",
    "hostile_answers",
    "model_tensors",
    "read_safetensors",
    "serve_fake",
    "write_base_model",
    "write_fake_python",
    "write_safetensors",
    "write_snapshot",
]
