"""The daemon's config in a chaos run, and what is asked of the models."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from evald.testing import Decode

from .places import Places
from .plan import RUN, VARY, Plan

#: questions of each eval set, samples of each question: by name of the set.
QUESTIONS, SAMPLES = 6, {"a": 1, "b": 2}


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take, seconds."""

    #: the last point has its record this long after the last fault, or the run hangs.
    end_s: float
    #: from the daemon's start to its first engine.
    start_s: float
    #: limits in the config.
    sample: int
    point: int
    load: int
    alive: int
    probe: int
    #: of a response, at most.
    tokens: int


FAKE = Times(end_s=60, start_s=30, sample=3, point=15, load=3, alive=20, probe=2, tokens=300)
REAL = Times(end_s=300, start_s=180, sample=60, point=240, load=60, alive=180, probe=20, tokens=16)
#: of fake engines: some responses of each point take much longer than the others, so that the next
#: point begins beside them; the longest is far from the limit.
DECODE = Decode(step_s=0.001, slots=16, median_tokens=20, p99_tokens=120)
#: a response of an untrained model is right when it has one of these in it: about every second one.
LETTERS = ["a", "e", "k", "q", "u", "z"]

CONFIG = """
run = "{run}"
[staging]
root = "{root}"
scan_interval_s = 0.3
{staging}
[dispatch]
sample_timeout_s = {times.sample}
point_deadline_s = {times.point}
drain_timeout_s = 2
{dispatch}
[results]
dir = "{results}"
{results_table}
[status]
socket = "{work}/evald.sock"
[fleet]
model = "{work}/base"
{python}
device = "cpu"
engines = {engines}
stop_grace_s = 2
start_timeout_s = {times.alive}
load_timeout_s = {times.load}
drain_timeout_s = 2
alive_timeout_s = {times.alive}
probe_interval_s = 1
probe_timeout_s = {times.probe}
probe_failures = 2
[defaults]
grader = "{grader}"
temperature = 0.0
max_response_len = {times.tokens}
"""


def label(number: int) -> str:
    """Give the right answer to a question: some are answered rightly by each snapshot."""
    return str(number // 2 % VARY)


def write_config(places: Places, plan: Plan, *, real: bool) -> Path:
    """Write the config and the eval sets; ``real``: for SGLang."""
    work = places.work
    text = CONFIG.format(
        run=RUN,
        root=places.root,
        results=places.results,
        work=work,
        staging=plan.staging,
        dispatch=plan.dispatch,
        results_table=plan.results,
        times=REAL if real else FAKE,
        python="" if real else f'python = "{work}/python"',
        grader="contains" if real else "boxed_exact",
        engines=plan.engines,
    )
    for name, samples in SAMPLES.items():
        rows = [
            {"prompt": f"{name}{number}?", "label": LETTERS if real else label(number)}
            for number in range(QUESTIONS)
        ]
        path = work / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text += (
            f'[[eval]]\nname = "{name}"\npath = "{path}"\nn_samples_per_eval_prompt = {samples}\n'
        )
    config = work / "config.toml"
    config.write_text(text)
    return config
