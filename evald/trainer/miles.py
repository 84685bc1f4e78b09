"""miles hands each checkpoint to a running evald and gets its results back.

    --eval-function-path evald.trainer.miles.EvaldCheckpointEval

and, beside ``--eval-hf-dir`` or ``--save-hf``, in the launcher's environment:

- EVALD_ROOT: evald's staging root, as this host sees it. A request names miles' directory, which
  evald reads in place, by the same path.
- EVALD_DESTINATION, instead: the root on another host, "host:/dev/shm/evald". The directory is
  copied there; its name must fit evald's pattern. It needs EVALD_URL.
- EVALD_RESULTS: evald's ledger or its directory, if evald's own path for it is not valid here.
- EVALD_URL, instead: evald's HTTP API, "http://host:port"; EVALD_TOKEN_FILE: file of its token.
- EVALD_RUN: run id; default: that of evald's config.
- EVALD_TIMEOUT_S: how long miles waits for one point, queueing included; default 14400.

miles then logs what evald measured: rewards and samples of each set, and evald's own metrics beside
them (pass@k is among these: leave ``--log-passrate`` off). A skipped point is skipped in miles with
the same reason; ``unhealthy`` when evald shows no sign of life, ``deadline`` after the timeout.

The step is miles' rollout id, from 0. The model before the first step (``--hf-checkpoint``, rollout
0 as well) is evald's baseline at step -1, so that evald never mixes it up with the first step;
miles itself logs both at its step 0.

Written from miles' documentation of its contract for checkpoint evaluation (August 2026): a class
by its path, ``evaluate_checkpoint``, ``dispose``, ``EvalSkip``, and ``rewards``, ``truncated`` and
``samples`` for each set. Tested with a stand-in of that shape; not yet tried inside miles.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

# a part of the training job that imports this module, not of evald's own environment
from miles.rollout.base_types import RolloutFnEvalOutput  # type: ignore[import-not-found]
from miles.rollout.checkpoint_eval import (  # type: ignore[import-not-found]
    CheckpointEvalFn,
    EvalSkip,
)
from miles.utils.types import Sample  # type: ignore[import-not-found]

from evald.point import Kind
from evald.trainer.links.file_link import FileLink
from evald.trainer.links.http_link import HttpLink
from evald.trainer.point_records import NotMeasured
from evald.trainer.push import carrier_for
from evald.trainer.request import Ask, Hand, Requester, hand_in_place, hand_over

log = structlog.get_logger(__name__)

BASELINE_STEP = -1
_TIMEOUT_S = 14_400.0


class EvaldCheckpointEval(CheckpointEvalFn):  # type: ignore[misc] # miles is not there to be typed
    """miles' checkpoint evaluation, done by evald; configured by the environment (see above)."""

    def __init__(self, input: Any) -> None:  # noqa: A002 - miles' name
        """Read the environment; raises ValueError with the remedy. Nothing is contacted yet."""
        super().__init__(input)
        settings = Settings(os.environ)
        self._args = input.args
        self._timeout_s = settings.timeout_s
        self._link = settings.link()
        self._requester = Requester(self._link, settings.hand(), run=settings.run)

    async def evaluate_checkpoint(self, checkpoint_dir: str, input: Any) -> Any:  # noqa: A002
        """Have evald measure the directory as step ``rollout_id``; raises miles' EvalSkip."""
        ask = self._ask(checkpoint_dir, input.rollout_id)
        try:
            answer = await self._requester.measure(ask, timeout_s=self._timeout_s)
        except NotMeasured as error:
            log.warning("point_skipped", step=ask.step, reason=error.reason, detail=str(error))
            raise EvalSkip(error.reason) from error
        data = await self._data(answer.point["record_id"], answer.point["digest"], answer.sets)
        # miles has an axis of its own
        metrics = {name: x for name, x in answer.point["metrics"].items() if name != "eval/step"}
        return RolloutFnEvalOutput(data=data, metrics=metrics)

    def dispose(self) -> None:
        """Let go of files and connections."""
        self._link.close()

    def _ask(self, checkpoint_dir: str, rollout_id: int) -> Ask:
        base = str(self._args.hf_checkpoint)
        if checkpoint_dir == base or os.path.realpath(checkpoint_dir) == os.path.realpath(base):
            # a hub id is no directory: evald knows its base model
            directory = Path(checkpoint_dir) if Path(checkpoint_dir).is_dir() else None
            return Ask(BASELINE_STEP, directory, Kind.BASELINE)
        return Ask(rollout_id, Path(checkpoint_dir))

    async def _data(
        self, record_id: str, digest: str | None, sets: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Read the samples of each set; one whose samples cannot be read has its metrics only."""
        data = {}
        for one in sets:
            name = one["set"]
            rows = await asyncio.to_thread(self._link.samples, record_id, name)
            if rows:
                rows = [row for row in rows if row["digest"] == digest]
                data[name] = self._results(rows, one["counts"]["n_total"])
            else:
                log.warning("samples_missing", record_id=record_id, set=name)
        return data

    def _results(self, rows: list[dict[str, Any]], n_total: int) -> dict[str, Any]:
        """Make one set's results of its samples; what was cut by a deadline has no reward."""
        newest = {(row["question"], row["sample"]): row for row in rows}
        questions = sorted({question for question, _ in newest}, key=_by_number)
        number = {question: index for index, question in enumerate(questions)}
        ordered = sorted(newest.values(), key=lambda row: (number[row["question"]], row["sample"]))
        samples = [
            self._sample(row, index, number[row["question"]]) for index, row in enumerate(ordered)
        ]
        scores = [_score(row) for row in ordered]
        for index in range(len(ordered), n_total):
            samples.append(self._sample({"status": "timeout"}, index, None))
            scores.append(None)
        truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
        return {"rewards": scores, "truncated": truncated, "samples": samples}

    def _sample(self, row: dict[str, Any], index: int, group_index: int | None) -> Any:
        score, label = _score(row), row.get("reference")
        key = getattr(self._args, "reward_key", None)
        return Sample(
            index=index,
            group_index=group_index,
            response=row.get("response", ""),
            response_length=row.get("n_tokens", 0),
            label=None if label is None else str(label),
            # miles looks a reward up by this key where it is set
            reward={key: score} if key else score,
            status=_status(row),
            metadata={name: row[name] for name in _METADATA if name in row},
        )


class Settings:
    """What the environment says; raises ValueError with the remedy."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._said = {name: value for name, value in environment.items() if value}
        self.run = self._said.get("EVALD_RUN")
        self.timeout_s = self._seconds("EVALD_TIMEOUT_S", _TIMEOUT_S)
        if ("EVALD_ROOT" in self._said) == ("EVALD_DESTINATION" in self._said):
            raise _wrong("give one of EVALD_ROOT and EVALD_DESTINATION")
        if "EVALD_RESULTS" in self._said and "EVALD_URL" in self._said:
            raise _wrong("give one of EVALD_RESULTS and EVALD_URL, not both")
        if "EVALD_DESTINATION" in self._said and "EVALD_URL" not in self._said:
            raise _wrong("EVALD_DESTINATION needs EVALD_URL, over which the results come back")

    def link(self) -> FileLink | HttpLink:
        """Make the way to ask evald."""
        if "EVALD_URL" in self._said:
            return HttpLink(self._said["EVALD_URL"], token_file=self._said.get("EVALD_TOKEN_FILE"))
        return FileLink(self._said["EVALD_ROOT"], self._said.get("EVALD_RESULTS"))

    def hand(self) -> Hand:
        """Make the way to give evald requests."""
        if "EVALD_ROOT" in self._said:
            return functools.partial(hand_in_place, Path(self._said["EVALD_ROOT"]))
        destination = self._said["EVALD_DESTINATION"]
        return functools.partial(hand_over, lambda root: carrier_for(destination, root=root))

    def _seconds(self, name: str, default: float) -> float:
        text = self._said.get(name, str(default))
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise _wrong(f"{name}={text} is no number of seconds, e.g. {default:g}")
        return seconds


def _wrong(remedy: str) -> ValueError:
    return ValueError(
        f"cannot reach evald: {remedy}; set it where miles is launched (the docstring of "
        "evald.trainer.miles has them all)"
    )


_METADATA = ("question", "sample", "grader_reason", "engine", "weight_version", "latency_s")


def _score(row: dict[str, Any]) -> float | None:
    return row.get("score") if row["status"] == "scored" else None


def _status(row: dict[str, Any]) -> Any:
    if row["status"] == "timeout":
        return Sample.Status.ABORTED
    if row["status"] == "error":
        return Sample.Status.FAILED
    return Sample.Status.TRUNCATED if row.get("truncated") else Sample.Status.COMPLETED


def _by_number(question: str) -> tuple[int, str]:
    """Sort row numbers as numbers."""
    return (int(question) if question.isdecimal() else 0, question)
