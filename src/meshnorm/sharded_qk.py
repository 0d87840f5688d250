"""Carries out the routes of q and k on DTensors: each is a norm as in ``sharded``, and what both do is done at once.

One all-reduce serves the numbers of both, and one both dW, wherever their routes let it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshnorm import ops, ops_qk
from meshnorm.collectives import all_reduce
from meshnorm.formula import accumulation_dtype
from meshnorm.layout_qk import Exchange, exchanges_of
from meshnorm.local import once_differentiable
from meshnorm.local_qk import constant_outputs
from meshnorm.meshes import group_name
from meshnorm.moving import summed
from meshnorm.routing import route_for
from meshnorm.sharded import (
    ShardedNorm,
    _local_gradients,
    _Moved,
    finish_dw,
    local_gradient,
    local_weight_of,
    placed_dw,
    whole_dw,
)


@torch.compiler.allow_in_graph
def sharded_qk_rms_norm(
    q: DTensor,
    k: DTensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    q_ndim: int,
    k_ndim: int,
    weight_grad: str,
    q_output_placements: Sequence[Placement] | None,
    k_output_placements: Sequence[Placement] | None,
) -> tuple[Tensor, Tensor]:
    """Both y as DTensors on their mesh. Arguments are checked but for what concerns placements.

    In torch.compile's graph whole, as ``sharded_rms_norm`` is.
    """
    q_route = route_for(q, q_weight, q_ndim, "stats", weight_grad, q_output_placements, "q")
    k_route = route_for(k, k_weight, k_ndim, "stats", weight_grad, k_output_placements, "k")
    if q_route.x != q_route.y:
        q = _Moved.apply(q, q_route)  # type: ignore[assignment]
    if k_route.x != k_route.y:
        k = _Moved.apply(k, k_route)  # type: ignore[assignment]
    numbers = eps, offset, casting_mode, False
    norms = ShardedNorm(q, q_weight, q_route, *numbers), ShardedNorm(k, k_weight, k_route, *numbers)
    return _ShardedQKRMSNorm.apply(q, k, q_weight, k_weight, norms)  # type: ignore[return-value]


Norms = tuple[ShardedNorm, ShardedNorm]


class _ShardedQKRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, q_weight, k_weight, norms):
        tensors = q, k, q_weight, k_weight
        weights = [local_weight_of(w, norm) for w, norm in zip(tensors[2:], norms, strict=True)]
        *ys, q_rstd, k_rstd = _forward((norms[0].part(q), norms[1].part(k)), weights, norms)
        outputs = tuple(norm.wrapped(q, y, norm.route.y, norm.shape) for norm, y in zip(norms, ys, strict=True))
        # The tensors themselves, not their local parts, so that autograd notices when they are changed; the weights
        # beside them where it took communication to get them.
        gathered = [w if norm.gathers_weight else None for w, norm in zip(weights, norms, strict=True)]
        ctx.save_for_backward(*tensors, q_rstd, k_rstd, *gathered)
        ctx.set_materialize_grads(False)  # no zeros for an output that is not used
        ctx.mark_non_differentiable(*constant_outputs(tensors, outputs))
        ctx.norms = norms
        return outputs

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return *once_differentiable(_backward, ctx, *dys), None
        return *_backward(ctx, *dys, *ctx.saved_tensors), None  # type: ignore[arg-type]


def _forward(parts: tuple[Tensor, Tensor], weights: Sequence[Tensor | None], norms: Norms) -> tuple[Tensor, ...]:
    """(y of q, y of k, rstd of q, rstd of k) of the rows and columns held here."""
    q_norm, k_norm = norms
    if not q_norm.on_mesh:
        nothing = [part.new_empty(0, dtype=accumulation_dtype(part.dtype)) for part in parts]
        return *(part.clone() for part in parts), *nothing
    ndims = q_norm.route.normalized_ndim, k_norm.route.normalized_ndim
    how = q_norm.eps, q_norm.offset, q_norm.casting_mode
    splits = [norm.route.splits_hidden for norm in norms]
    if not any(splits):
        return ops_qk.qk_forward(*parts, *weights, *how, *ndims)
    sizes = [math.prod(norm.hidden_shape) for norm in norms]
    if all(splits):
        totals = ops_qk.qk_statistic(*parts, *ndims)
        totals = _exchanged(totals, ops_qk.rows_of(parts[0], ndims[0]), _exchanges(norms), q_norm)
        return ops_qk.qk_apply(*parts, *weights, totals, *sizes, *how, *ndims)
    found = []
    for part, weight, norm, ndim, size in zip(parts, weights, norms, ndims, sizes, strict=True):
        if norm.route.splits_hidden:
            total = summed(ops.statistic(part, ndim), norm.route.statistic_steps, norm.mesh)
            found.append(ops.apply(part, weight, total, size, *how, ndim))
        else:
            found.append(ops.forward(part, weight, *how, ndim))
    return *(y for y, _ in found), *(rstd for _, rstd in found)


def _exchanges(norms: Norms) -> tuple[Exchange, ...]:
    return exchanges_of(norms[0].route.mesh, norms[0].route, norms[1].route)


def _exchanged(totals: Tensor, q_rows: int, exchanges: Sequence[Exchange], norm: ShardedNorm) -> Tensor:
    """Packed numbers, each summed over the ranks that hold a part of its row."""
    coordinate = norm.mesh.get_coordinate()
    assert coordinate is not None
    for exchange in exchanges:
        group = group_name(norm.mesh, exchange.mesh_dims)
        if exchange.is_of_all:
            totals = all_reduce(totals, "sum", group, 0)
            continue
        parts = [totals[:q_rows], totals[q_rows:]]
        both = (exchange.has_q, exchange.q_once), (exchange.has_k, exchange.k_once)
        sent = [
            torch.zeros_like(part) if any(coordinate[dim] for dim in once) else part
            for part, (takes_part, once) in zip(parts, both, strict=True)
            if takes_part
        ]
        found = all_reduce(torch.cat(sent), "sum", group, 0)
        if not exchange.has_k:
            found = torch.cat([found, parts[1]])
        elif not exchange.has_q:
            found = torch.cat([parts[0], found])
        totals = found
    return totals


def _backward(
    ctx: Any,
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: DTensor,
    k: DTensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    *gathered: Tensor | None,
) -> tuple[Tensor | None, ...]:
    norms: Norms = ctx.norms
    dys, xs, weights, names = (dq_out, dk_out), (q, k), (q_weight, k_weight), ("q", "k")
    needs = [ctx.needs_input_grad[place] and dys[place % 2] is not None for place in range(4)]
    local_dys = [
        local_gradient(dy, norm, f"the normalized {name}")
        if dy is not None and (needs[place] or needs[place + 2])
        else None
        for place, (dy, norm, name) in enumerate(zip(dys, norms, names, strict=True))
    ]
    parts = norms[0].part(q), norms[1].part(k)
    local_weights = [
        local_weight_of(weight, norm) if kept is None else kept
        for weight, norm, kept in zip(weights, norms, gathered, strict=True)
    ]
    if norms[0].on_mesh:
        found = _gradients(norms, local_dys, parts, local_weights, (q_rstd, k_rstd), needs)
        dws = _finished(norms, found[2:])
    else:
        found = [part.clone() for part in parts]
        dws = [
            part.new_zeros(norm.hidden_shape if norm.route.weight == "plain" else (0,), dtype=norm.weight_dtype)
            for part, norm in zip(parts, norms, strict=True)
        ]
    results: list[Tensor | None] = []
    for place, norm in enumerate(norms):
        dx = found[place]
        results.append(None if dx is None or not needs[place] else norm.wrapped(xs[0], dx, norm.route.y, norm.shape))
    for place, norm in enumerate(norms):
        dw = dws[place]
        if dw is not None and norm.route.weight != "plain":
            dw = norm.wrapped(xs[0], dw, norm.route.dw, norm.hidden_shape)
        results.append(dw if needs[place + 2] else None)
    return tuple(results)


def _gradients(
    norms: Norms,
    dys: Sequence[Tensor | None],
    parts: tuple[Tensor, Tensor],
    weights: Sequence[Tensor | None],
    rstds: tuple[Tensor, Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """dQ, dK and both dW of the rows and columns held here. A dW that will be summed stays in the accumulation
    dtype."""
    q_norm, k_norm = norms
    ndims = q_norm.route.normalized_ndim, k_norm.route.normalized_ndim
    acc = accumulation_dtype(parts[0].dtype)
    dw_dtypes = [
        (acc if norm.route.dw_steps else norm.weight_dtype) if need else None
        for norm, need in zip(norms, needs[2:], strict=True)
    ]
    exchanging = [norm.route.splits_hidden and need for norm, need in zip(norms, needs[:2], strict=True)]
    given = *parts, *weights, *rstds
    if not any(exchanging):
        found = ops_qk.qk_backward(*dys, *given, q_norm.offset, *ndims, *needs[:2], *dw_dtypes)
        return [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
    if all(exchanging):
        totals = ops_qk.qk_backward_statistic(*dys, *given, q_norm.offset, *ndims)
        totals = _exchanged(totals, ops_qk.rows_of(parts[0], ndims[0]), _exchanges(norms), q_norm)
        sizes = [math.prod(norm.hidden_shape) for norm in norms]
        found = ops_qk.qk_backward_apply(*dys, *given, totals, *sizes, q_norm.offset, *ndims, *needs[:2], *dw_dtypes)
        return [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
    alone: list[Tensor | None] = [None] * 4
    for place, (norm, dy) in enumerate(zip(norms, dys, strict=True)):
        wanted = needs[place], needs[place + 2]
        if dy is not None and any(wanted):
            dx, dw = _local_gradients(norm, dy, parts[place], weights[place], rstds[place], *wanted)
            alone[place], alone[place + 2] = dx if wanted[0] else None, dw if wanted[1] else None
    return alone


def _finished(norms: Norms, dws: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Both dW as their routes place them, summed in one collective where they are summed over the same mesh dims."""
    (q_norm, k_norm), (q_dw, k_dw) = norms, dws
    steps = q_norm.route.dw_steps
    if q_dw is None or k_dw is None or not steps or steps != k_norm.route.dw_steps:
        return [
            None if dw is None else finish_dw(dw, norm.route, norm.hidden_shape, norm.weight_dtype, norm.mesh)
            for dw, norm in zip(dws, norms, strict=True)
        ]
    wholes = [
        whole_dw(dw, norm.route, norm.hidden_shape, norm.mesh) for dw, norm in zip((q_dw, k_dw), norms, strict=True)
    ]
    packed = summed(torch.cat([whole.flatten() for whole in wholes]), steps, q_norm.mesh)
    found = packed.split([whole.numel() for whole in wholes])
    return [
        placed_dw(part.view(whole.shape).clone(), norm.route, norm.weight_dtype, norm.mesh)
        for part, whole, norm in zip(found, wholes, norms, strict=True)
    ]
