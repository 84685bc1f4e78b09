"""A transformers Trainer that trains for a moment, and what listens to it."""

from __future__ import annotations

import concurrent.futures
import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch

from evald.demo.model import new_model
from evald.trainer.publish import publish

with warnings.catch_warnings():
    # CPU mode has an old torchvision beside a newer torch; nothing here looks at images
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainerCallback, TrainingArguments

EXAMPLES = 32

torch.set_num_threads(1)  # the cores are shared


class Words(torch.utils.data.Dataset):  # type: ignore[misc] # torch is not typed
    """Random sequences, always the same."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 256, (8,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def trainer(directory: Path, *, model: Any = None, callbacks: Any = (), **settings: Any) -> Any:
    """A Trainer of the demo's model: 4 examples a step, 8 steps an epoch."""
    arguments = TrainingArguments(
        str(directory),
        **{
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 32,
            "max_steps": 5,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
            **settings,
        },
    )
    return Trainer(
        new_model(0) if model is None else model,
        arguments,
        train_dataset=Words(),
        eval_dataset=Words(),
        callbacks=list(callbacks),
    )


def fingerprint(model: Any) -> str:
    """Tell weights apart."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()


class Reporter(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Notes what reporters are told: (step, epoch, logs); and the weights after each step."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float, dict[str, Any]]] = []
        self.weights: dict[int, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        del args, control
        self.told.append((state.global_step, state.epoch, dict(logs)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        self.weights[state.global_step] = fingerprint(kwargs["model"])

    def steps_with(self, name: str) -> list[int]:
        return [step for step, _, logs in self.told if name in logs]


class NotingExporter:
    """Publishes a file that holds the weights' fingerprint, and notes it by step."""

    def __init__(self, root: Path, error: Exception | None = None) -> None:
        self.root = root
        self.error = error
        self.exported: dict[int, str] = {}
        self.final: list[int] = []
        self.closed = False

    def export(
        self, weights: Any, step: int, *, final: bool = False, run: str | None = None
    ) -> concurrent.futures.Future[Path]:
        future: concurrent.futures.Future[Path] = concurrent.futures.Future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        self.exported[step] = content = fingerprint(weights)
        self.final += [step] if final else []

        def write(directory: Path) -> None:
            (directory / "model.safetensors").write_text(content)

        future.set_result(publish(write, self.root, step, run=run, final=final))
        return future

    def close(self, timeout_s: float = 60.0) -> None:
        del timeout_s
        self.closed = True
