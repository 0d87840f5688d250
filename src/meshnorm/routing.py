"""The route of a call on DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshnorm import dtensors
from meshnorm.errors import PlacementError
from meshnorm.layout import Mesh, Placements, Route, WeightPlacement, belonging, normalize, route_of
from meshnorm.layout_add import AddRoute, add_route_of
from meshnorm.layout_gated import GatedRoute, gated_route_of
from meshnorm.meshes import describe


def route_for(
    x: DTensor,
    weight: Tensor | None,
    ndim: int,
    hidden: str,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
    name: str = "x",
) -> Route:
    """The route of this call. Reads metadata alone, so that a refused call is refused on every rank alike. ``name`` is
    that of x in refusals; another than "x" stands before the names of what belongs to it."""
    check_order(x, name)
    check_order(weight, belonging(name, "weight"))
    return _route(
        describe(x.device_mesh),
        x.placements,
        x.ndim,
        ndim,
        _weight_placement(weight),
        hidden,
        weight_grad,
        _output(output_placements),
        weight is not None and weight.requires_grad,
        name,
    )


def add_route_for(
    x: DTensor,
    residual: DTensor,
    weight: Tensor | None,
    ndim: int,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
) -> AddRoute:
    """The same for a norm behind an addition."""
    check_order(x, "x")
    check_order(residual, "residual")
    check_order(weight, "weight")
    return _add_route(
        describe(x.device_mesh),
        x.placements,
        residual.placements,
        x.ndim,
        ndim,
        _weight_placement(weight),
        weight_grad,
        _output(output_placements),
        weight is not None and weight.requires_grad,
    )


def gated_route_for(
    x: DTensor,
    gate: DTensor | None,
    weight: Tensor | None,
    ndim: int,
    group_size: int,
    weight_grad: str,
    output_placements: Sequence[Placement] | None,
) -> GatedRoute:
    """The same for a norm beside a gate."""
    for tensor, name in ((x, "x"), (gate, "gate"), (weight, "weight")):
        check_order(tensor, name)
    return _gated_route(
        describe(x.device_mesh),
        x.placements,
        None if gate is None else gate.placements,
        x.ndim,
        tuple(x.shape[x.ndim - ndim :]),
        group_size,
        _weight_placement(weight),
        weight_grad,
        _output(output_placements),
        weight is not None and weight.requires_grad,
    )


def _weight_placement(weight: Tensor | None) -> WeightPlacement:
    if weight is None:
        return None
    return weight.placements if isinstance(weight, DTensor) else "plain"


def _output(output_placements: Sequence[Placement] | None) -> Placements | None:
    return None if output_placements is None else tuple(map(_decoded, output_placements))


def check_order(tensor: Tensor | None, name: str) -> None:
    if not dtensors.shards_in_order(tensor):
        raise PlacementError(
            f"{name} has a shard_order of its own, in which mesh dims share one tensor dim in another order than the "
            f"mesh's: redistribute it to its placements in the mesh's order first"
        )


def encoded(placement: Placement) -> str | int:
    """A placement as what torch.compile can put into a graph as a constant: "R", "P" or the tensor dim. Of its type
    alone: before torch 2.13 torch.compile cannot trace a placement's hash."""
    if not isinstance(placement, Placement):
        raise PlacementError("output_placements holds what is no placement: give one placement for each mesh dim")
    if placement.is_replicate():
        return "R"
    return "P" if placement.is_partial() else placement.dim  # type: ignore[attr-defined]


def _decoded(placement: Placement | str | int) -> Placement:
    if isinstance(placement, int):
        return Shard(placement)
    return {"R": Replicate(), "P": Partial()}.get(placement, placement) if isinstance(placement, str) else placement


@lru_cache(maxsize=4096)
def _route(
    mesh: Mesh,
    x: Placements,
    x_ndim: int,
    ndim: int,
    weight: WeightPlacement,
    hidden: str,
    weight_grad: str,
    output: Placements | None,
    weight_requires_grad: bool,
    name: str,
) -> Route:
    """``route_of`` for placements as torch gives them."""
    if isinstance(weight, tuple):
        weight = normalize(weight, ndim, mesh, belonging(name, "weight"))
    if output is not None:
        output = normalize(output, x_ndim, mesh, belonging(name, "output_placements"))
    x = normalize(x, x_ndim, mesh, name)
    return route_of(mesh, x, x_ndim, ndim, weight, hidden, weight_grad, output, weight_requires_grad, name)


@lru_cache(maxsize=4096)
def _add_route(
    mesh: Mesh,
    x: Placements,
    residual: Placements,
    x_ndim: int,
    ndim: int,
    weight: WeightPlacement,
    weight_grad: str,
    output: Placements | None,
    weight_requires_grad: bool,
) -> AddRoute:
    """``add_route_of`` for placements as torch gives them."""
    if isinstance(weight, tuple):
        weight = normalize(weight, ndim, mesh, "weight")
    if output is not None:
        output = normalize(output, x_ndim, mesh, "output_placements")
    x, residual = normalize(x, x_ndim, mesh, "x"), normalize(residual, x_ndim, mesh, "residual")
    return add_route_of(mesh, x, residual, x_ndim, ndim, weight, weight_grad, output, weight_requires_grad)


@lru_cache(maxsize=4096)
def _gated_route(
    mesh: Mesh,
    x: Placements,
    gate: Placements | None,
    x_ndim: int,
    hidden_shape: tuple[int, ...],
    group_size: int,
    weight: WeightPlacement,
    weight_grad: str,
    output: Placements | None,
    weight_requires_grad: bool,
) -> GatedRoute:
    """``gated_route_of`` for placements as torch gives them."""
    if isinstance(weight, tuple):
        weight = normalize(weight, len(hidden_shape), mesh, "weight")
    if output is not None:
        output = normalize(output, x_ndim, mesh, "output_placements")
    x, gate = normalize(x, x_ndim, mesh, "x"), None if gate is None else normalize(gate, x_ndim, mesh, "gate")
    return gated_route_of(
        mesh, x, gate, x_ndim, hidden_shape, group_size, weight, weight_grad, output, weight_requires_grad
    )
