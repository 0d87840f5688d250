"""What a layout of ``qk_rms_norm`` costs: the plans of both norms, and what they exchange together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshnorm.errors import DTypeError, OptionError, PlacementError
from meshnorm.formula import accumulation_dtype
from meshnorm.layout import Mesh, Placements, Route, WeightPlacement, move, normalize, route_of
from meshnorm.layout_qk import exchanges_of
from meshnorm.planning import (
    Collective,
    Plan,
    _check_sizes,
    _collective,
    _collective_words,
    _normalized,
    _placement_words,
    _weight,
    _words,
    move_costs,
    priced,
)


class Side(NamedTuple):
    """What is known of q, or of k."""

    shape: tuple[int, ...]
    placements: Placements
    normalized_ndim: int
    weight: WeightPlacement
    weight_dtype: torch.dtype | None
    output: Placements | None
    dy: Placements | None
    requires_grad: bool
    weight_requires_grad: bool

    def route(self, mesh: Mesh, weight_grad: str, name: str) -> Route:
        return route_of(
            *(mesh, self.placements, len(self.shape), self.normalized_ndim, self.weight, "stats", weight_grad),
            *(self.output, self.weight_requires_grad, name),
        )


def side_of_k(
    k: Tensor | Sequence[Any],
    shape: Sequence[int] | None,
    mesh: Mesh,
    dtype: torch.dtype,
    weight: Any,
    weight_dtype: torch.dtype | None,
    normalized_shape: int | Sequence[int] | None,
    placements: tuple[Sequence[Any] | None, Sequence[Any] | None],
    needs: tuple[bool, bool],
    coordinate: Sequence[int] | None,
) -> Side:
    """k as ``plan`` was given it. ``placements``: of its output, of the gradient of that."""
    given: Any = k
    if isinstance(k, DTensor):
        if k.dtype != dtype:
            raise DTypeError(f"k has dtype {k.dtype} but q has {dtype}: qk_rms_norm takes both of one dtype")
        given, shape = k.placements, tuple(k.shape)
    elif isinstance(k, Tensor):
        raise PlacementError("k is a plain tensor, which no mesh holds: give its placements and k_shape")
    if shape is None:
        raise PlacementError("k is given by its placements: give k_shape too")
    shape = tuple(int(size) for size in shape)
    _check_sizes(shape, dict(zip(mesh.names, mesh.sizes, strict=True)), dtype, coordinate)
    normalized = _normalized(shape, weight, normalized_shape)
    weight_placement, dtype_of_weight = _weight(weight, len(mesh.sizes), weight_dtype or dtype)
    if isinstance(weight_placement, tuple):
        weight_placement = normalize(weight_placement, len(normalized), mesh, "k_weight")
    names = "k_output_placements", "dk_placements"
    output, dy = (
        None if each is None else normalize(each, len(shape), mesh, name)
        for each, name in zip(placements, names, strict=True)
    )
    at = normalize(given, len(shape), mesh, "k")
    return Side(shape, at, len(normalized), weight_placement, dtype_of_weight, output, dy, *needs)


def qk_plan(
    mesh: Mesh, q: Side, k: Side, dtype: torch.dtype, weight_grad: str, coordinate: tuple[int, ...], hidden: str
) -> Plan:
    """``plan`` with k."""
    if hidden != "stats":
        raise OptionError(f'hidden is {hidden!r}: qk_rms_norm exchanges statistics, "stats", and gathers nothing')
    sides = q, k
    routes = [side.route(mesh, weight_grad, name) for side, name in zip(sides, ("q", "k"), strict=True)]
    plans = [
        priced(route, side.shape, dtype, side.weight_dtype, side.requires_grad, coordinate)
        for route, side in zip(routes, sides, strict=True)
    ]
    acc = accumulation_dtype(dtype).itemsize

    def exchanged(q_route: Route | None, k_route: Route | None) -> tuple[Collective, ...]:
        return tuple(
            Collective(
                "all_reduce",
                "_".join(mesh.names[dim] for dim in exchange.mesh_dims),
                (exchange.has_q * plans[0].rows + exchange.has_k * plans[1].rows) * acc,
            )
            for exchange in exchanges_of(mesh, q_route, k_route)
        )

    forward: tuple[Collective, ...] = ()
    for route, side in zip(routes, sides, strict=True):
        forward += move_costs(route.x_move, side.shape, mesh, coordinate, dtype.itemsize)
    for route, side in zip(routes, sides, strict=True):
        if route.weight_move is not None and side.weight_dtype is not None:
            hidden_shape = side.shape[len(side.shape) - side.normalized_ndim :]
            forward += move_costs(route.weight_move, hidden_shape, mesh, coordinate, side.weight_dtype.itemsize)
    forward += exchanged(*routes)

    backward: tuple[Collective, ...] = ()
    for route, side in zip(routes, sides, strict=True):
        if side.dy is not None and (side.requires_grad or route.dw is not None):
            coming = move(mesh, side.dy, route.y, len(side.shape))
            backward += move_costs(coming, side.shape, mesh, coordinate, dtype.itemsize)
    backward += exchanged(*(route if side.requires_grad else None for route, side in zip(routes, sides, strict=True)))
    backward += _dw_sums(mesh, routes, plans, sides, acc)
    gathering = plans[0].gathering + plans[1].gathering
    return replace(plans[0], forward=forward, backward=backward, gathering=gathering, k=_alone(plans[1]))


def _dw_sums(mesh: Mesh, routes: list[Route], plans: list[Plan], sides: tuple[Side, Side], acc: int) -> tuple:
    """The sums of both dW, in one collective where they run over the same mesh dims."""
    summed = [
        (route.dw_steps, torch.Size(side.shape[len(side.shape) - side.normalized_ndim :]).numel())
        if route.sums_whole_weight
        else (route.dw_steps, plan.columns)
        for route, plan, side in zip(routes, plans, sides, strict=True)
        if route.dw is not None
    ]
    if len(summed) == 2 and summed[0][0] == summed[1][0]:
        summed = [(summed[0][0], summed[0][1] + summed[1][1])]
    return tuple(_collective(mesh, step, numbers * acc) for steps, numbers in summed for step in steps)


def _alone(plan: Plan) -> Plan:
    """k's part of a plan: what is communicated stands in the whole."""
    return replace(plan, forward=(), backward=(), gathering=())


def qk_words(q: Plan, k: Plan) -> str:
    """The plan in words."""
    mesh = ", ".join(f"{name}={size}" for name, size in q.mesh)
    shapes = (f"{name} {_words(p.dtype)}[{', '.join(map(str, p.shape))}]" for name, p in (("q", q), ("k", k)))
    lines = [f"RMSNorm of {' and '.join(shapes)} on mesh {mesh}"]
    for name, plan in (("q", q), ("k", k)):
        lines += [
            f"  {name}         {_placement_words(plan.x)}, a rank normalizes {plan.rows} rows of {plan.columns}",
            f"  {name} out     {_placement_words(plan.y)}",
            f"  d{name.upper()}        {'not needed' if plan.dx is None else _placement_words(plan.dx)}",
            f"  dW of {name}   {'none' if plan.dw is None else _placement_words(plan.dw)}",
        ]
    lines += [
        f"  forward   {_collective_words(q.forward)}",
        f"  backward  {_collective_words(q.backward)}",
        f"  gathering q and k first would take {_collective_words(q.gathering)} in the forward alone",
    ]
    return "\n".join(lines)
