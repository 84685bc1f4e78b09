"""A training job as people have it: a transformers Trainer, plain SFT, and two lines for evald.

``python sft_job.py BASE ROOT OUT``; prints one JSON object when it has trained.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback

from evald.demo.model import END, build_tokenizer, chat_prompt, load_model
from evald.demo.tasks import TASKS
from evald.trainer.callback import EvaldCallback

STEPS = 45
INTERVAL = 20


class Examples(torch.utils.data.Dataset):  # type: ignore[misc] # torch is not typed
    """Questions of the easiest task, with answers; none of the eval set's."""

    def __init__(self, count: int) -> None:
        # reproducible data, nothing secret
        tokenizer, rng = build_tokenizer(), random.Random(0)  # noqa: S311
        task = next(task for task in TASKS if task.name == "max")
        self._rows: list[tuple[list[int], list[int]]] = []
        while len(self._rows) < count:
            question = task.ask(rng)
            if not question.held_out:
                ids = tokenizer.encode(chat_prompt(question.text)).ids
                answer = tokenizer.encode(question.response + END).ids
                self._rows.append((ids, answer))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        return self._rows[index]


def batch(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Pad; the loss is on the answers."""
    longest = max(len(ids) + len(answer) for ids, answer in rows)
    ids, labels = [], []
    for prompt, answer in rows:
        padding = longest - len(prompt) - len(answer)
        ids.append(prompt + answer + [256] * padding)
        labels.append([-100] * len(prompt) + answer + [-100] * padding)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


class Writer:
    """Stands in for TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert not self.closed
        self.scalars.append((name, value, step))

    def add_text(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def tensorboard(writer: Writer) -> Any:
    """The Trainer's own reporter, whose constructor wants TensorBoard installed."""
    reporter = TensorBoardCallback.__new__(TensorBoardCallback)
    reporter._SummaryWriter, reporter.tb_writer, reporter.logging_dir = None, writer, "unused"
    return reporter


def main(base: Path, root: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    writer = Writer()
    trainer = Trainer(
        load_model(base),
        TrainingArguments(
            str(out),
            max_steps=STEPS,
            per_device_train_batch_size=32,
            learning_rate=4e-3,
            adam_beta2=0.98,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=Examples(32 * STEPS),
        data_collator=batch,
        callbacks=[tensorboard(writer)],
    )
    trainer.add_callback(
        EvaldCallback(
            trainer, root, interval=INTERVAL, overflow="backpressure", drain_timeout_s=150.0
        )
    )
    trainer.train()
    said = {
        "log_history": trainer.state.log_history,
        "scalars": writer.scalars,
        "rollout_engines": sorted({"sglang", "vllm"} & set(sys.modules)),
    }
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
