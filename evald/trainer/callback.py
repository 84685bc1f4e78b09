"""evald in a transformers training script, also TRL's: two lines.

    from evald.trainer.callback import EvaldCallback
    trainer.add_callback(EvaldCallback(trainer, "/dev/shm/evald", interval=100))

Nothing of it needs a rollout engine: plain supervised fine-tuning is a job like any other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import structlog
from transformers.trainer_callback import TrainerCallback

from evald.trainer.contract import trace_of
from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.trainer_log import OWN_STEP, SUMMARY, TrainerLog
from evald.trainer.trainer_setup import base_model, check_options, check_trainer, reuse_options
from evald.trainer.values import wait_seconds

log = structlog.get_logger(__name__)


class EvaldCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Gives evald the weights of a Trainer when they are due, and logs what comes back.

    ``trainer``: the Trainer itself; add the callback on every rank, before ``train()``. ``root``:
    evald's staging root. Steps are the Trainer's ``global_step``: 1 is the first finished one, 0
    is the baseline (switched off with ``baseline=False``).

    - When: every ``interval`` steps, at ``steps``, ``every_minutes``, and, beside these or alone,
      at the end of each epoch with ``epochs=True``. The last step is always evaluated, also off
      cadence and after an early stop; a resumed run begins with the step that it goes on from.
    - ``reuse=True``: evald reads the checkpoints that the Trainer saves anyway, in place; nothing
      is exported. ``interval`` is a multiple of ``save_steps``, or left out for all of them.
    - Results are logged at their own steps: in ``state.log_history`` as ``eval/...``, and by the
      Trainer's reporters (TensorBoard, W&B, ...). When training ends, it waits at most
      ``drain_timeout_s`` for those that are missing (0: not at all); the ledger gets them anyway.
      Until then it looks for them every ``poll_s``.
    - ``base_dir``: directory of the base model, which has tokenizer and config; None: where
      ``trainer``'s model was loaded from.
    - ``options``: whatever else ``EvalDispatcher`` takes: ``run``, ``results``, ``url`` and
      ``token_file``, ``destination``, ``mode="async"``, ``overflow``, ...

    ``evaluate()`` and ``predict()`` dispatch nothing, nor does a hyperparameter search. Raises
    ValueError for wrong arguments; whatever fails later is logged, and training goes on.
    """

    def __init__(
        self,
        trainer: Any,
        root: str | os.PathLike[str],
        *,
        interval: int | None = None,
        steps: Iterable[int] | None = None,
        every_minutes: float | None = None,
        epochs: bool = False,
        base_dir: str | os.PathLike[str] | None = None,
        reuse: bool = False,
        drain_timeout_s: float = 600.0,
        poll_s: float = 2.0,
        **options: Any,
    ) -> None:
        check_options(options, ("epochs", "reuse", "drain_timeout_s", "poll_s"))
        poll_s = wait_seconds("poll_s", poll_s)
        check_trainer(trainer, reuse=reuse, drain_timeout_s=drain_timeout_s)
        if options.get("mode", "sync") not in ({"sync"} if reuse else {"sync", "async"}):
            raise ValueError(
                f"cannot use mode={options['mode']!r} with reuse={reuse}: "
                "reuse=True alone reads the Trainer's checkpoints; sync and async export"
            )
        handler = getattr(trainer, "callback_handler", None)
        if any(isinstance(one, EvaldCallback) for one in getattr(handler, "callbacks", ())):
            raise ValueError(
                "cannot add a second EvaldCallback to one Trainer: each step has one point; keep "
                "the first, or trainer.remove_callback(EvaldCallback) before"
            )
        base_dir = base_dir or (None if reuse else base_model(trainer))
        when = {"interval": interval, "steps": steps, "every_minutes": every_minutes}
        named = {name: value for name, value in when.items() if value is not None}
        if reuse:
            options |= reuse_options(trainer, has_interval=bool(named), epochs=epochs)
            named = named or ({} if epochs else {"interval": options["save_interval"]})
        elif epochs and not named:
            named = {"steps": ()}  # none but those that are announced
        self._trainer = trainer
        self._epochs = epochs
        self._reuse = reuse
        self._drain_timeout_s = float(drain_timeout_s)
        self._log = TrainerLog(trainer, self)
        self._make = functools.partial(
            EvalDispatcher,
            root,
            first_step=1,
            base_dir=base_dir,
            # what the ledger has from before is sorted out in on_train_begin
            after_seq=0,
            **{**named, **options},
        )
        #: of one training; the first is made at once, so that wrong arguments show now.
        self._dispatcher: EvalDispatcher | None = self._first()
        self._training = False
        self._finished = False
        self._drained = False
        self._poll_s = poll_s
        self._polled_s = 0.0

    # --- events of the Trainer -------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Ask for the baseline, or go on from the step at which an earlier life has ended."""
        del args
        if state.is_hyper_param_search:
            log.warning("evald_not_used", detail="a hyperparameter search is many runs in one")
            return control
        with _surviving("begin"):
            self._dispatcher = self._dispatcher or self._make()
            self._training, self._finished, self._drained = True, False, False
            if state.global_step > 0:
                self._dispatcher.resume(state.global_step, self._weights())
            # (a run of no steps at all has nothing but its baseline)
            if state.global_step < state.max_steps or state.global_step == 0:
                self._dispatcher.baseline(completed_step=state.global_step)
        return self._log_from_before(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Publish a step that is due; not the last one, which is published when all is over."""
        del args
        if not self._reuse and state.global_step < state.max_steps:
            self._dispatch(state, epoch_end=False)
        if time.monotonic() - self._polled_s < self._poll_s:
            return control
        return self._poll(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publish the end of an epoch, if that was asked for, and the end of everything."""
        del args
        if self._epochs and not self._reuse and state.global_step < state.max_steps:
            self._dispatch(state, epoch_end=True)
        self._finish_if_over(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publish the last step when the Trainer's own evaluation has stopped the training."""
        del args
        if not control.should_save:  # else on_save comes, when the checkpoint is safe
            self._finish_if_over(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Point evald at the checkpoint that was saved, if checkpoints are reused."""
        del args
        if self._reuse and state.global_step < state.max_steps:
            self._dispatch(state, epoch_end=self._epochs)
        self._finish_if_over(state, control)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> Any:
        """Wait for what is missing when the Trainer logs its summary: all reporters listen."""
        if logs is None or SUMMARY not in logs:
            return control
        return self._end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Let go of everything; what was published is evaluated without the job."""
        control = self._end(args, state, control)
        with _surviving("end"):
            if self._dispatcher is not None:
                self._dispatcher.close()
        self._dispatcher, self._training = None, False
        return control

    # -------------------------------------------------------------------------------------------

    def _first(self) -> EvalDispatcher:
        try:
            return self._make()
        except ValueError as error:
            if "cannot tell when" in str(error):
                raise ValueError(
                    "cannot tell when a step is due: give interval, steps or every_minutes, or "
                    "epochs=True; steps=() evaluates only the last step"
                ) from error
            if "without base_dir" not in str(error):
                raise
            raise ValueError(
                "cannot export snapshots without base_dir: the Trainer's model does not say where "
                "it was loaded from; give the directory with tokenizer and config, or use "
                "reuse=True"
            ) from error

    def _weights(self) -> Any:
        return None if self._reuse else self._trainer.model

    def _dispatch(self, state: Any, *, epoch_end: bool) -> None:
        with _surviving("dispatch"):
            if self._training and self._dispatcher is not None:
                self._dispatcher.maybe_dispatch(
                    state.global_step, self._weights(), epoch_end=epoch_end
                )

    def _finish_if_over(self, state: Any, control: Any) -> None:
        """Publish the last step, as long as the weights are its own.

        At its end the Trainer may load those of its best checkpoint.
        """
        is_over = control.should_training_stop or state.global_step >= state.max_steps
        if is_over and not self._reuse:  # a checkpoint may still be saved
            self._finish(state, self._weights())

    def _finish(self, state: Any, weights: Any) -> None:
        with _surviving("finish"):
            if self._training and not self._finished and self._dispatcher is not None:
                self._finished = True
                self._dispatcher.finish(state.global_step, weights)

    def _end(self, args: Any, state: Any, control: Any) -> Any:
        """Finish, if that was not to be seen before, and wait for the results; once."""
        if not self._training or self._drained or self._dispatcher is None:
            return control
        is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._finish(state, None if is_best else self._weights())
        self._drained = True
        with _surviving("drain"):
            if self._drain_timeout_s > 0:
                drained = self._dispatcher.drain(self._drain_timeout_s)
                if not drained:
                    log.warning(
                        "results_not_awaited",
                        missing=list(drained.missing),
                        detail=f"{drained.detail}; the ledger gets what evald still measures",
                    )
        return self._poll(control)

    # --- results ---------------------------------------------------------------------------------

    def _points(self) -> list[dict[str, Any]]:
        """Return the new terminal records; none on ranks other than 0."""
        self._polled_s = time.monotonic()
        records = [] if self._dispatcher is None else self._dispatcher.poll()
        return [record for record in records if record.get("type") == "point"]

    def _poll(self, control: Any) -> Any:
        records: list[dict[str, Any]] = []
        with _surviving("poll"):
            if self._training:
                records = self._points()
        return self._log_all(records, control)

    def _log_all(self, records: Iterable[dict[str, Any]], control: Any) -> Any:
        """Log each of them; one that cannot be logged takes no other with it."""
        for record in records:
            with _surviving("log a record"):
                control = self._log.add(record, control)
        return control

    def _log_from_before(self, state: Any, control: Any) -> Any:
        """Log what has ended since the checkpoint that the job goes on from was saved.

        Points of later steps are of weights that this life makes anew.
        """
        missed: list[dict[str, Any]] = []
        with _surviving("look back"):
            logged = {entry["step"] for entry in state.log_history if OWN_STEP in entry}
            newest = {record["step"]: record for record in self._points() if "step" in record}
            missed = [
                record
                for step, record in sorted(newest.items())
                if step <= state.global_step and step not in logged
            ]
        return self._log_all(missed, control)


@contextlib.contextmanager
def _surviving(what: str) -> Iterator[None]:
    """Log what goes wrong; training goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # the boundary between training and its evaluation: whatever it is, it ends here
        log.warning("evald_callback_failed", what=what, detail=str(error), trace=trace_of(error))
