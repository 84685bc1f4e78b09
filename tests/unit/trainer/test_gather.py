"""Wrapped and sharded models give plain full tensors under the names of HF checkpoints."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from evald.trainer.contract import ExportError
from evald.trainer.export.gather import canonical_name, full_tensor, is_sharded, unwrap
from evald.trainer.export.pieces import spec_of


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A real job of one process: every collective call runs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Tiny(nn.Module):  # type: ignore[misc] # torch is untyped here
    """The shape of an HF model, as far as wrappers care."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "norm": nn.LayerNorm(4)})
        self.lm_head = nn.Linear(4, 6, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model["norm"](self.model["embed"](ids))
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


NAMES = ["model.embed.weight", "model.norm.weight", "model.norm.bias", "lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("module.lm_head.weight", "lm_head.weight"),
        ("module.module.lm_head.weight", "lm_head.weight"),
        ("_orig_mod.module._orig_mod.lm_head.weight", "lm_head.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("_fsdp_wrapped_module.model._fsdp_wrapped_module.norm.bias", "model.norm.bias"),
        ("model.layers.0._orig_mod.mlp.weight", "model.layers.0.mlp.weight"),
        # inside the model it is somebody's own name
        ("model.module.weight", "model.module.weight"),
        ("module", "module"),
        ("modules.weight", "modules.weight"),
    ],
)
def test_canonical_name(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_wrappers_are_taken_off(mesh: DeviceMesh) -> None:
    assert mesh.size() == 1
    tiny = Tiny()
    assert unwrap(tiny) is tiny
    assert unwrap(DataParallel(tiny)) is tiny
    ddp = DistributedDataParallel(tiny)
    compiled = torch.compile(ddp, backend="eager")  # the rest takes longer to import
    assert [canonical_name(name) for name, _ in compiled.named_parameters()] == NAMES
    assert unwrap(compiled) is tiny
    # a model of one child is no wrapper
    assert isinstance(unwrap(nn.Sequential(tiny)), nn.Sequential)


def test_fsdp2_after_a_forward_pass_is_exported_as_it_is_stored(mesh: DeviceMesh) -> None:
    tiny = Tiny()
    stored = {name: value.clone() for name, value in tiny.state_dict().items()}
    model = fully_shard(tiny, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert isinstance(model, FSDPModule)
    assert unwrap(model) is tiny  # also before the first forward pass
    with torch.no_grad():
        model(torch.tensor([1, 2]))
    # what would be taken for the weights: whole, and rounded
    assert {parameter.dtype for parameter in tiny.parameters()} == {torch.bfloat16}
    unwrap(model)
    for name, parameter in tiny.named_parameters():
        assert is_sharded(parameter)
        whole = full_tensor(parameter, keep=True)
        assert whole is not None
        assert not whole.requires_grad
        assert whole.dtype == torch.float32
        assert torch.equal(whole, stored[name])
    model(torch.tensor([1, 2])).sum().backward()  # training goes on


def test_fsdp1_is_refused(mesh: DeviceMesh) -> None:
    assert mesh.size() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process shards nothing; and FSDP1 is deprecated
        model = FullyShardedDataParallel(Tiny(), device_id=torch.device("cpu"))
    with pytest.raises(ExportError, match=r"FSDP1.*use fully_shard .* or hand over a full state"):
        unwrap(model)
    with pytest.raises(ExportError, match="FSDP1"):
        unwrap(nn.ModuleDict({"a": nn.Linear(1, 1), "b": model}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_tensor_is_gathered(mesh: DeviceMesh, dim: int, dtype: torch.dtype) -> None:
    whole = torch.arange(15.0).reshape(5, 3).to(dtype)
    part = DTensor.from_local(whole, mesh, [Shard(dim)])
    assert is_sharded(part)
    assert spec_of("a", part).shape == (5, 3)
    gathered = full_tensor(part, keep=True)
    assert gathered is not None
    assert type(gathered) is torch.Tensor
    assert gathered.dtype == dtype
    assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
    assert full_tensor(part, keep=False) is None


def test_plain_and_replicated_tensors_are_not_copied(mesh: DeviceMesh) -> None:
    plain = nn.Parameter(torch.ones(3, 2))
    replicated = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    for tensor, data in ((plain, plain), (replicated, replicated.to_local())):
        assert not is_sharded(tensor)
        assert spec_of("a", tensor).shape == (3, 2)
        whole = full_tensor(tensor, keep=True)
        assert whole is not None
        assert not whole.requires_grad
        assert whole.data_ptr() == data.data_ptr()
        assert full_tensor(tensor, keep=False) is None


def test_tensor_without_data_is_refused_by_name(mesh: DeviceMesh) -> None:
    plain = torch.empty(2, device="meta")
    sharded = distribute_tensor(torch.empty(2, device="meta"), mesh, [Shard(0)])
    for tensor in (plain, sharded):
        with pytest.raises(ExportError, match=r"cannot export model\.w: .* meta device"):
            full_tensor(tensor, keep=True, name="model.w")
    # every rank takes part in the gather, so every rank hears of it
    with pytest.raises(ExportError, match="meta device"):
        full_tensor(sharded, keep=False)
    assert full_tensor(plain, keep=False) is None  # only the rank that writes needs the data


def test_nothing_of_a_gathered_tensor_stays(mesh: DeviceMesh) -> None:
    part = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    gc.disable()  # freed at once, not some day
    try:
        for _ in range(3):
            whole = full_tensor(part, keep=True)
            assert whole is not None
            alive = weakref.ref(whole)
            del whole
            assert alive() is None
    finally:
        gc.enable()
