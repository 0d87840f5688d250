"""Who holds what of x + residual: the layout both are brought to, and how. Pure, as ``layout``.

Per mesh dim, and these independently:

====================  ====================  ==========================================================
x                     residual              both become
====================  ====================  ==========================================================
placed alike          placed alike          that; nothing is communicated
partial               sharded, replicated   as the residual: x is reduce-scattered, or all-reduced
sharded, replicated   partial               as x: the residual is reduce-scattered, or all-reduced
partial               partial               replicated, or as ``output_placements`` asks: each is reduced
sharded               replicated            as x: each rank takes its part of the residual
====================  ====================  ==========================================================

All else would take a gather, or an exchange of shards, of what is as large as the residual stream: it is refused, so
that nobody pays for it unknowingly. The norm of the sum then takes the route of an x of that layout, and the gradients
of x and of the residual lie as the sum does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor.placement_types import Replicate

from meshnorm.errors import UnreachableLayoutError
from meshnorm.layout import (
    Mesh,
    Move,
    Placements,
    Route,
    WeightPlacement,
    check_output,
    move,
    resolve_partial,
    route_of,
)


@dataclass(frozen=True)
class AddRoute:
    """What one call does: x and the residual move to the layout of ``norm``, the route of the sum's norm."""

    x: Placements
    residual: Placements
    x_move: Move
    residual_move: Move
    norm: Route


@lru_cache(maxsize=4096)
def add_route_of(
    mesh: Mesh,
    x: Placements,
    residual: Placements,
    ndim: int,
    normalized_ndim: int,
    weight: WeightPlacement,
    weight_grad: str = "auto",
    output_placements: Placements | None = None,
    weight_requires_grad: bool = True,
    name: str = "residual",
) -> AddRoute:
    """The route for placements with their dims counted from the front (``normalize``). Raises UnreachableLayoutError
    for what the table refuses; ``name`` is what it then calls the residual."""
    both = _resolved(mesh, x, residual, ndim, output_placements, name)
    x_move, residual_move = move(mesh, x, both, ndim), move(mesh, residual, both, ndim)
    for step in (*x_move.steps, *residual_move.steps):
        if step.kind == "all_gather":
            raise UnreachableLayoutError(_refusal(mesh, x, residual, step.mesh_dims[0], name))
    norm = route_of(
        mesh, both, ndim, normalized_ndim, weight, "stats", weight_grad, weight_requires_grad=weight_requires_grad
    )
    return AddRoute(x, residual, x_move, residual_move, norm)


def _resolved(
    mesh: Mesh, x: Placements, residual: Placements, ndim: int, output: Placements | None, name: str
) -> Placements:
    """The layout that x and the residual are brought to."""
    given, wanted = [], []
    for dim, (mine, other) in enumerate(zip(x, residual, strict=True)):
        if mine.is_partial() or other.is_partial():
            given.append(mine if mine.is_partial() else other)
            unasked = mine if not mine.is_partial() else other if not other.is_partial() else Replicate()
            wanted.append(unasked if output is None else output[dim])
            continue
        if mine != other and not other.is_replicate() and mesh.sizes[dim] > 1:
            raise UnreachableLayoutError(_refusal(mesh, x, residual, dim, name))
        given.append(mine)
        wanted.append(mine)
    asking = f"the layouts of x and {name} ask for" if output is None else "output_placements asks for"
    both = resolve_partial(mesh, tuple(given), ndim, tuple(wanted), asking, f"x or {name}")
    check_output(mesh, tuple(given), both, output, ndim, ndim, False)
    return both


def _refusal(mesh: Mesh, x: Placements, residual: Placements, dim: int, name: str) -> str:
    way_out = "redistribute one of them to the other's placements first"
    if x[dim].is_replicate():
        way_out = f"redistribute x to {name}'s placements first, which takes no communication there"
    return (
        f"{name} is {residual[dim]} on mesh dim {mesh.names[dim]!r}, but x is {x[dim]} there, so that one of them "
        f"would have to be gathered: {way_out}"
    )
