"""HiddenParallel and torch's SequenceParallel, through parallelize_module: equal to one process, gradients too."""

from __future__ import annotations

import copy

import pytest
import torch
from norms import GemmaStyleNorm, LlamaNorm, WeightlessNorm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import meshnorm
from meshnorm.checking.case import mesh_for
from meshnorm.checking.collectives import Recorder
from meshnorm.errors import OptionError, PlacementError
from meshnorm.parallel import HiddenParallel


class Block(nn.Module):
    """An outer norm, and one between the two linears, as for queries normalized over all heads."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.outer = meshnorm.RMSNorm(8, eps=1e-6)
        self.up = nn.Linear(8, width)
        self.inner = inner
        self.down = nn.Linear(width, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(self.outer(x))))


INNER = {
    "ours": lambda width: meshnorm.RMSNorm(width, eps=1e-6, offset=0.5),
    "torch": lambda width: nn.RMSNorm(width, eps=1e-6),
    "llama": lambda width: LlamaNorm(width),
    "gemma": lambda width: GemmaStyleNorm(width),
    "no weight": lambda width: nn.RMSNorm(width, eps=1e-6, elementwise_affine=False),
    "any width": lambda width: WeightlessNorm(),
}


def _block(inner: str, width: int) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = Block(INNER[inner](width), width)
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    meshnorm.convert(block)
    return block.double(), torch.randn(2, 6, 8, dtype=torch.float64)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plan(local: bool) -> dict:
    """Activations as DTensors all the way, or as plain tensors between the modules."""
    return {
        "outer": SequenceParallel(use_local_output=local),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=local),
        "inner": HiddenParallel(use_local_output=local),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
    }


def _train(model: nn.Module, x: Tensor, mesh: DeviceMesh | None, local: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of three AdamW steps, and the first step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for _ in range(3):
        optimizer.zero_grad()
        y = model(x)
        if mesh is not None:
            y = DTensor.from_local(y, mesh, [Shard(1)]) if local else y
            y = y.redistribute(mesh, [Replicate()]).to_local()
        loss = y.pow(3).mean()
        loss.backward()
        losses.append(loss.detach())
        gradients = gradients or [_whole(p.grad).clone() for p in model.parameters()]  # type: ignore[arg-type]
        optimizer.step()
    return losses, gradients


def _equals_one_process(inner: str, width: int, local: bool) -> None:
    mesh = mesh_for((("tp", 2),))
    block, x = _block(inner, width)
    sharded = parallelize_module(copy.deepcopy(block), mesh, _plan(local))
    for parameter in sharded.inner.parameters():
        assert parameter.placements == (Shard(0),) and parameter.requires_grad
    expected = _train(block, x, None, local)
    given = x.chunk(2, 1)[mesh.get_local_rank()] if local else distribute_tensor(x, mesh, [Shard(1)])
    found = _train(sharded, given, mesh, local)
    for one, other in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)
    for one, other in zip(block.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(_whole(other), one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("local", [False, True], ids=["DTensors", "plain tensors"])
@pytest.mark.parametrize("inner", INNER)
def test_three_steps_of_adamw_equal_those_of_one_process(pool2, inner, local) -> None:
    pool2.run(_equals_one_process, inner, 12, local)


def test_uneven_columns_too(pool2) -> None:
    for inner in ("ours", "llama", "no weight"):
        pool2.run(_equals_one_process, inner, 11, False)


def _layouts() -> None:
    mesh = mesh_for((("tp", 2),))
    torch.manual_seed(0)
    norm = parallelize_module(meshnorm.RMSNorm(12, eps=1e-6), mesh, HiddenParallel())
    x = torch.randn(4, 12)
    expected = meshnorm.rms_norm(x)
    mine = x.chunk(2, 1)[mesh.get_local_rank()].contiguous()
    inputs = (mine, *(distribute_tensor(x, mesh, [p]) for p in (Shard(1), Shard(-1), Shard(0), Replicate())))
    for given in inputs:
        with Recorder(mesh) as recorder:
            y = norm(given)
        assert y.placements == (Shard(1),)
        torch.testing.assert_close(y.full_tensor(), expected)
        if given is mine:
            assert [(c.kind, c.bytes) for c in recorder.seen] == [("all_reduce", 4 * 4)]
    local = parallelize_module(meshnorm.RMSNorm(12, eps=1e-6), mesh, HiddenParallel(use_local_output=True))
    y = local(mine)
    assert not isinstance(y, DTensor)
    torch.testing.assert_close(y, expected.chunk(2, 1)[mesh.get_local_rank()])
    with pytest.raises(PlacementError, match=r"last dim has size 12, but rank \d of 2 holds 6 of 12 columns"):
        norm(x)
    uneven = parallelize_module(meshnorm.RMSNorm(11, eps=1e-6), mesh, HiddenParallel())
    y = uneven(x[:, :11].chunk(2, 1)[mesh.get_local_rank()])
    assert y.shape == (4, 11)
    torch.testing.assert_close(y.full_tensor(), meshnorm.rms_norm(x[:, :11]))
    frozen = meshnorm.RMSNorm(12)
    frozen.weight.requires_grad_(False)
    assert not parallelize_module(frozen, mesh, HiddenParallel()).weight.requires_grad
    for theirs in (nn.RMSNorm(12), nn.Linear(12, 12)):
        with pytest.raises(OptionError, match=f"this is a {type(theirs).__name__}: call meshnorm.convert"):
            parallelize_module(theirs, mesh, HiddenParallel())
    assert repr(HiddenParallel(use_local_output=True)) == "HiddenParallel(use_local_output=True)"


def test_inputs_in_any_layout_give_a_hidden_sharded_output(pool2) -> None:
    pool2.run(_layouts)


def _named() -> None:
    norm = HiddenParallel()._apply(meshnorm.RMSNorm(12), mesh_for((("tp", 2),)))
    with pytest.raises(OptionError, match="RMSNorm was called with named arguments alone: HiddenParallel shards"):
        norm(x=torch.ones(3, 6))


def test_a_named_x_is_refused(pool2) -> None:
    pool2.run(_named)
