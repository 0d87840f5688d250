"""Carries out the route of a norm behind an addition on DTensors: x and the residual move to one layout, the rest is as
in ``sharded``.

x and the residual are not saved, residual_out is; so their moves are part of the one autograd function. The gradients
come out in the layout of the sum: of what was reduced that is the gradient, and of what was cut each rank has its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshnorm import ops, ops_add
from meshnorm.formula import accumulation_dtype
from meshnorm.layout_add import AddRoute
from meshnorm.local import once_differentiable
from meshnorm.local_add import Wanted
from meshnorm.moving import local_part, moved, summed
from meshnorm.routing import add_route_for
from meshnorm.sharded import ShardedNorm, finish_dw, local_gradient, local_weight_of


@torch.compiler.allow_in_graph
def sharded_add_rms_norm(
    x: DTensor,
    residual: DTensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    ndim: int,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
) -> tuple[Tensor, Tensor]:
    """(y, residual_out) as DTensors on x's mesh. Arguments are checked but for what concerns placements.

    In torch.compile's graph whole, as ``sharded_rms_norm`` is.
    """
    route = add_route_for(x, residual, weight, ndim, weight_grad, output_placements)
    norm = ShardedNorm(x, weight, route.norm, eps, offset, casting_mode, False)
    return _ShardedAddRMSNorm.apply(x, residual, weight, norm, route)  # type: ignore[return-value]


class _ShardedAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, residual, weight, norm, route):
        y, residual_out, rstd, local_weight = _forward(x, residual, weight, norm, route)
        # residual_out and the weight themselves, not their local parts, so that autograd notices when they are changed.
        ctx.save_for_backward(residual_out, weight, rstd, local_weight if norm.gathers_weight else None)
        ctx.set_materialize_grads(False)  # no zeros for an output that is not used
        ctx.norm, ctx.wanted = norm, Wanted.of(x, residual)
        if not (x.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(residual_out)
        return y, residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_residual_out: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_backward, ctx, dy, d_residual_out)
        return _backward(ctx, dy, d_residual_out, *ctx.saved_tensors)


def _forward(
    x: DTensor, residual: DTensor, weight: Tensor | None, norm: ShardedNorm, route: AddRoute
) -> tuple[DTensor, DTensor, Tensor, Tensor | None]:
    """(y, residual_out, rstd, this rank's part of the weight)."""
    mesh, ndim = norm.mesh, norm.route.normalized_ndim
    local, local_residual = local_part(x), local_part(residual)
    options = norm.eps, norm.offset, norm.casting_mode, ndim
    if norm.on_mesh:
        local = moved(local, route.x_move, x.shape, mesh, x.placements)
        local_residual = moved(local_residual, route.residual_move, x.shape, mesh, residual.placements)
    local_weight = local_weight_of(weight, norm)
    if not norm.on_mesh:
        y, residual_out = local.clone(), local_residual.clone()
        rstd = local.new_empty(0, dtype=accumulation_dtype(x.dtype))
    elif norm.route.splits_hidden:
        residual_out, total = ops_add.add_statistic(local, local_residual, ndim)
        total = summed(total, norm.route.statistic_steps, mesh)
        size = math.prod(norm.hidden_shape)
        y, rstd = ops.apply(residual_out, local_weight, total, size, *options, local.dtype)
    else:
        y, residual_out, rstd = ops_add.add_forward(local, local_residual, local_weight, *options)
    placements = norm.route.y
    return (
        norm.wrapped(x, y, placements, norm.shape),
        norm.wrapped(x, residual_out, placements, norm.shape),
        rstd,
        local_weight,
    )


def _backward(
    ctx: Any,
    dy: Tensor | None,
    d_residual_out: Tensor | None,
    residual_out: DTensor,
    weight: Tensor | None,
    rstd: Tensor,
    local_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    norm: ShardedNorm = ctx.norm
    wanted: Wanted = ctx.wanted
    local_dy = None if dy is None else local_gradient(dy, norm, "y")
    local_d_out = None
    if d_residual_out is not None and any(wanted.dtypes):
        local_d_out = local_gradient(d_residual_out, norm, "residual_out")
    if local_dy is None:
        passed = (None, None) if local_d_out is None else wanted.passed_on(local_d_out)
        return *_wrapped(passed, norm, residual_out), None, None, None
    needs_dw = weight is not None and ctx.needs_input_grad[2]
    dw: Tensor | None = None
    if norm.on_mesh:
        if local_weight is None:
            local_weight = local_weight_of(weight, norm)
        given = local_dy, local_part(residual_out), local_weight, rstd, local_d_out
        dx, d_residual, dw = _local_gradients(norm, *given, wanted, needs_dw)
        dw = finish_dw(dw, norm.route, norm.hidden_shape, norm.weight_dtype, norm.mesh) if needs_dw else None
    else:
        dx, d_residual = (local_dy.new_empty(local_dy.shape, dtype=dtype or local_dy.dtype) for dtype in wanted.dtypes)
        if needs_dw:
            shape = norm.hidden_shape if norm.route.weight == "plain" else (0,)
            dw = local_dy.new_zeros(shape, dtype=norm.weight_dtype)
    if dw is not None and norm.route.weight != "plain":
        dw = norm.wrapped(residual_out, dw, norm.route.dw, norm.hidden_shape)
    return *_wrapped(wanted.handed_out(dx, d_residual), norm, residual_out), dw, None, None


def _local_gradients(
    norm: ShardedNorm,
    dy: Tensor,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    wanted: Wanted,
    needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dResidual and dW of the rows and columns held here. dW stays in the accumulation dtype if it will be
    summed."""
    route, ndim, dw_dtype = norm.route, norm.route.normalized_ndim, None
    if needs_dw:
        dw_dtype = accumulation_dtype(dy.dtype) if route.dw_steps else norm.weight_dtype
    dtypes = *wanted.dtypes, dw_dtype
    if not (route.splits_hidden and wanted.dtypes[0] is not None):
        return ops_add.add_backward(dy, residual_out, weight, rstd, d_residual_out, norm.offset, ndim, *dtypes)
    total = ops.backward_statistic(dy, residual_out, weight, rstd, norm.offset, ndim)
    total = summed(total, route.statistic_steps, norm.mesh)
    size = math.prod(norm.hidden_shape)
    return ops_add.add_backward_apply(
        dy, residual_out, weight, rstd, d_residual_out, total, size, norm.offset, ndim, *dtypes
    )


def _wrapped(
    gradients: tuple[Tensor | None, Tensor | None], norm: ShardedNorm, like: DTensor
) -> tuple[Tensor | None, Tensor | None]:
    """(x's gradient, the residual's) as DTensors: one, where it is one tensor."""
    first, second = gradients
    dx = None if first is None else norm.wrapped(like, first, norm.route.y, norm.shape)
    if second is None or second is first:
        return dx, None if second is None else dx
    return dx, norm.wrapped(like, second, norm.route.y, norm.shape)
