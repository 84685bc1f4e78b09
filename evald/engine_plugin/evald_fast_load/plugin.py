"""The plugin: updates that ask for the load format ``safetensors`` are read by ``reader``.

Every other load is SGLang's own, and so is this one wherever the plugin is not: the name of the
format means no harm there. The message of an update says whether it was read here, and how much
memory the GPU has left.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .reader import default_threads, read_tensors
from .shards import Unsupported

logger = logging.getLogger(__name__)

#: load format of the updates that are read here.
LOAD_FORMAT = "safetensors"
#: in the message of every update.
MARK = "evald_fast_load"

_LOADER = "sglang.srt.model_loader.weight_utils"
_ITERATORS = ("safetensors_weights_iterator", "buffered_multi_thread_safetensors_weights_iterator")
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
#: only its process loads weights.
_SCHEDULER = "sglang.srt.managers.scheduler"


class Update:
    """One update, whether it shall go the fast way, and how far it has come on it."""

    def __init__(self, *, fast: bool) -> None:
        #: one try: if that fails, SGLang's own loader makes the roll-back.
        self.fast = fast
        self.complete = False
        self.size_bytes = 0


class Plugin:
    """Decides who reads: it knows the update that is under way in this process."""

    def __init__(self) -> None:
        self._update: Update | None = None

    def update(
        self,
        original: Callable[..., tuple[bool, str]],
        updater: Any,
        model_path: str,
        load_format: str,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[bool, str]:
        """Let an update that asks for it go the fast way; add to its message what happened."""
        update = Update(fast=load_format == LOAD_FORMAT)
        self._update = update
        try:
            success, message = original(updater, model_path, load_format, *args, **kwargs)
        finally:
            self._update = None
        if success:
            message += _report(update)
            logger.info(message)
        return success, message

    def weights(
        self,
        original: Callable[..., Iterator[tuple[str, Any]]],
        files: list[str],
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[tuple[str, Any]]:
        """Stand in for SGLang's iterators over the tensors of ``files``."""
        update = self._update
        if update is None or not update.fast:
            return original(files, *args, **kwargs)
        update.fast = False
        try:
            return _noted(_fast(files), update)
        except Unsupported as error:
            logger.warning("SGLang's own loader reads this snapshot: %s", error)
            return original(files, *args, **kwargs)


def register() -> None:
    """Put the plugin into the loader; called by SGLang in each of its processes."""
    if _SCHEDULER not in sys.modules:
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    plugin, around = Plugin(), hooks.HookType.AROUND
    hooks.HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", plugin.update, around)
    for name in _ITERATORS:
        hooks.HookRegistry.register(f"{_LOADER}.{name}", plugin.weights, around)


def _fast(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return read_tensors(files, device=_device(), threads=default_threads(ranks))


def _device() -> torch.device:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _report(update: Update) -> str:
    """Say what evald reads out of a message: see ``evald/engines/fast_pin.py``."""
    said = f" {MARK}:"
    if update.complete:
        said += f" {update.size_bytes} bytes read;"
    if _device().type == "cuda":
        # SGLang has just emptied torch's cache: what is gone for good is missing here
        said += f" {torch.cuda.mem_get_info()[0]} bytes free;"
    return said


def _noted(
    tensors: Iterator[tuple[str, torch.Tensor]], update: Update
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        update.size_bytes += tensor.nbytes
        yield name, tensor
        del tensor  # its memory is wanted for what comes next
    update.complete = True
