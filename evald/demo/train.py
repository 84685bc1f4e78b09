"""Train the demo's model for real, and publish a snapshot every few hundred steps.

``python -m evald.demo.train --base DIR --root ROOT`` is an ordinary training job: all that it
knows of evald is ``evald.trainer.publish``. Progress goes to stdout, one JSON object a line, with
an ``event``: ``start``, ``progress``, ``published``, ``skipped``, ``end``.
"""

from __future__ import annotations

import argparse
import errno
import functools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from evald.demo.model import END, PAD_ID, build_tokenizer, chat_prompt, load_model, save_model
from evald.demo.tasks import Question, training_questions
from evald.trainer.publish import end_run, publish, skip

BATCH_SIZE = 48
PEAK_LEARNING_RATE = 4e-3
FINAL_SHARE = 0.1
WARM_UP_STEPS = 100
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.05
#: steps between two lines of progress.
REPORT_EVERY = 20
#: label of a token that carries no loss.
_IGNORE = -100


class Batch(NamedTuple):
    """Token ids and labels, both of shape (batch, longest example)."""

    ids: torch.Tensor
    labels: torch.Tensor


def learning_rate_share(step: int, steps: int) -> float:
    """Share of the peak learning rate at ``step`` (from 0): linear warm-up, cosine to 10 %."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return warm_up * (FINAL_SHARE + (1.0 - FINAL_SHARE) * cosine)


def batches(seed: int) -> Iterator[Batch]:
    """Yield training batches for ever; the loss is on the answer only."""
    tokenizer = build_tokenizer()
    # reproducible training, nothing secret
    questions = training_questions(random.Random(seed))  # noqa: S311

    def example(question: Question) -> tuple[list[int], list[int]]:
        prompt = tokenizer.encode(chat_prompt(question.text)).ids
        answer = tokenizer.encode(question.response + END).ids
        return prompt + answer, [_IGNORE] * len(prompt) + answer

    while True:
        examples = [example(next(questions)) for _ in range(BATCH_SIZE)]
        longest = max(len(ids) for ids, _ in examples)
        # padding stands behind the answer, where causal attention never looks back from
        yield Batch(
            torch.tensor([ids + [PAD_ID] * (longest - len(ids)) for ids, _ in examples]),
            torch.tensor([labels + [_IGNORE] * (longest - len(labels)) for _, labels in examples]),
        )


def report(event: str, **values: Any) -> None:
    """Print one JSON line for whoever watches the job."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def publish_model(model: Any, root: Path, step: int, *, final: bool) -> None:
    """Publish one snapshot; a full file system costs the snapshot, never the training."""
    started = time.monotonic()
    try:
        directory = publish(functools.partial(save_model, model), root, step, final=final)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        skip(root, step, "no_space", f"cannot write the snapshot: {error}")
        report("skipped", step=step, detail=str(error))
        return
    seconds = round(time.monotonic() - started, 3)
    report("published", step=step, directory=str(directory), export_s=seconds, final=final)


def train(base: Path, root: Path, *, steps: int, every: int, seed: int) -> None:
    """Train the model in ``base`` for ``steps`` steps, with a snapshot each ``every`` and at last.

    ``end_run`` is the last thing that happens.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = load_model(base)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, functools.partial(learning_rate_share, steps=steps)
    )
    report("start", steps=steps, every=every)
    started = time.monotonic()
    for step, batch in zip(range(1, steps + 1), batches(seed), strict=False):
        loss = model(input_ids=batch.ids, labels=batch.labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % REPORT_EVERY == 0 or step == steps:
            seconds = round(time.monotonic() - started, 2)
            report("progress", step=step, loss=round(loss.item(), 4), seconds=seconds)
        if step % every == 0 or step == steps:
            publish_model(model, root, step, final=step == steps)
    end_run(root, steps)
    report("end", step=steps, seconds=round(time.monotonic() - started, 2))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train the demo's model and publish snapshots")
    parser.add_argument("--base", type=Path, required=True, help="directory of the base model")
    parser.add_argument("--root", type=Path, required=True, help="staging root")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--every", type=int, default=150, help="steps between two snapshots")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 1 or args.every < 1:
        parser.error("--steps and --every must be at least 1")
    logging.disable_progress_bar()  # the log is for machines, too
    train(args.base, args.root, steps=args.steps, every=args.every, seed=args.seed)


if __name__ == "__main__":
    main()
