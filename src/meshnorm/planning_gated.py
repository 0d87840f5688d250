"""What a layout of ``gated_rms_norm`` costs: what brings x and the gate to one layout, and the norm's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from meshnorm.checks import DTYPES
from meshnorm.errors import DTypeError, GroupSizeError, OptionError, PlacementError
from meshnorm.layout import move, normalize
from meshnorm.layout_gated import gated_route_of, groups_of
from meshnorm.planning import Collective, Plan, move_costs, priced


def gated_plan(
    gate: Tensor | Sequence[Placement] | None,
    group_size: int | None,
    layout: tuple,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    gradients: tuple[bool, bool, Any],
    coordinate: tuple[int, ...],
    hidden: str,
) -> Plan:
    """``plan`` with a gate, or in groups. ``layout``: (mesh, x's placements, x's ndim, how many dims are normalized,
    the weight's placement, weight_grad, output placements); ``dtypes`` of x, the gate and the weight; ``gradients``:
    (whether what is normalized and whether the weight needs one, the placements of dY)."""
    if hidden != "stats":
        raise OptionError(f'hidden is {hidden!r}: gated_rms_norm exchanges statistics, "stats", and gathers nothing')
    mesh, x, ndim, normalized_ndim, weight, weight_grad, output = layout
    dtype, gate_dtype, weight_dtype = dtypes
    x_requires_grad, weight_requires_grad, dy = gradients
    placements: Any = gate
    if isinstance(gate, DTensor):
        placements, gate_dtype = gate.placements, gate.dtype
    elif isinstance(gate, Tensor):
        raise PlacementError("gate is a plain tensor, which no mesh holds: give its placements")
    gate_dtype = gate_dtype or dtype
    if gate_dtype not in DTYPES or (gate_dtype == torch.float64) != (dtype == torch.float64):
        raise DTypeError(f"gate_dtype is {gate_dtype} and dtype {dtype}: gated_rms_norm takes no such pair")
    if placements is not None:
        placements = normalize(placements, ndim, mesh, "gate")
    hidden_shape = shape[ndim - normalized_ndim :]
    columns = groups_of(hidden_shape, 1)
    size = columns if group_size is None else group_size
    if size < 1 or columns % size:
        raise GroupSizeError(f"group_size is {size}, but {columns} numbers are normalized: give a divisor of these")
    route = gated_route_of(
        mesh, x, placements, ndim, hidden_shape, size, weight, weight_grad, output, weight_requires_grad
    )

    def cost(moving: Any, itemsize: int) -> tuple[Collective, ...]:
        return move_costs(moving, shape, mesh, coordinate, itemsize)

    everywhere = (Replicate(),) * len(x)
    norm = priced(route.norm, shape, dtype, weight_dtype, x_requires_grad, coordinate, numbers=columns // size)
    gathering = cost(move(mesh, x, everywhere, ndim), dtype.itemsize)
    moves = cost(route.x_move, dtype.itemsize)
    if placements is not None:
        moves += cost(route.gate_move, gate_dtype.itemsize)
        gathering += cost(move(mesh, placements, everywhere, ndim), gate_dtype.itemsize)
    back = () if dy is None else cost(move(mesh, dy, route.norm.y, ndim), dtype.itemsize)
    return replace(
        norm,
        x=x,
        gate=placements,
        group_size=size,
        forward=moves + norm.forward,
        backward=back + norm.backward,
        gathering=gathering,
    )
