"""Who holds what of a gated norm: x and the gate in one layout, and which columns of which groups. Pure, as ``layout``.

x and the gate come to one layout as x and a residual do (``layout_add``), and the norm takes the route of an x of that
layout. But for its exchange: where every rank that holds columns holds whole groups, there is none. Else each rank adds
up its columns of each group, and one number a row and group is all-reduced over the mesh dims that shard the columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from meshnorm.geometry import Interval, Split, held
from meshnorm.layout import Mesh, Move, Placements, Route, WeightPlacement
from meshnorm.layout_add import add_route_of


class Segment(NamedTuple):
    """Columns [start, stop) of a local tensor: ``size`` columns of each of consecutive groups, from ``group`` on."""

    start: int
    stop: int
    group: int
    size: int


@dataclass(frozen=True)
class GatedRoute:
    """What one call does: x and the gate move to the layout of ``norm``, whose statistic is exchanged if ``straddles``:
    if some group lies on several ranks."""

    x: Placements
    gate: Placements
    x_move: Move
    gate_move: Move
    norm: Route
    straddles: bool


@lru_cache(maxsize=4096)
def gated_route_of(
    mesh: Mesh,
    x: Placements,
    gate: Placements | None,
    ndim: int,
    hidden_shape: tuple[int, ...],
    group_size: int,
    weight: WeightPlacement,
    weight_grad: str = "auto",
    output_placements: Placements | None = None,
    weight_requires_grad: bool = True,
) -> GatedRoute:
    """The route for placements with their dims counted from the front (``normalize``); without a gate that of x alone.
    Raises UnreachableLayoutError for what ``layout_add`` refuses."""
    both = add_route_of(
        mesh,
        x,
        x if gate is None else gate,
        ndim,
        len(hidden_shape),
        weight,
        weight_grad,
        output_placements,
        weight_requires_grad,
        "gate",
    )
    norm = both.norm
    straddles = not _groups_are_whole(mesh, norm.hidden_chains, hidden_shape, group_size)
    if not straddles:
        norm = replace(norm, statistic_steps=())
    return GatedRoute(x, both.residual, both.x_move, both.residual_move, norm, straddles)


def _groups_are_whole(
    mesh: Mesh, chains: tuple[tuple[Split, ...], ...], hidden_shape: tuple[int, ...], group_size: int
) -> bool:
    """Whether all that any rank holds of the columns is whole groups, one after another."""
    sharding = {split.mesh_dim for chain in chains for split in chain}
    places = (range(size) if dim in sharding else (0,) for dim, size in enumerate(mesh.sizes))
    return all(
        segment.size == group_size
        for coordinate in itertools.product(*places)
        for segment in segments_of(mesh.sizes, coordinate, chains, hidden_shape, group_size)
    )


@lru_cache(maxsize=4096)
def segments_of(
    mesh_sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    chains: tuple[tuple[Split, ...], ...],
    hidden_shape: tuple[int, ...],
    group_size: int,
) -> tuple[Segment, ...]:
    """What the rank at ``coordinate`` holds of which groups, in the order of its columns.

    10 columns on 4 ranks, which hold 3, 3, 3 and 1, in groups of 5: 3 of group 0 / 2 of group 0, 1 of group 1 / 3 of
    group 1 / 1 of group 1.
    """
    found: list[Segment] = []
    at = 0
    for group, size in _pieces(_flattened(mesh_sizes, coordinate, chains, hidden_shape), group_size):
        last = found[-1] if found else None
        groups = 0 if last is None else (last.stop - last.start) // last.size
        if last is not None and last.size == size and last.group + groups == group:
            found[-1] = last._replace(stop=at + size)
        else:
            found.append(Segment(at, at + size, group, size))
        at += size
    return tuple(found)


def _pieces(columns: Sequence[Interval], group_size: int) -> list[tuple[int, int]]:
    """(group, how many of its columns) for each stretch of columns of one group."""
    found: list[tuple[int, int]] = []
    for start, stop in columns:
        while start < stop:
            group = start // group_size
            size = min(stop, (group + 1) * group_size) - start
            if found and found[-1][0] == group:
                found[-1] = (group, found[-1][1] + size)
            else:
                found.append((group, size))
            start += size
    return found


def _flattened(
    mesh_sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    chains: tuple[tuple[Split, ...], ...],
    hidden_shape: tuple[int, ...],
) -> list[Interval]:
    """The ranges of flattened columns that a rank holds, in its order."""
    inner: list[Interval] = [(0, 1)]
    width = 1
    for size, chain in reversed(list(zip(hidden_shape, chains, strict=True))):
        mine = held(size, chain, mesh_sizes, coordinate)
        if inner == [(0, width)]:
            inner = [(start * width, stop * width) for start, stop in mine]
        else:
            indices = itertools.chain.from_iterable(range(*interval) for interval in mine)
            inner = [(index * width + start, index * width + stop) for index in indices for start, stop in inner]
        width *= size
    return inner


def groups_of(hidden_shape: tuple[int, ...], group_size: int) -> int:
    return math.prod(hidden_shape) // group_size
