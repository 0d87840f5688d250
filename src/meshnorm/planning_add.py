"""What a layout of ``add_rms_norm`` costs: the plan of the sum's norm, and what brings x and the residual to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from meshnorm.checks import DTYPES
from meshnorm.errors import DTypeError, OptionError, PlacementError
from meshnorm.layout import move, normalize
from meshnorm.layout_add import add_route_of
from meshnorm.planning import Collective, Plan, move_costs, priced


def add_plan(
    residual: Tensor | Sequence[Placement],
    layout: tuple,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    gradients: tuple[bool, bool, Any, Sequence[Placement] | None],
    coordinate: tuple[int, ...],
    hidden: str,
) -> Plan:
    """``plan`` with a residual. ``layout``: (mesh, x's placements, x's ndim, how many dims are normalized, the weight's
    placement, weight_grad, output placements); ``dtypes`` of x, the residual and the weight; ``gradients``: (whether x
    or the residual and whether the weight needs one, the placements of dY, those of the gradient of residual_out)."""
    if hidden != "stats":
        raise OptionError(f'hidden is {hidden!r}: add_rms_norm exchanges statistics, "stats", and gathers nothing')
    mesh, x, ndim, normalized_ndim, weight, weight_grad, output = layout
    dtype, residual_dtype, weight_dtype = dtypes
    x_requires_grad, weight_requires_grad, dy, d_residual_out = gradients
    placements: Any = residual
    if isinstance(residual, DTensor):
        placements, residual_dtype = residual.placements, residual.dtype
    elif isinstance(residual, Tensor):
        raise PlacementError("residual is a plain tensor, which no mesh holds: give its placements")
    residual_dtype = residual_dtype or dtype
    if residual_dtype not in DTYPES or (residual_dtype == torch.float64) != (dtype == torch.float64):
        raise DTypeError(f"residual_dtype is {residual_dtype} and dtype {dtype}: add_rms_norm does not add these")
    placements = normalize(placements, ndim, mesh, "residual")
    route = add_route_of(mesh, x, placements, ndim, normalized_ndim, weight, weight_grad, output, weight_requires_grad)

    def cost(moving: Any, itemsize: int) -> tuple[Collective, ...]:
        return move_costs(moving, shape, mesh, coordinate, itemsize)

    everywhere = (Replicate(),) * len(x)
    sizes = dtype.itemsize, residual_dtype.itemsize
    norm = priced(route.norm, shape, dtype, weight_dtype, x_requires_grad, coordinate)
    moves = cost(route.x_move, sizes[0]) + cost(route.residual_move, sizes[1])
    back: tuple[Collective, ...] = ()
    if dy is not None and (x_requires_grad or route.norm.dw is not None):
        back += cost(move(mesh, dy, route.norm.y, ndim), sizes[0])
    if d_residual_out is not None and x_requires_grad:
        have = normalize(d_residual_out, ndim, mesh, "d_residual_out_placements")
        back += cost(move(mesh, have, route.norm.y, ndim), sizes[1])
    return replace(
        norm,
        x=x,
        residual=placements,
        forward=moves + norm.forward,
        backward=back + norm.backward,
        gathering=cost(move(mesh, x, everywhere, ndim), sizes[0])
        + cost(move(mesh, placements, everywhere, ndim), sizes[1]),
    )
