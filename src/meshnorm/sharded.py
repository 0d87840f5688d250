"""Carries out a route on DTensors: unwrap, the route's collectives around the local ops, wrap again.

Global shape and stride travel with every wrap, so that uneven shards and ranks without rows are ordinary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from meshnorm import collectives, ops
from meshnorm.dispatch import unobserved
from meshnorm.formula import accumulation_dtype
from meshnorm.geometry import Split, held, local_size
from meshnorm.layout import Placements, Route, Step, normalize, route_of
from meshnorm.local import once_differentiable
from meshnorm.meshes import describe, group_name


def sharded_rms_norm(
    x: DTensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    ndim: int,
    hidden: str,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
    in_place: bool,
) -> Tensor:
    """y as a DTensor on x's mesh. Arguments are checked but for what concerns placements."""
    route = route_for(x, weight, ndim, hidden, weight_grad, output_placements)
    return _ShardedRMSNorm.apply(x, weight, route, eps, offset, casting_mode, in_place)


def route_for(
    x: DTensor,
    weight: Tensor | None,
    ndim: int,
    hidden: str,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
) -> Route:
    """The route of this call. Reads metadata alone, so that a refused call is refused on every rank alike."""
    mesh = describe(x.device_mesh)
    if weight is None:
        weight_placement = None
    elif isinstance(weight, DTensor):
        weight_placement = normalize(weight.placements, ndim, mesh, "weight")
    else:
        weight_placement = "plain"
    output = None if output_placements is None else normalize(output_placements, x.ndim, mesh, "output_placements")
    return route_of(
        mesh,
        normalize(x.placements, x.ndim, mesh, "x"),
        x.ndim,
        ndim,
        weight_placement,
        hidden,
        weight_grad,
        output,
        x.requires_grad,
        weight is not None and weight.requires_grad,
    )


class _ShardedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, route, eps, offset, casting_mode, in_place):  # noqa: ANN001
        mesh = x.device_mesh
        shape, ndim = x.shape, route.normalized_ndim
        hidden_shape = tuple(shape[x.ndim - ndim :])
        local = _local(x)
        on_mesh = mesh.get_coordinate() is not None
        if on_mesh:
            local = _carry_out(route.x_steps, local, route, route.x, shape, mesh, x.placements)
        local_weight = _local_weight(weight, route, hidden_shape, mesh)
        if not on_mesh:
            y, rstd = local.clone(), local.new_empty(0, dtype=accumulation_dtype(x.dtype))
        elif route.splits_hidden:
            total = _sum(ops.statistic(local, ndim), route.statistic_steps, mesh)
            y, rstd = ops.apply(
                local, local_weight, total, math.prod(hidden_shape), eps, offset, casting_mode, ndim
            )
        else:
            y, rstd = ops.forward(local, local_weight, eps, offset, casting_mode, ndim)
        ctx.save_for_backward(local, local_weight, rstd)
        ctx.route, ctx.mesh, ctx.offset, ctx.in_place, ctx.on_mesh = route, mesh, offset, in_place, on_mesh
        ctx.shape, ctx.hidden_shape = shape, hidden_shape
        ctx.weight_dtype = None if weight is None else weight.dtype
        return _wrap(y, mesh, route.y, shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_ShardedRMSNorm.backward, ctx, dy, ctx.saved_tensors)
        route, mesh = ctx.route, ctx.mesh
        local, local_weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        local_dy = _local(_as_placed(dy, mesh, route.y))
        ndim = route.normalized_ndim
        if not ctx.on_mesh:
            dx = local.clone() if needs_dx else None
            dw = local.new_empty(0, dtype=ctx.weight_dtype) if needs_dw else None
        else:
            dx, dw = _local_gradients(ctx, local_dy, local, local_weight, rstd, needs_dx, needs_dw)
            if needs_dx and route.gathers:
                dx = _own_slice(dx, route.hidden_chains, ctx.shape[-ndim:], mesh, first_dim=dx.ndim - ndim).contiguous()
            dw = _finish_dw(dw, route, ctx.hidden_shape, ctx.weight_dtype, mesh) if needs_dw else None
        dx = _wrap(dx, mesh, route.dx, ctx.shape) if needs_dx else None
        if needs_dw and route.weight != "plain":
            dw = _wrap(dw, mesh, route.dw, ctx.hidden_shape)
        return dx, dw, None, None, None, None, None


def _local_gradients(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """dX and dW of the rows and columns held here. dW stays in the accumulation dtype if it will be summed."""
    route: Route = ctx.route
    ndim = route.normalized_ndim
    dw_dtype = x.dtype
    if needs_dw:
        dw_dtype = accumulation_dtype(x.dtype) if route.dw_steps else ctx.weight_dtype
    in_place = ctx.in_place and unobserved(dy, x)
    if not (route.splits_hidden and needs_dx):
        args = (dy, x, weight, rstd, ctx.offset, ndim, needs_dx, needs_dw, dw_dtype)
        return ops.backward_into(*args, True) if in_place else ops.backward(*args)
    total = ops.backward_statistic(dy, x, weight, rstd, ctx.offset, ndim)
    total = _sum(total, route.statistic_steps, ctx.mesh)
    size = math.prod(ctx.hidden_shape)
    args = (dy, x, weight, rstd, total, size, ctx.offset, ndim, needs_dx, needs_dw, dw_dtype)
    return ops.backward_apply_into(*args, True) if in_place else ops.backward_apply(*args)


# --- steps -------------------------------------------------------------------------------------------------------------


def _sum(local: Tensor, steps: Sequence[Step], mesh: DeviceMesh) -> Tensor:
    for step in steps:
        local = collectives.all_reduce(local, "sum", group_name(mesh, step.mesh_dims), 0)
    return local


def _carry_out(
    steps: Sequence[Step],
    local: Tensor,
    route: Route,
    placements: Placements,
    shape: Sequence[int],
    mesh: DeviceMesh,
    given: Sequence[Placement],
) -> Tensor:
    """``local`` after the collectives that reduce or gather it, one mesh dim at a time."""
    sizes, coordinate = route.mesh.sizes, mesh.get_coordinate()
    assert coordinate is not None
    chains: list[list[Split]] = [list(c) for c in _chains(placements, route)]
    for step in steps:
        (dim,) = step.mesh_dims
        group, parts, onto = group_name(mesh, step.mesh_dims), sizes[dim], step.tensor_dim
        if onto is None:
            if type(given[dim]) is Partial:
                local = collectives.all_reduce(local, step.reduce_op, group, parts)
            else:  # a partial of its own kind, such as a vocabulary-sharded embedding's, knows how it is reduced
                local = _waited(given[dim]._reduce_value(local, mesh, dim))  # type: ignore[attr-defined]
            continue
        if step.kind == "reduce_scatter":
            if type(given[dim]) is not Partial:
                local = given[dim]._reduce_value(local, mesh, dim)  # type: ignore[attr-defined]
            lengths = [local_size(local.size(onto), (Split(0),), (parts,), (rank,)) for rank in range(parts)]
            local = collectives.reduce_scatter(local, step.reduce_op, group, lengths, coordinate[dim], onto)
            chains[onto].append(Split(dim))
            continue
        split = chains[onto].pop()
        whole = local_size(shape[onto], chains[onto], sizes, coordinate)
        pieces = [held(whole, (Split(0, split.factor),), (parts,), (rank,)) for rank in range(parts)]
        local = collectives.all_gather(local, group, pieces, onto)
    return local


def _chains(placements: Placements, route: Route) -> Any:
    from meshnorm.geometry import chains

    return chains(placements, route.mesh.sizes, 64)


def _own_slice(
    whole: Tensor, chains: Sequence[Sequence[Split]], shape: Sequence[int], mesh: DeviceMesh, first_dim: int = 0
) -> Tensor:
    """The part of ``whole`` that this rank holds under ``chains``, which start at ``first_dim``."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole
    for dim, (size, chain) in enumerate(zip(shape, chains, strict=True)):
        if chain:
            mine = held(size, chain, tuple(mesh.shape), coordinate)
            parts = [whole.narrow(first_dim + dim, start, stop - start) for start, stop in mine]
            if len(parts) == 1:
                whole = parts[0]
            else:
                whole = torch.cat(parts, first_dim + dim) if parts else whole.narrow(first_dim + dim, 0, 0)
    return whole


def _local_weight(weight: Tensor | None, route: Route, hidden_shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor | None:
    """The part of the weight that belongs to the columns held here: sliced, used as it is, or gathered and sliced."""
    if weight is None:
        return None
    wanted = () if route.gathers else route.hidden_chains
    if route.weight == "plain":
        return _own_slice(weight, wanted, hidden_shape, mesh) if wanted else weight
    assert isinstance(weight, DTensor)
    local = _local(weight)
    if mesh.get_coordinate() is None:
        return local
    if not route.weight_is_aligned:
        assert isinstance(route.weight, tuple)
        local = _carry_out(route.weight_steps, local, route, route.weight, hidden_shape, mesh, weight.placements)
        return _own_slice(local, wanted, hidden_shape, mesh) if wanted else local
    if not wanted:
        return local
    missing = [() if own else chain for own, chain in zip(route.weight_chains, wanted, strict=True)]
    return _own_slice(local, missing, hidden_shape, mesh)


def _finish_dw(
    dw: Tensor, route: Route, hidden_shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh
) -> Tensor:
    """The local part of dW as the route places it: summed if the route sums it, then cast, then cut to size."""
    wanted = () if route.gathers else route.hidden_chains
    whole_is_wanted = route.weight == "plain" or not route.weight_is_aligned
    if whole_is_wanted and any(wanted):
        dw = _embedded(dw, wanted, hidden_shape, mesh)
    dw = _sum(dw, route.dw_steps, mesh).to(dtype)
    if route.weight != "plain" and not route.weight_is_aligned:
        dw = _own_slice(dw, route.weight_chains, hidden_shape, mesh).contiguous()
    return dw


def _embedded(part: Tensor, chains: Sequence[Sequence[Split]], shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """``part`` at its place in zeros of ``shape``."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, (size, chain) in reversed(list(enumerate(zip(shape, chains, strict=True)))):
        if not chain:
            continue
        whole = part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :]))
        at = 0
        for start, stop in held(size, chain, tuple(mesh.shape), coordinate):
            whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start
        part = whole
    return part


# --- wrapping ----------------------------------------------------------------------------------------------------------


def _local(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, waited for."""
    return _waited(x.to_local() if isinstance(x, DTensor) else x)


def _waited(local: Tensor) -> Tensor:
    """``local`` itself once a pending functional collective has delivered it."""
    wait = getattr(local, "trigger_wait", None)
    return local if wait is None else wait()


def _as_placed(dy: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """dY in y's placement, whatever placement it arrived in."""
    assert isinstance(dy, DTensor)
    if tuple(dy.placements) == placements:
        return dy
    if any(p.is_partial() for p in dy.placements):
        dy = dy.redistribute(mesh, [Replicate() if p.is_partial() else p for p in dy.placements])
    return dy if tuple(dy.placements) == placements else dy.redistribute(mesh, placements)


def _wrap(local: Tensor, mesh: DeviceMesh, placements: Placements | None, shape: Sequence[int]) -> DTensor:
    """A DTensor of contiguous global ``shape`` around ``local``."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(stride))
    )
