"""From a wrapped or sharded model to plain full tensors, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from evald.trainer.contract import ExportError, PeerLost
from evald.trainer.ranks import cause_of

#: what wrappers put into the names of parameters, wherever the wrapped module stands.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: what DistributedDataParallel, DataParallel and engines put before the names of the whole model.
_OUTER = "module"


def canonical_name(name: str) -> str:
    """Return a parameter's name in the unwrapped model, which is its name in HF checkpoints."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == _OUTER:
        del parts[0]
    return ".".join(parts)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the HF or peft model inside DDP, torch.compile and other wrappers.

    FSDP2 modules are brought into their sharded state: after a forward pass without a backward one
    the unsharded parameters, of the forward's dtype, would pass for the model's own. Local, cheap.

    Raises ExportError for FSDP1, whose parameters are flat pieces without shapes.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ExportError(
                "cannot export a model wrapped in FullyShardedDataParallel (FSDP1): its parameters"
                " have no shapes of their own; use fully_shard (FSDP2), or hand over a full state"
                " dict, from torch.distributed.checkpoint.state_dict.get_model_state_dict"
            )
        if isinstance(module, FSDPModule):
            module.reshard()
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether reading the whole tensor takes a collective call."""
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def full_tensor(tensor: torch.Tensor, *, keep: bool, name: str = "a tensor") -> torch.Tensor | None:
    """Return the whole tensor, detached, or None with ``keep=False``.

    Collective for a sharded tensor: every rank calls it, in the same order, also where it is not
    kept; it is then freed before the return. A plain or replicated tensor is returned as it is,
    without a copy. A gathered one is a new tensor: let go of it before the next.

    Parameters that FSDP2 offloads to the CPU are gathered on the GPU, where their group works. The
    wait for other ranks is bounded by the timeout of the training's own group.

    Raises PeerLost when a rank died or did not come, ExportError for what has no data or no room;
    ``name`` is for their messages.
    """
    if not is_sharded(tensor):
        if not keep:
            return None
        plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return _with_data(plain.detach(), name)
    _with_data(tensor, name)
    try:
        with torch.no_grad():
            full = _transportable(tensor).full_tensor().view(tensor.dtype)
    except (torch.OutOfMemoryError, NotImplementedError) as error:
        raise ExportError(f"cannot gather {name}: {cause_of(error)}") from error
    except RuntimeError as error:
        raise PeerLost(
            f"cannot gather {name}: another rank died or did not come ({cause_of(error)});"
            " see the logs of the other ranks"
        ) from error
    return full if keep else None


def _inner(model: nn.Module) -> nn.Module | None:
    """Return the one module that a wrapper wraps; None when ``model`` is no wrapper."""
    children = dict(model.named_children())
    if len(children) != 1:
        return None
    [(name, child)] = children.items()
    return child if name in _WRAPPERS or name == _OUTER else None


def _transportable(tensor: Any) -> Any:
    """Return a DTensor on the device of its mesh, in a dtype that every backend can gather."""
    mesh = tensor.device_mesh
    if tensor.device.type != mesh.device_type:
        tensor = tensor.to(mesh.device_type)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:  # gloo knows no fp8
        tensor = DTensor.from_local(
            tensor.to_local().view(torch.uint8),
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor


def _with_data(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.is_meta:
        raise ExportError(
            f"cannot export {name}: it is on the meta device, without data; materialise the model"
            " before the export"
        )
    return tensor
