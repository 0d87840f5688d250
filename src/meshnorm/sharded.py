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
from torch.distributed.tensor.placement_types import Placement

from meshnorm import dtensors, ops
from meshnorm.dispatch import unobserved
from meshnorm.errors import MeshMismatchError, MixedTensorError
from meshnorm.formula import accumulation_dtype
from meshnorm.layout import Placements, Route, move, normalize
from meshnorm.local import once_differentiable
from meshnorm.moving import cut, embedded, local_part, moved, summed, waited, wrapped
from meshnorm.replayed import Norm
from meshnorm.routing import check_order, route_for


@torch.compiler.allow_in_graph
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
    """y as a DTensor on x's mesh. Arguments are checked but for what concerns placements.

    torch.compile puts the whole call into its graph and traces what it does to local tensors; the layout arithmetic is
    run, not traced, which no release of it manages without a graph break.
    """
    route = route_for(x, weight, ndim, hidden, weight_grad, output_placements)
    if route.x != route.y:
        x = _Moved.apply(x, route)
    return _ShardedRMSNorm.apply(x, weight, ShardedNorm(x, weight, route, eps, offset, casting_mode, in_place))


def known_norm(
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
) -> ShardedNorm | None:
    """``sharded_rms_norm`` for calls whose x and weight are like these, and which nothing observes; None where it does
    more than carry out the one route."""
    route = route_for(x, weight, ndim, hidden, weight_grad, output_placements)
    if route.x != route.y:
        return None
    norm = ShardedNorm(x, weight, route, eps, offset, casting_mode, in_place)
    norm.kernels = Norm(eps, offset, casting_mode, ndim)
    return norm


class _Moved(torch.autograd.Function):
    """x in the layout in which it is normalized: partial mesh dims reduced, hidden ones gathered where asked."""

    @staticmethod
    def forward(ctx: Any, x, route):
        mesh = x.device_mesh
        ctx.mesh, ctx.route, ctx.shape = mesh, route, x.shape
        local = local_part(x)
        if mesh.get_coordinate() is not None:
            local = moved(local, route.x_move, x.shape, mesh, x.placements)
        return wrapped(local, mesh, route.y, x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_moved_backward, ctx, dy)
        return _moved_backward(ctx, dy)


def _moved_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of what was reduced is that of the result; of what was gathered, each rank's slice of it."""
    route: Route = ctx.route
    assert isinstance(dy, DTensor)
    _check_mesh(dy, ctx.mesh)
    if tuple(dy.placements) == route.dx:
        return dy, None
    mesh, local = dy.device_mesh, local_part(dy)
    if mesh.get_coordinate() is not None:
        rows = len(ctx.shape) - route.normalized_ndim
        local = cut(local, (*((),) * rows, *route.hidden_chains), mesh).contiguous()
    return wrapped(local, mesh, route.dx, ctx.shape), None


class ShardedNorm:
    """What a route comes to for x and a weight of one layout and signature. Calling it gives y as a DTensor."""

    def __init__(
        self,
        x: DTensor,
        weight: Tensor | None,
        route: Route,
        eps: float,
        offset: float,
        casting_mode: str,
        in_place: bool,
    ) -> None:
        self.route, self.eps, self.offset, self.casting_mode, self.in_place = route, eps, offset, casting_mode, in_place
        self.mesh, self.shape = x.device_mesh, x.shape
        self._weight_mesh = weight.device_mesh if isinstance(weight, DTensor) else None  # kept: it is known by its id
        self.on_mesh = self.mesh.get_coordinate() is not None
        self.hidden_shape = tuple(self.shape[x.ndim - route.normalized_ndim :])
        self.weight_dtype = x.dtype if weight is None else weight.dtype
        self.gathers_weight = route.weight_move is not None and len(route.weight_move.steps) > 0
        # Of norms that are called again: the kernels on local tensors, and the specs of the DTensors that were made.
        self.kernels: Norm | None = None
        self._specs: dict[tuple[Placements | None, bool], Any] = {}

    def __call__(self, x: DTensor, weight: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
            return _apply(x, weight, self)
        return self.forward(x, weight, False)[0]

    def forward(
        self, x: DTensor, weight: Tensor | None, with_rstd: bool
    ) -> tuple[DTensor, Tensor | None, Tensor | None]:
        """(y, rstd, this rank's part of the weight)."""
        route, mesh, ndim = self.route, self.mesh, self.route.normalized_ndim
        local = self.part(x)
        local_weight = local_weight_of(weight, self)
        rstd = None
        if not self.on_mesh:
            y, rstd = local.clone(), local.new_empty(0, dtype=accumulation_dtype(x.dtype))
        elif route.splits_hidden:
            total = summed(ops.statistic(local, ndim), route.statistic_steps, mesh)
            size = math.prod(self.hidden_shape)
            y, rstd = ops.apply(local, local_weight, total, size, self.eps, self.offset, self.casting_mode, ndim)
        elif self.kernels is None or (self.gathers_weight and not unobserved(local_weight)):
            y, rstd = ops.forward(local, local_weight, self.eps, self.offset, self.casting_mode, ndim)
        elif with_rstd:
            y, rstd = self.kernels.y_and_rstd(local, local_weight)
        else:
            y = self.kernels.y(local, local_weight)
        return self.wrapped(x, y, route.y, self.shape), rstd, local_weight

    def part(self, x: Tensor) -> Tensor:
        """The local tensor, for what autograd does not follow."""
        if self.kernels is None:
            return local_part(x)
        return waited(dtensors.local(x) if isinstance(x, DTensor) else x)

    def wrapped(self, x: DTensor, local: Tensor, placements: Placements | None, shape: Sequence[int]) -> DTensor:
        """``local``, which nothing else holds, as a DTensor on x's mesh: y or dX if ``shape`` is x's, else dW."""
        if self.kernels is None:
            return wrapped(local, self.mesh, placements, shape)
        key = (placements, shape is self.shape)
        spec = self._specs.get(key)
        if spec is None:
            whole = wrapped(local, self.mesh, placements, shape)
            self._specs[key] = dtensors.reusable_spec(whole)
            return whole
        return dtensors.made(x, local, spec)


class _ShardedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, norm):
        y, rstd, local_weight = norm.forward(x, weight, True)
        # x and the weight themselves, not their local parts, so that autograd notices when they are changed; the weight
        # beside them where it took communication to get it.
        ctx.save_for_backward(x, weight, rstd, local_weight if norm.gathers_weight else None)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_sharded_backward, ctx, dy)
        return _sharded_backward(ctx, dy, *ctx.saved_tensors)


_apply: Any = super(torch.autograd.Function, _ShardedRMSNorm).apply  # type: ignore[misc] # as in ``local``


def _sharded_backward(
    ctx: Any, dy: Tensor, x: DTensor, weight: Tensor | None, rstd: Tensor, local_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    norm: ShardedNorm = ctx.norm
    route, mesh = norm.route, norm.mesh
    local = norm.part(x)
    if local_weight is None:
        local_weight = local_weight_of(weight, norm)
    needs_dx, needs_dw, _ = ctx.needs_input_grad
    local_dy = local_gradient(dy, norm, "y")
    if not norm.on_mesh:
        dx = local.clone() if needs_dx else None
        shape = norm.hidden_shape if route.weight == "plain" else (0,)
        dw = local.new_zeros(shape, dtype=norm.weight_dtype) if needs_dw else None
    else:
        dx, dw = _local_gradients(norm, local_dy, local, local_weight, rstd, needs_dx, needs_dw)
        dw = finish_dw(dw, route, norm.hidden_shape, norm.weight_dtype, mesh) if needs_dw else None
    if dx is not None and needs_dx:
        dx = norm.wrapped(x, dx.view_as(dx) if dx is local_dy else dx, route.y, norm.shape)
    if dw is not None and route.weight != "plain":
        dw = norm.wrapped(x, dw, route.dw, norm.hidden_shape)
    return dx if needs_dx else None, dw, None


def _local_gradients(
    norm: ShardedNorm, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """dX and dW of the rows and columns held here. dW stays in the accumulation dtype if it will be summed."""
    route = norm.route
    ndim = route.normalized_ndim
    dw_dtype = x.dtype
    if needs_dw:
        dw_dtype = accumulation_dtype(x.dtype) if route.dw_steps else norm.weight_dtype
    if not (route.splits_hidden and needs_dx):
        if norm.kernels is not None and unobserved(dy, x, weight, rstd):
            return norm.kernels.gradients(dy, x, weight, rstd, needs_dx, needs_dw, dw_dtype, norm.in_place)
        in_place = norm.in_place and unobserved(dy, x)
        args = (dy, x, weight, rstd, norm.offset, ndim, needs_dx, needs_dw, dw_dtype)
        return ops.backward_into(*args, True) if in_place else ops.backward(*args)
    in_place = norm.in_place and unobserved(dy, x)
    total = ops.backward_statistic(dy, x, weight, rstd, norm.offset, ndim)
    total = summed(total, route.statistic_steps, norm.mesh)
    size = math.prod(norm.hidden_shape)
    args = (dy, x, weight, rstd, total, size, norm.offset, ndim, needs_dx, needs_dw, dw_dtype)
    return ops.backward_apply_into(*args, True) if in_place else ops.backward_apply(*args)


def local_weight_of(weight: Tensor | None, norm: ShardedNorm) -> Tensor | None:
    """The part of the weight that belongs to the columns held here."""
    weight_move = norm.route.weight_move
    if weight is None or weight_move is None:
        return None
    local = norm.part(weight)
    if weight_move.is_nothing or not norm.on_mesh:
        return local
    given = weight.placements if isinstance(weight, DTensor) else ()
    return moved(local, weight_move, norm.hidden_shape, norm.mesh, given)


def _check_mesh(dy: DTensor, mesh: DeviceMesh, of: str = "y") -> None:
    if dy.device_mesh != mesh:
        raise MeshMismatchError(
            f"the gradient of {of} is on {dy.device_mesh} but {of} is on {mesh}: redistribute the gradient onto "
            f"{of}'s mesh"
        )


def local_gradient(dy: Tensor, norm: ShardedNorm, of: str) -> Tensor:
    """This rank's part of the gradient of y, or of what lies as y does, in y's placement, whatever placement it arrived
    in."""
    if not norm.on_mesh:
        return local_part(dy)
    if not isinstance(dy, DTensor):
        raise MixedTensorError(
            f"the gradient of {of} is a plain tensor, but {of} is a DTensor: wrap the gradient as {of} is wrapped"
        )
    route, mesh, shape = norm.route, norm.mesh, norm.shape
    _check_mesh(dy, mesh, of)
    check_order(dy, f"the gradient of {of}")
    local = norm.part(dy)
    if tuple(dy.placements) == route.y:
        return local
    have = normalize(dy.placements, len(shape), route.mesh, f"the gradient of {of}")
    return moved(local, move(route.mesh, have, route.y, len(shape)), shape, mesh, dy.placements)


def finish_dw(dw: Tensor, route: Route, hidden_shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh) -> Tensor:
    """The local part of dW as the route places it: summed if the route sums it, then cast, then cut to size."""
    return placed_dw(summed(whole_dw(dw, route, hidden_shape, mesh), route.dw_steps, mesh), route, dtype, mesh)


def whole_dw(dw: Tensor, route: Route, hidden_shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """dW at the size at which the route sums it."""
    return (
        embedded(dw, route.hidden_chains, hidden_shape, mesh) if route.sums_whole_weight and route.splits_hidden else dw
    )


def placed_dw(dw: Tensor, route: Route, dtype: torch.dtype, mesh: DeviceMesh) -> Tensor:
    """dW, summed, as the route places it."""
    dw = dw.to(dtype)
    if route.weight != "plain" and not route.weight_is_aligned:
        assert route.weight_move is not None
        dw = cut(dw, route.weight_move.have, mesh).contiguous()
    return dw
