"""A training job with transformers' Trainer that knows nothing of evald: a process of its own.

``python hf_trainer_job.py MODEL OUTPUT_DIR LEDGER`` saves a checkpoint every two steps, six in
all, and keeps two. It looks at the ledger only to be no faster than a slow machine measures.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from evald.demo.model import load_model
from evald.results.follow import read_records
from evald.results.records import PointRecord

STEPS, SAVE_STEPS = 12, 2


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is untyped here
    """The same few tokens over and over."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids = torch.arange(16) + number
        return {"input_ids": ids, "labels": ids}


class NoFaster(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Waits after each save for the checkpoint before: the rotation then finds it measured."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        before = state.global_step - SAVE_STEPS
        deadline = time.monotonic() + 60
        while before > 0 and before not in self._measured():
            if time.monotonic() > deadline:
                sys.exit(f"checkpoint {before} is not measured")
            time.sleep(0.05)

    def _measured(self) -> list[int]:
        points = read_records(self._ledger) if self._ledger.exists() else []
        return [point.step for point in points if isinstance(point, PointRecord)]


def main(model: Path, output_dir: Path, ledger: Path) -> None:
    """Train."""
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=load_model(model),
        args=arguments,
        train_dataset=Rows(),
        callbacks=[NoFaster(ledger)],
    )
    trainer.train()
    trainer.save_state()  # as the example scripts do: a trainer_state.json beside the checkpoints


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(*(Path(argument) for argument in sys.argv[1:4]))
