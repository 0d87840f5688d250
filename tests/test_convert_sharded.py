"""Converted models on ranks: parameters that are DTensors, FSDP2 before and after, context and tensor parallelism."""

from __future__ import annotations

import copy

import pytest
import torch
from norms import GemmaStyleNorm, LlamaNorm, T5StyleNorm
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import meshnorm
from meshnorm.checking.case import mesh_for
from meshnorm.errors import OptionError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaNorm(16, 1e-5)
        self.up = nn.Linear(16, 32, bias=False)
        self.middle = GemmaStyleNorm(32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(self.up(self.norm(x))))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.RMSNorm(16, eps=1e-6))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def _fsdp(order: str) -> None:
    mesh = mesh_for((("dp", 2),))
    whole, x = _model(), torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    whole(x).square().mean().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    if order == "convert first":
        meshnorm.convert(model)
    for layer in (*model[:2], model[2], model):
        fully_shard(layer, mesh=mesh)
    placements = [p.placements for p in model.parameters()]
    if order == "shard first":
        assert len(meshnorm.convert(model).swapped) == 5
    assert placements == [p.placements for p in model.parameters()]
    assert isinstance(model[2], nn.RMSNorm) and type(model[2]).__name__ == "FSDPRMSNorm"
    optimizer = torch.optim.AdamW(model.parameters())
    rank = mesh.get_local_rank()
    for _ in range(2):
        optimizer.zero_grad()
        model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        if _ == 0:
            _assert_close(_gradients(model), _gradients(whole))
        optimizer.step()
    assert len(meshnorm.revert(model)) == 5 and not meshnorm.revert(model)
    assert type(model[2]).__name__ == "FSDPRMSNorm" and isinstance(model[2], nn.RMSNorm)
    model(x[:2]).square().mean().backward()


def test_fsdp2_and_conversion_compose_in_either_order(pool2) -> None:
    for order in ("convert first", "shard first"):
        pool2.run(_fsdp, order)


def _mixed_precision() -> None:
    """FSDP2 hands the norms bfloat16 weights that the optimizer holds in float32: the cast order must hold there."""
    mesh = mesh_for((("dp", 2),))
    x = torch.randn(2, 6, 16)
    found = []
    for converts in (False, True):
        model = _model()
        if converts:
            meshnorm.convert(model)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        y = model(x)
        y.float().square().mean().backward()
        found.append((y, _gradients(model)))
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2, atol=2e-2)
    for name, gradient in found[1][1].items():
        assert gradient.dtype == torch.float32
        error = (gradient - found[0][1][name]).norm() / found[0][1][name].norm()
        assert error < 0.02, name


def test_fsdp2_in_mixed_precision_trains_as_before(pool2) -> None:
    pool2.run(_mixed_precision)


def _tensor_parallel() -> None:
    """SequenceParallel on the outer norms; the middle one normalizes what a column-parallel linear leaves sharded."""
    mesh = mesh_for((("tp", 2),))
    whole, x = _model(), torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    expected = whole(x)
    expected.square().mean().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    for block in model[:2]:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(use_local_output=False),
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
        block.middle.weight = nn.Parameter(distribute_tensor(block.middle.weight.detach(), mesh, [Shard(0)]))
    parallelize_module(model[2], mesh, SequenceParallel(use_local_output=False))
    sharded = {name: (p, p.placements) for name, p in model.named_parameters()}
    meshnorm.convert(model)
    assert all(p is sharded[n][0] and p.placements == sharded[n][1] for n, p in model.named_parameters())
    y = model(distribute_tensor(x, mesh, [Shard(1)]))
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-5)
    y.redistribute(mesh, [Replicate()]).square().mean().backward()
    _assert_close(_gradients(model), _gradients(whole))


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 cannot run a linear on a sequence-sharded DTensor of 3 dims",
)
def test_tensor_and_sequence_parallel_equal_one_process(pool2) -> None:
    pool2.run(_tensor_parallel)


def _context_parallel() -> None:
    mesh = mesh_for((("cp", 2),))
    whole, x = _model(), torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    whole(x).square().mean().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    meshnorm.convert(model, weight_grad="reduced")
    for parent in list(model.modules()):
        for name, parameter in list(parent.named_parameters(recurse=False)):
            setattr(parent, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    model(distribute_tensor(x, mesh, [Shard(1)])).redistribute(mesh, [Replicate()]).square().mean().backward()
    assert model[0].norm.weight.grad.placements == (Replicate(),)
    _assert_close(_gradients(model), _gradients(whole))


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 cannot run a linear on a sequence-sharded DTensor of 3 dims",
)
def test_context_parallel_equals_one_process(pool2) -> None:
    pool2.run(_context_parallel)


def _ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    mesh = mesh_for((("dp", 2),))
    whole, x = _model(), torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    whole(x).square().mean().backward()
    rank = mesh.get_local_rank()
    for converts_first in (True, False):
        model = copy.deepcopy(whole)
        model.zero_grad()
        if converts_first:
            meshnorm.convert(model)
        wrapped = DistributedDataParallel(model)
        if not converts_first:
            assert len(meshnorm.convert(wrapped).swapped) == 5
        wrapped(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        _assert_close(_gradients(model), _gradients(whole))


def test_ddp_and_conversion_compose_in_either_order(pool2) -> None:
    pool2.run(_ddp)


def _mixed_dtypes() -> None:
    """A float32 weight beside a bfloat16 x: the product promotes, and its gradients are those of one process."""
    mesh = mesh_for((("tp", 2),))
    torch.manual_seed(0)
    x, dy = torch.randn(4, 6, 8).bfloat16(), torch.randn(4, 6, 8)
    for kind in (LlamaNorm, T5StyleNorm):
        whole = kind(8)
        nn.init.normal_(whole.weight)
        leaf = x.clone().requires_grad_()
        expected = whole(leaf)
        expected.backward(dy)
        for where in (Shard(2), Shard(1), Replicate()):
            for held in ("plain", Replicate(), Shard(0)):
                for weight_grad in ("auto", "reduced"):
                    norm = copy.deepcopy(whole)
                    norm.zero_grad()
                    meshnorm.convert(norm, weight_grad=weight_grad)
                    if held != "plain":
                        norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [held]))
                    given = distribute_tensor(x, mesh, [where]).requires_grad_()
                    y = norm(given)
                    assert y.dtype == torch.float32 and y.placements == (where,)
                    torch.testing.assert_close(y.full_tensor(), expected)
                    y.backward(distribute_tensor(dy, mesh, [where]))
                    torch.testing.assert_close(given.grad.full_tensor(), leaf.grad, rtol=2e-2, atol=1e-2)
                    grad = norm.weight.grad
                    if held != "plain":
                        assert weight_grad == "auto" or not grad.placements[0].is_partial()
                        grad = grad.full_tensor()
                    torch.testing.assert_close(grad, whole.weight.grad, rtol=1e-4, atol=1e-5)
    norm = LlamaNorm(8)
    meshnorm.convert(norm, weight_grad="deferred")
    with pytest.raises(OptionError, match="weight_grad is 'deferred', but the weight is a plain"):
        norm(distribute_tensor(x, mesh, [Shard(1)]))


def test_mixed_dtypes_on_dtensors_have_the_gradients_of_one_process(pool2) -> None:
    pool2.run(_mixed_dtypes)
