"""What the callback must know of a transformers Trainer before it trains."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

from evald.trainer.dispatcher import EvalDispatcher
from evald.trainer.values import known_names, wait_seconds

#: sharded by DeepSpeed: no rank has a whole parameter.
_ZERO_3 = 3
#: arguments of a dispatcher that the callback gives itself -> what to do instead.
_OWN = {
    "first_step": "the Trainer counts from 1; leave it out",
    "after_seq": "the callback reads what its run has; leave it out",
    "num_steps": "the Trainer knows its max_steps; leave it out",
    "epoch_steps": "the Trainer knows its epochs; use epochs=True",
}


def check_options(options: Mapping[str, Any], takes: Iterable[str]) -> None:
    """Raise ValueError, with the remedy, for what the callback or the dispatcher does not take."""
    for name in options:
        if name in _OWN:
            raise ValueError(f"cannot use {name} in EvaldCallback: {_OWN[name]}")
    dispatchers = inspect.signature(EvalDispatcher).parameters.keys() - _OWN.keys()
    known_names("EvaldCallback", options, {*dispatchers, *takes})


def check_trainer(trainer: Any, *, reuse: bool, drain_timeout_s: float) -> None:
    """Raise ValueError, with the remedy, for a Trainer whose weights cannot be had."""
    if not hasattr(trainer, "callback_handler") or not hasattr(trainer, "accelerator"):
        raise ValueError(
            f"cannot use {type(trainer).__name__} as trainer: give the transformers Trainer itself,"
            " EvaldCallback(trainer, root, ...)"
        )
    drain_timeout_s = wait_seconds("drain_timeout_s", drain_timeout_s)
    if drain_timeout_s < 0:
        raise ValueError(f"cannot drain for {drain_timeout_s:g} s: give 0 or more seconds")
    args = trainer.args
    if args.world_size > 1 and drain_timeout_s >= args.ddp_timeout:
        raise ValueError(
            f"cannot let rank 0 drain for {drain_timeout_s:g} s: the other ranks give up after "
            f"ddp_timeout={args.ddp_timeout} s; lower drain_timeout_s, or raise ddp_timeout"
        )
    plugins = trainer.accelerator.state
    deepspeed = getattr(plugins, "deepspeed_plugin", None)
    if not reuse and deepspeed is not None and deepspeed.zero_stage == _ZERO_3:
        raise ValueError(
            "cannot export weights that DeepSpeed ZeRO-3 has sharded: use ZeRO-2 or FSDP2, or "
            "reuse=True with stage3_gather_16bit_weights_on_model_save"
        )
    fsdp = getattr(plugins, "fsdp_plugin", None)
    if fsdp is None:
        return
    if reuse and "FULL_STATE_DICT" not in str(fsdp.state_dict_type):
        raise ValueError(
            f"cannot reuse checkpoints of {fsdp.state_dict_type}: they are no Hugging Face "
            "directories; set the state_dict_type FULL_STATE_DICT, or leave reuse out"
        )
    if not reuse and getattr(fsdp, "fsdp_version", 1) != 2:  # noqa: PLR2004 - FSDP2's own number
        raise ValueError(
            "cannot export weights that FSDP1 has flattened: set fsdp_version 2, or reuse=True "
            "with FULL_STATE_DICT checkpoints"
        )


def base_model(trainer: Any) -> str | None:
    """Return the directory, or hub id, that the Trainer's model was loaded from; None: unknown."""
    model = trainer.model
    if hasattr(model, "peft_config"):
        model = model.get_base_model()
    return getattr(model, "name_or_path", None) or None


def reuse_options(trainer: Any, *, has_interval: bool, epochs: bool) -> dict[str, Any]:
    """Return a dispatcher's options for the checkpoints that the Trainer saves.

    Raises ValueError for a Trainer that saves none, or saves them when nobody can foresee it.
    """
    args = trainer.args
    if hasattr(trainer.model, "peft_config"):
        raise ValueError(
            "cannot reuse the checkpoints of a peft model: they hold the adapter alone; leave "
            "reuse out, and the merged weights are exported"
        )
    options = {
        "mode": "reuse",
        "checkpoint_path": os.path.join(args.output_dir, "checkpoint-{step}"),  # noqa: PTH118
    }
    if epochs:
        if args.save_strategy != "epoch" or has_interval:
            raise ValueError(
                f"cannot reuse a checkpoint of each epoch with save_strategy={args.save_strategy}: "
                'set it to "epoch", without interval or steps here, or leave epochs out'
            )
        return {**options, "save_interval": 1, "steps": ()}
    save_steps = args.save_steps
    if args.save_strategy != "steps" or save_steps < 1 or save_steps != int(save_steps):
        raise ValueError(
            f"cannot reuse checkpoints with save_strategy={args.save_strategy} and "
            f'save_steps={save_steps}: set "steps" and a whole number of them; or "epoch" there '
            "and epochs=True here; or leave reuse out"
        )
    return {**options, "save_interval": int(save_steps)}
