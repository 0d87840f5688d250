"""Which part of a tensor a rank holds: shard sizes and index ranges from placements. Pure arithmetic.

A tensor dim that several mesh dims shard is split in mesh order, each splitting what the one before it left: the
*chain* of that tensor dim, a tuple of Split. A split cuts into chunks of ceil(size / parts), as ``torch.chunk`` does,
so
the last ranks may hold less, or nothing: size 5 on 4 ranks gives 2, 2, 1, 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Split:
    """One mesh dim that shards a tensor dim. ``factor`` is _StridedShard's split_factor, None for a plain Shard."""

    mesh_dim: int
    factor: int | None = None


Interval = tuple[int, int]


def shard_dim(placement: Any, ndim: int) -> int | None:
    """The tensor dim that a placement shards, counted from the front; None where it shards none.

    ``_StridedShard`` is a shard here: it is no subclass of ``Shard`` in every torch release, and its ``is_shard()`` is
    False.
    """
    dim = getattr(placement, "dim", None)
    if dim is None:
        return None
    return dim + ndim if dim < 0 else dim


def split_factor(placement: Any) -> int | None:
    """_StridedShard's split_factor; None for a plain Shard."""
    factor = getattr(placement, "split_factor", None)
    return None if factor is None else int(factor)


def chains(placements: Sequence[Any], mesh_sizes: Sequence[int], ndim: int) -> tuple[tuple[Split, ...], ...]:
    """For each tensor dim, the mesh dims of more than one rank that shard it, in the order in which they split it."""
    found: list[list[Split]] = [[] for _ in range(ndim)]
    for mesh_dim, placement in enumerate(placements):
        dim = shard_dim(placement, ndim)
        if dim is not None and mesh_sizes[mesh_dim] > 1:
            found[dim].append(Split(mesh_dim, split_factor(placement)))
    return tuple(map(tuple, found))


def _chunk(intervals: tuple[Interval, ...], parts: int, index: int) -> tuple[Interval, ...]:
    """The ``index``-th of ``parts`` chunks of the concatenated intervals."""
    size = sum(stop - start for start, stop in intervals)
    step = -(-size // parts)
    low, high = min(index * step, size), min((index + 1) * step, size)
    taken, passed = [], 0
    for start, stop in intervals:
        first, last = max(start, start + low - passed), min(stop, start + high - passed)
        if first < last:
            taken.append((first, last))
        passed += stop - start
    return tuple(taken)


def held(
    size: int, chain: Sequence[Split], mesh_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[Interval, ...]:
    """The [start, stop) ranges of a dim of ``size`` that the rank at ``coordinate`` holds, in its order."""
    mine: tuple[Interval, ...] = ((0, size),) if size else ()
    for split in chain:
        parts, index = mesh_sizes[split.mesh_dim], coordinate[split.mesh_dim]
        if split.factor is None:
            mine = _chunk(mine, parts, index)
        else:
            pieces = [_chunk(mine, split.factor, piece) for piece in range(split.factor)]
            mine = tuple(interval for piece in pieces for interval in _chunk(piece, parts, index))
    return _merge(mine)


def _merge(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def local_size(size: int, chain: Sequence[Split], mesh_sizes: Sequence[int], coordinate: Sequence[int]) -> int:
    """How many of the ``size`` entries of a dim the rank at ``coordinate`` holds."""
    return sum(stop - start for start, stop in held(size, chain, mesh_sizes, coordinate))


def local_shape(
    shape: Sequence[int], placements: Sequence[Any], mesh_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the local tensor of the rank at ``coordinate``."""
    dims = chains(placements, mesh_sizes, len(shape))
    return tuple(local_size(n, chain, mesh_sizes, coordinate) for n, chain in zip(shape, dims, strict=True))
