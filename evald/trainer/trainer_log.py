"""Results in the log of a transformers Trainer, each at the step whose weights it is of."""

from __future__ import annotations

import copy
from typing import Any

import structlog

from evald.trainer.contract import trace_of

log = structlog.get_logger(__name__)

_PREFIX = "eval/"
#: only the log entry that ends a training has it; people read it as ``log_history[-1]``.
SUMMARY = "train_runtime"
#: every entry of evald's has it, and no other.
OWN_STEP = "eval/step"


class TrainerLog:
    """Puts what evald measured where a Trainer's own metrics go.

    ``own``: the callback that is never told. ``trainer.log`` is not the way: it logs at the current
    step, and trainers that override it add their own running averages.
    """

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        self._own = own
        self._broken: set[str] = set()
        #: what may change how training goes on: on one of several ranks it would make them differ.
        self._may_steer = trainer.args.world_size == 1

    def add(self, record: dict[str, Any], control: Any) -> Any:
        """Log a terminal record at its own step, which lies in the past; return the control.

        ``state.log_history`` gets the record's names (``eval/copy``). The other callbacks'
        ``on_log`` gets the Trainer's (``eval_copy``, of which its reporters make ``eval/copy``
        again), with a state whose ``global_step`` is the point's: reporters read theirs there.
        """
        state, step = self._trainer.state, record["step"]
        then = copy.copy(state)
        then.global_step = step
        # steps are equally long parts of an epoch, but for a last one that accumulates less
        then.epoch = round((state.epoch or 0) * step / max(state.global_step, 1), 6)
        history = state.log_history
        metrics = record.get("metrics") or {}
        entry = {**metrics, "epoch": then.epoch, "step": step}
        history.insert(len(history) - bool(history and SUMMARY in history[-1]), entry)
        logs = {_trainer_name(name): value for name, value in metrics.items()}
        logs["epoch"] = then.epoch
        for callback in self._trainer.callback_handler.callbacks:
            if callback is not self._own:
                control = self._tell(callback, then, control, logs)
        return control

    def _tell(self, callback: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        handler, name = self._trainer.callback_handler, type(callback).__name__
        try:
            told = callback.on_log(
                self._trainer.args,
                state,
                control if self._may_steer else copy.copy(control),
                logs=dict(logs),
                model=handler.model,
                processing_class=handler.processing_class,
                optimizer=handler.optimizer,
                lr_scheduler=handler.lr_scheduler,
                train_dataloader=handler.train_dataloader,
                eval_dataloader=handler.eval_dataloader,
            )
        except Exception as error:  # noqa: BLE001
            # the boundary: somebody's reporter must not end the training over a late point
            if name not in self._broken:
                self._broken.add(name)
                log.warning(
                    "reporter_failed",
                    callback=name,
                    step=state.global_step,
                    detail=str(error),
                    trace=trace_of(error),
                )
            return control
        return control if told is None or not self._may_steer else told


def _trainer_name(name: str) -> str:
    return f"eval_{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name
