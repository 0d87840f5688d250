"""Carries out the route of a gated norm on DTensors: x and the gate move to one layout, the rest is as in ``sharded``.

What was moved is what is saved, and its gradient comes out in the layout that it was moved to: of what was reduced that
is the gradient, and of what was cut each rank has its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshnorm import ops_gated
from meshnorm.formula import accumulation_dtype
from meshnorm.formula_gated import Gated
from meshnorm.layout import Move, Placements
from meshnorm.layout_gated import GatedRoute, groups_of, segments_of
from meshnorm.local import once_differentiable
from meshnorm.moving import local_part, moved, summed, wrapped
from meshnorm.routing import gated_route_for
from meshnorm.sharded import ShardedNorm, finish_dw, local_gradient, local_weight_of


@torch.compiler.allow_in_graph
def sharded_gated_rms_norm(
    x: DTensor,
    gate: DTensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    norm_before_gate: bool,
    activation: str,
    group_size: int,
    ndim: int,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
) -> Tensor:
    """y as a DTensor on x's mesh. Arguments are checked but for what concerns placements.

    In torch.compile's graph whole, as ``sharded_rms_norm`` is.
    """
    how = Gated(eps, offset, casting_mode, norm_before_gate, activation, group_size)
    route = gated_route_for(x, gate, weight, ndim, group_size, weight_grad, output_placements)
    norm = _ShardedGatedNorm(x, weight, route, how)
    both = route.norm.y
    if route.x != both:
        x = _Moved.apply(x, route.x_move, both)  # type: ignore[assignment]
    if gate is not None and route.gate != both:
        gate = _Moved.apply(gate, route.gate_move, both)  # type: ignore[assignment]
    return _ShardedGatedRMSNorm.apply(x, gate, weight, norm)  # type: ignore[return-value]


class _Moved(torch.autograd.Function):
    """A tensor in the layout in which it is used: partial mesh dims reduced, others cut."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, move: Move, placements: Placements) -> DTensor:  # type: ignore[override]
        mesh, local = tensor.device_mesh, local_part(tensor)
        if mesh.get_coordinate() is not None:
            local = moved(local, move, tensor.shape, mesh, tensor.placements)
        return wrapped(local.view_as(local), mesh, placements, tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        return gradient, None, None


class _ShardedGatedNorm(ShardedNorm):
    """What a route comes to for x, a gate and a weight of one layout."""

    def __init__(self, x: DTensor, weight: Tensor | None, route: GatedRoute, how: Gated) -> None:
        super().__init__(x, weight, route.norm, how.eps, how.offset, how.casting_mode, False)
        self.how, self.straddles = how, route.straddles
        self.groups = groups_of(self.hidden_shape, how.group_size)
        self.segments: list[int] = []
        coordinate = self.mesh.get_coordinate()
        if coordinate is not None and self.straddles:
            sizes, chains = route.norm.mesh.sizes, route.norm.hidden_chains
            found = segments_of(sizes, tuple(coordinate), chains, self.hidden_shape, how.group_size)
            self.segments = [number for segment in found for number in segment]

    @property
    def gate_first(self) -> bool:
        return not self.how.norm_before_gate


class _ShardedGatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate, weight, norm):
        y, rstd, local_weight = _forward(x, gate, weight, norm)
        # The tensors themselves, not their local parts, so that autograd notices when they are changed.
        ctx.save_for_backward(x, gate, weight, rstd, local_weight if norm.gathers_weight else None)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_backward, ctx, dy)
        return _backward(ctx, dy, *ctx.saved_tensors)


def _part(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local_part(tensor)


def _forward(
    x: DTensor, gate: DTensor | None, weight: Tensor | None, norm: _ShardedGatedNorm
) -> tuple[DTensor, Tensor, Tensor | None]:
    """(y, rstd, this rank's part of the weight)."""
    how, ndim, mesh = norm.how, norm.route.normalized_ndim, norm.mesh
    local, local_gate, local_weight = local_part(x), _part(gate), local_weight_of(weight, norm)
    if not norm.on_mesh:
        y, rstd = local.clone(), local.new_empty(0, dtype=accumulation_dtype(x.dtype))
    elif norm.straddles:
        statistic_gate = local_gate if norm.gate_first else None
        total = ops_gated.gated_statistic(local, statistic_gate, how.activation, norm.segments, norm.groups, ndim)
        total = summed(total, norm.route.statistic_steps, mesh)
        y, rstd = ops_gated.gated_apply(
            local, local_gate, local_weight, total, how.group_size, *how[:-1], norm.segments, ndim
        )
    else:
        y, rstd = ops_gated.gated_forward(local, local_gate, local_weight, *how, ndim)
    return norm.wrapped(x, y, norm.route.y, norm.shape), rstd, local_weight


def _backward(
    ctx: Any,
    dy: Tensor,
    x: DTensor,
    gate: DTensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    local_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    norm: _ShardedGatedNorm = ctx.norm
    route, mesh = norm.route, norm.mesh
    needs_dx, needs_d_gate, needs_dw, _ = ctx.needs_input_grad
    local, local_gate = local_part(x), _part(gate)
    if local_weight is None:
        local_weight = local_weight_of(weight, norm)
    local_dy = local_gradient(dy, norm, "y")
    if norm.on_mesh:
        dw_dtype = None
        if needs_dw:
            dw_dtype = accumulation_dtype(x.dtype) if route.dw_steps else norm.weight_dtype
        given = local_dy, local, local_gate, local_weight, rstd
        dx, d_gate, dw = _local_gradients(norm, *given, needs_dx, needs_d_gate, dw_dtype)
        dw = finish_dw(dw, route, norm.hidden_shape, norm.weight_dtype, mesh) if needs_dw else None
    else:
        dx, d_gate = local.clone(), local.clone() if local_gate is None else local_gate.clone()
        shape = norm.hidden_shape if route.weight == "plain" else (0,)
        dw = local.new_zeros(shape, dtype=norm.weight_dtype) if needs_dw else None
    if dw is not None and route.weight != "plain":
        dw = norm.wrapped(x, dw, route.dw, norm.hidden_shape)
    return (
        norm.wrapped(x, dx, route.y, norm.shape) if needs_dx else None,
        norm.wrapped(x, d_gate, route.y, norm.shape) if needs_d_gate else None,
        dw,
        None,
    )


def _local_gradients(
    norm: _ShardedGatedNorm,
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    needs_dx: bool,
    needs_d_gate: bool,
    dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dGate and dW of the rows and columns held here. dW stays in the accumulation dtype if it will be summed."""
    how, ndim = norm.how, norm.route.normalized_ndim
    gating = how.offset, how.norm_before_gate, how.activation
    given, needs = (dy, x, gate, weight, rstd), (needs_dx, needs_d_gate, dw_dtype)
    if not norm.straddles:
        return ops_gated.gated_backward(*given, *gating, how.group_size, ndim, *needs)
    if needs_dx or (needs_d_gate and norm.gate_first):
        total = ops_gated.gated_backward_statistic(*given, *gating, norm.segments, ndim)
        total = summed(total, norm.route.statistic_steps, norm.mesh)
    else:
        total = torch.zeros_like(rstd)  # nothing that is wanted depends on it
    return ops_gated.gated_backward_apply(*given, total, how.group_size, *gating, norm.segments, ndim, *needs)
