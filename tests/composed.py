"""What the tests of docs/composes.md share: a model, the ways of spreading it over ranks, and one process in float64.

A way of spreading is a :class:`Spread`. Training is the same lines for all of them and for the one process that they
are held against, whose norms are ``torch.nn.RMSNorm``, so that nothing of ours is on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from norms import LlamaNorm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshnorm
from meshnorm.checking.case import mesh_for
from meshnorm.parallel import HiddenParallel

TORCH_211 = torch.__version__.startswith("2.11.")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "torch": lambda width: nn.RMSNorm(width, eps=1e-6),  # the reference
    "module": lambda width: meshnorm.RMSNorm(width, eps=1e-6),
    "converted": lambda width: LlamaNorm(width, eps=1e-6),
}
OURS = ("module", "converted")


class Block(nn.Module):
    """``outer`` normalizes the residual stream, ``inner`` what a column-parallel linear leaves hidden-sharded."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.outer, self.up = norm(8), nn.Linear(8, 12, bias=False)
        self.inner, self.down = norm(12), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.up(self.outer(x))))


def drawn_model(kind: str, dtype: torch.dtype = torch.float64, weight_grad: str = "auto") -> nn.Sequential:
    """Two blocks and a norm; the same random parameters for every kind."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(NORMS[kind]), Block(NORMS[kind]), NORMS[kind](8))
    for name, parameter in model.named_parameters():
        is_norm = "up" not in name and "down" not in name
        nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.3)
    for norm in norms_of(model):
        if kind == "module":
            norm.weight_grad = weight_grad  # type: ignore[assignment]
    if kind == "converted":
        assert len(meshnorm.convert(model, weight_grad=weight_grad).swapped) == 5
    return model.to(dtype)


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "Norm" in type(module).__name__]


def is_norm_weight(name: str) -> bool:
    return "up" not in name and "down" not in name


def batches(number: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """(batch 4, sequence 6, hidden 8), the rows of very different sizes so that no rank's part is like another's."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.2, 3.0, 24).view(4, 6, 1)
    return [(torch.randn(4, 6, 8, generator=generator) * scale).to(dtype) for _ in range(number)]


# --- ways of spreading ---


@dataclass(frozen=True)
class Spread:
    """``apply(model, mesh)`` spreads the model; ``cut(x, mesh)`` is this rank's input."""

    dims: tuple[tuple[str, int], ...]
    apply: Callable[[nn.Sequential, DeviceMesh], nn.Module]
    cut: Callable[[Tensor, DeviceMesh], Tensor]

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_for(self.dims)


def _part(x: Tensor, mesh: DeviceMesh, name: str, dim: int) -> Tensor:
    return x.chunk(mesh[name].size(), dim)[mesh.get_local_rank(name)].contiguous()


def _fsdp(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def _fsdp_fp32_reduce(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return _fsdp(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


_flattened: dict[DeviceMesh, DeviceMesh] = {}


def _joint(mesh: DeviceMesh) -> DeviceMesh:
    if mesh not in _flattened:
        _flattened[mesh] = mesh["dp", "cp"]._flatten("dp_cp")
    return _flattened[mesh]


def _tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """The residual stream sharded along the sequence, what lies between the linears along the hidden dim."""
    for block in model[:2]:
        styles = {
            "outer": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "inner": HiddenParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, styles)
    parallelize_module(model[2], mesh, SequenceParallel(use_local_output=False))
    return model


def _wrapped(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None)


def _rows(x: Tensor, mesh: DeviceMesh) -> Tensor:
    if TORCH_211:  # cannot run a linear on a sequence-sharded DTensor of 3 dims: the rows are packed
        return distribute_tensor(x.flatten(0, 1), mesh, [Shard(0)], src_data_rank=None)
    return _wrapped(x, mesh)


SPREADS = {
    "one process": Spread((), lambda model, mesh: model, lambda x, mesh: x),
    "ddp": Spread(
        (("dp", 2),),
        lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh),
        lambda x, mesh: _part(x, mesh, "dp", 0),
    ),
    "fsdp": Spread((("dp", 2),), _fsdp, lambda x, mesh: _part(x, mesh, "dp", 0)),
    "fsdp fp32 reduce": Spread((("dp", 2),), _fsdp_fp32_reduce, lambda x, mesh: _part(x, mesh, "dp", 0)),
    "hsdp": Spread(
        (("replicate", 2), ("shard", 2)),
        _fsdp,
        lambda x, mesh: _part(_part(x, mesh, "replicate", 0), mesh, "shard", 0),
    ),
    # As most trainers run context parallelism: plain local tensors, gradients reduced over the joint mesh.
    "fsdp × cp": Spread(
        (("dp", 2), ("cp", 2)),
        lambda model, mesh: _fsdp(model, _joint(mesh)),
        lambda x, mesh: _part(_part(x, mesh, "dp", 0), mesh, "cp", 1),
    ),
    "cp of DTensors": Spread((("cp", 2),), lambda model, mesh: distribute_module(model, mesh), _rows),
    "fsdp × cp of DTensors": Spread(
        (("dp", 2), ("cp", 2)),
        lambda model, mesh: _fsdp(distribute_module(model, mesh["cp"]), mesh["dp"]),
        lambda x, mesh: _rows(_part(x, mesh, "dp", 0), mesh["cp"]),
    ),
    "tp": Spread((("tp", 2),), _tensor_parallel, _wrapped),
    "fsdp × tp": Spread(
        (("dp", 2), ("tp", 2)),
        lambda model, mesh: _fsdp(_tensor_parallel(model, mesh["tp"]), mesh["dp"]),
        lambda x, mesh: _wrapped(_part(x, mesh, "dp", 0), mesh["tp"]),
    ),
}


def loss_of(y: Tensor) -> Tensor:
    """A mean over all rows, so that gradients averaged over ranks of equal parts are those of the whole."""
    if isinstance(y, DTensor):
        y = y.redistribute(placements=[Replicate()] * y.device_mesh.ndim).to_local()
    return y.pow(3).mean()


# --- training ---


@dataclass(frozen=True)
class Recipe:
    """What is done in each step, beside forward and backward."""

    steps: int = 2
    micro_batches: int = 1
    optimizer: str = "AdamW"
    lr: float = 0.05
    implementation: str = "for-loop"  # or "foreach", "fused"
    clip: float | None = None
    clip_foreach: bool = False
    frozen_after: int | None = None  # norms are frozen after this many steps
    thawed_after: int | None = None
    sync_last_only: bool = False  # FSDP2's and DDP's way of reducing once for all micro-batches


def optimizer_for(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    ways = {"foreach": recipe.implementation == "foreach", "fused": recipe.implementation == "fused"}
    if recipe.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, **ways)
    return torch.optim.AdamW(model.parameters(), lr=recipe.lr, **ways)


def train(
    model: nn.Module, spread: Spread, recipe: Recipe, dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor | None]]:
    """Trains the spread model; each step's gradients (clipped where that is asked), whole."""
    optimizer, seen = optimizer_for(model, recipe), []
    data = batches(recipe.steps * recipe.micro_batches, dtype)
    for step in range(recipe.steps):
        if step in (recipe.frozen_after, recipe.thawed_after):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(step == recipe.thawed_after or not is_norm_weight(name))
        optimizer.zero_grad()
        for micro in range(recipe.micro_batches):
            if recipe.sync_last_only and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == recipe.micro_batches - 1)
            x = data[step * recipe.micro_batches + micro]
            x = spread.cut(x, spread.mesh) if spread.dims else x
            (loss_of(model(x)) / recipe.micro_batches).backward()
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, foreach=recipe.clip_foreach)
        seen.append({name: whole(p.grad) for name, p in named_parameters(model)})
        optimizer.step()
    return seen


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_equal_to_one_process(
    way: str, kind: str, recipe: Recipe, weight_grad: str = "auto", rtol: float = 1e-9
) -> None:
    """On every rank: each step's gradients and the trained parameters are those of one process."""
    spread, exact = SPREADS[way], drawn_model("torch")
    expected = train(exact, SPREADS["one process"], recipe)
    model = spread.apply(drawn_model(kind, weight_grad=weight_grad), spread.mesh)
    found = train(model, spread, recipe)
    for step, (mine, one) in enumerate(zip(found, expected, strict=True)):
        assert_close(mine, one, rtol, f"the gradient in step {step} of")
    parameters = {name: whole(p) for name, p in named_parameters(model)}
    assert_close(parameters, {n: p.detach() for n, p in exact.named_parameters()}, rtol, "after the training,")
    assert_replicas_agree(model)


def assert_close(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float, what: str = ""
) -> None:
    """Within ``rtol`` of the largest value of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        other = expected[name]
        assert (tensor is None) == (other is None), f"{what} {name}"
        if tensor is not None and other is not None:
            error = (tensor.double() - other).abs().max() / other.abs().max()
            assert error <= rtol, f"{what} {name}: off by {error:.2g} of its largest value"


def assert_replicas_agree(model: nn.Module) -> None:
    """Bit for bit: parameters that ranks hold more than once are the same on all of them."""
    for name, parameter in named_parameters(model):
        local, mesh = parameter.detach(), None
        groups: list[Any] = [dist.group.WORLD]
        if isinstance(parameter, DTensor):
            local, mesh = parameter.to_local().detach(), parameter.device_mesh
            groups = [mesh.get_group(d) for d, p in enumerate(parameter.placements) if isinstance(p, Replicate)]
        for group in groups:
            copies = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, local.contiguous(), group=group)
            assert all(torch.equal(copy, local) for copy in copies), f"{name} differs between ranks"
