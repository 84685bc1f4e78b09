"""The faults of SGLang that a supervisor can meet: how each is provoked, what must come of it."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fault_stage import DOWN, Stage

from evald.testing import Tensor, model_tensors, write_snapshot

# the builders of the tests' bad snapshots are in no package
sys.path.append(str(Path(__file__).parents[1] / "tests" / "integration"))
from bad_snapshots import BAD

UNKNOWN_TOKEN = 999_999
#: samples of a point that is well under way.
SOME = 5


class Row(msgspec.Struct, frozen=True):
    """One fault. ``act`` provokes it and drops the snapshot of a step; see ``Stage.mark``.

    ``end``: outcome or skip reason of that step. ``down``: the state that the engine must pass, ""
    when it must not be touched. ``quick``: a fake engine can play it, and soon.
    """

    name: str
    did: str
    act: Callable[[Stage, int], None]
    end: str = "ok"
    down: str = "unhealthy"
    quick: bool = True


class Group(msgspec.Struct, frozen=True):
    """Rows that share a daemon (its engine's fifth restart that counts would be quarantine).

    The rest is for ``Stage``.
    """

    rows: list[Row]
    questions: int = 5
    staging: str = ""
    start_s: float = 120.0


# --- how faults are provoked ---------------------------------------------------------------------


def in_mid_point(fault: Callable[[Stage], None]) -> Callable[[Stage, int], None]:
    """Provoke a fault while the engine answers a point's requests."""

    def act(stage: Stage, step: int) -> None:
        stage.drop(step)
        stage.wait(lambda: len(stage.samples(step)) > SOME, "it is being answered")
        stage.mark()
        fault(stage)

    return act


def signalled(process: str, number: signal.Signals) -> Callable[[Stage, int], None]:
    """Send a signal to one of the engine's processes in mid-point."""
    return in_mid_point(lambda stage: stage.kill(process, number))


def posted(path: str, body: object) -> Callable[[Stage, int], None]:
    """Send the engine a request behind evald's back in mid-point."""
    return in_mid_point(lambda stage: stage.post(path, body))


def in_start(process: str, number: signal.Signals) -> Callable[[Stage, int], None]:
    """Send a signal to the launcher as soon as ``process`` is there, and before it is ready."""

    def act(stage: Stage, step: int) -> None:
        stage.relaunch()
        stage.process(process)
        stage.mark()
        stage.kill("launcher", number)
        stage.drop(step)

    return act


def frozen_load(stage: Stage, step: int) -> None:
    """Freeze the server just before it is told to load."""
    stage.mark()
    stage.kill("scheduler", signal.SIGSTOP)
    stage.drop(step)


def port_taken(*, silent: bool) -> Callable[[Stage, int], None]:
    """Take the engine's port at its launch, until the engine has been given up."""

    def act(stage: Stage, step: int) -> None:
        with stage.squatter(silent=silent):
            stage.drop(step)
            stage.wait(lambda: DOWN & set(stage.path()), "it is given up")

    return act


def model_missing(stage: Stage, step: int) -> None:
    """Take the base model away for one launch."""
    model = stage.rig.model
    away = model.with_name("away")
    model.rename(away)
    stage.mark()
    stage.relaunch()
    stage.wait(lambda: DOWN & set(stage.path()), "the launch fails")
    away.rename(model)
    stage.drop(step)


def snapshot(build: Callable[[Path], None]) -> Callable[[Stage, int], None]:
    """Drop a snapshot that is not as it should be."""

    def act(stage: Stage, step: int) -> None:
        directory = stage.rig.root / f"step_{step}"
        build(directory)
        stage.mark()
        (directory / ".complete").touch()

    return act


def vanishing(stage: Stage, step: int) -> None:
    """Delete a snapshot that queues."""
    ctl = ("ctl", "--target", str(stage.rig.config))
    stage.rig.evald(ctl[0], "pause", *ctl[1:])
    stage.drop(step)
    stage.wait(lambda: stage.rig.status().get("queued"), "it queues")
    stage.mark()
    shutil.rmtree(stage.rig.root / f"step_{step}")
    stage.rig.evald(ctl[0], "resume", *ctl[1:])


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Build a snapshot with one tensor changed."""

    def build(directory: Path) -> None:
        tensors = model_tensors(seed=3, answer=1)
        tensors[name] = change(tensors[name])
        write_snapshot(directory, tensors=tensors, marker=None)

    return build


def half(tensor: Tensor) -> Tensor:
    """Cut the first dimension in half."""
    first, *rest = tensor.shape
    return Tensor(tensor.dtype, (first // 2, *rest), tensor.data[: len(tensor.data) // 2])


def extra_tensor(directory: Path) -> None:
    """Build a snapshot with a tensor that the base model does not have."""
    extra = {"model.extra.weight": Tensor("BF16", (2,), b"\0" * 4)}
    write_snapshot(directory, tensors=model_tensors(seed=4, answer=1) | extra, marker=None)


def fp32(directory: Path) -> None:
    """Build a snapshot in float32: bfloat16 is its upper half."""
    wide = {
        name: Tensor(
            "F32", shape, b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        )
        for name, (_, shape, data) in model_tensors(seed=5, answer=1).items()
    }
    write_snapshot(directory, tensors=wide, marker=None)


def no_config(directory: Path) -> None:
    """Build a snapshot without config.json."""
    write_snapshot(directory, seed=6, answer=1, marker=None)
    (directory / "config.json").unlink()


# --- the rows ------------------------------------------------------------------------------------

KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP
NORM = changed("model.norm.weight", half)
PROJECTION = BAD["wrong shape"].build
RELABEL = {"new_version": "somebody-else", "abort_all_requests": False}
POISON = {"input_ids": [UNKNOWN_TOKEN], "sampling_params": {"max_new_tokens": 4}}
OFF = 'validation = "off"'
BLAMED: dict[str, Any] = {"end": "pin_violation", "down": "tainted"}
REFUSED: dict[str, Any] = {"end": "invalid_snapshot", "down": ""}

GROUPS = [
    Group(
        questions=400,
        rows=[
            Row(
                "launcher-kill", "SIGKILL of the launcher in mid-point", signalled("launcher", KILL)
            ),
            Row(
                "scheduler-kill",
                "SIGKILL of the scheduler in mid-point",
                signalled("scheduler", KILL),
                quick=False,
            ),
            Row(
                "detokenizer-kill",
                "SIGKILL of the detokenizer in mid-point",
                signalled("detokenizer", KILL),
                quick=False,
            ),
            Row(
                "scheduler-stop",
                "SIGSTOP of the scheduler in mid-point",
                signalled("scheduler", STOP),
            ),
        ],
    ),
    Group(
        questions=400,
        rows=[
            Row(
                "guard-kill", "SIGKILL of the engine's guard in mid-point", signalled("guard", KILL)
            ),
            Row(
                "launcher-term",
                "SIGTERM of the launcher in mid-request",
                signalled("launcher", TERM),
                quick=False,
            ),
            Row(
                "paused",
                "POST /pause_generation by a stranger in mid-point",
                posted("/pause_generation", {"mode": "in_place"}),
                quick=False,
            ),
            Row(
                "unknown-token",
                "a stranger's request with an id beyond the vocabulary",
                posted("/generate", POISON),
                quick=False,
            ),
        ],
    ),
    Group(
        questions=400,
        rows=[
            Row(
                "relabelled",
                "POST /update_weight_version by a stranger in mid-point",
                posted("/update_weight_version", RELABEL),
                quick=False,
            ),
            Row(
                "start-term",
                "SIGTERM of the launcher during its start",
                in_start("detokenizer", TERM),
                quick=False,
            ),
        ],
    ),
    Group(
        start_s=75.0,
        rows=[
            Row(
                "start-kill",
                "SIGKILL of the launcher during its start",
                in_start("scheduler", KILL),
            ),
            Row(
                "model-missing", "no base model directory at one launch", model_missing, quick=False
            ),
            Row("port-foreign", "another server holds the port", port_taken(silent=False)),
            Row(
                "port-silent",
                "a listener that says nothing holds the port",
                port_taken(silent=True),
                quick=False,
            ),
        ],
    ),
    Group(
        rows=[
            Row("truncated", "truncated shard", snapshot(BAD["truncated shard"].build), **REFUSED),
            Row("norm-shape", "a norm of half the size", snapshot(NORM), **REFUSED),
            Row(
                "projection-shape", "a projection of half the rows", snapshot(PROJECTION), **REFUSED
            ),
            Row(
                "missing-tensor",
                "one tensor missing",
                snapshot(BAD["missing tensor"].build),
                **REFUSED,
            ),
            Row("extra-tensor", "one tensor too many", snapshot(extra_tensor), **REFUSED),
            Row("fp32", "float32 instead of bfloat16", snapshot(fp32), down=""),
            Row("no-config", "no config.json", snapshot(no_config), down=""),
            Row(
                "vanishing", "the directory vanishes while it queues", vanishing, "ckpt_missing", ""
            ),
            Row(
                "frozen-load",
                "SIGSTOP of the scheduler before a load (tainted)",
                frozen_load,
                down="tainted",
                quick=False,
            ),
            Row("nan", "NaN in a norm", snapshot(BAD["NaN"].build), **BLAMED),
        ]
    ),
    Group(
        staging=OFF,
        rows=[
            Row(
                "truncated-off",
                "truncated shard, validation off",
                snapshot(BAD["truncated shard"].build),
                **BLAMED,
            ),
            Row(
                "norm-shape-off",
                "a norm of half the size, validation off",
                snapshot(NORM),
                quick=False,
                **BLAMED,
            ),
            Row(
                "no-weights-off",
                "no weights (update answers 400), validation off",
                snapshot(BAD["marker without weights"].build),
                **BLAMED,
            ),
            Row(
                "projection-off",
                "a projection of half the rows, validation off: loaded, padded",
                snapshot(PROJECTION),
                down="",
                quick=False,
            ),
            Row(
                "missing-off",
                "one tensor missing, validation off: loaded, old and new mixed",
                snapshot(BAD["missing tensor"].build),
                down="",
            ),
            Row(
                "extra-off", "one tensor too many, validation off", snapshot(extra_tensor), down=""
            ),
        ],
    ),
]
