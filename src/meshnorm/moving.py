"""Moves between layouts carried out on local tensors, and the way in and out of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from meshnorm import collectives
from meshnorm.geometry import Split, held, local_size
from meshnorm.layout import Move, Placements, Step
from meshnorm.meshes import group_name


def local_part(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, waited for."""
    return waited(x.to_local() if isinstance(x, DTensor) else x)


def waited(local: Tensor) -> Tensor:
    """``local`` itself once a pending functional collective has delivered it."""
    if type(local) is Tensor:
        return local
    wait = getattr(local, "trigger_wait", None)
    return local if wait is None else wait()


def wrapped(local: Tensor, mesh: DeviceMesh, placements: Placements | None, shape: Sequence[int]) -> DTensor:
    """A DTensor of contiguous global ``shape`` around ``local``."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(stride))
    )


def moved(local: Tensor, move: Move, shape: Sequence[int], mesh: DeviceMesh, given: Sequence[Placement]) -> Tensor:
    """``local`` after a move, one mesh dim at a time. ``given`` are the tensor's own placements, as torch made them."""
    sizes, coordinate = mesh.shape, mesh.get_coordinate()
    assert coordinate is not None
    chains = [list(chain) for chain in move.have]
    for step in move.steps:
        (dim,) = step.mesh_dims
        group, parts, onto = group_name(mesh, step.mesh_dims), sizes[dim], step.tensor_dim
        if step.kind == "all_gather":
            assert onto is not None
            split = chains[onto].pop()
            whole = local_size(shape[onto], chains[onto], sizes, coordinate)
            pieces = [held(whole, (Split(0, split.factor),), (parts,), (rank,)) for rank in range(parts)]
            local = collectives.all_gather(local, group, pieces, onto)
            continue
        op, partial = step.reduce_op, given[dim]
        if type(partial) is not Partial:
            # A partial of its own kind, such as a vocabulary-sharded embedding's, masks before it is summed.
            if onto is None:
                local = waited(partial._reduce_value(local, mesh, dim))  # type: ignore[attr-defined]
            else:
                local = waited(partial._reduce_shard_value(local, mesh, dim, Shard(onto)))  # type: ignore[attr-defined]
        elif onto is None:
            local = collectives.all_reduce(local, op, group, parts)
        else:
            lengths = [local_size(local.size(onto), (Split(0),), (parts,), (rank,)) for rank in range(parts)]
            local = collectives.reduce_scatter(local, op, group, lengths, coordinate[dim], onto)
        if onto is not None:
            chains[onto].append(Split(dim))
    return cut(local, move.cut, mesh)


def cut(local: Tensor, chains: Sequence[Sequence[Split]], mesh: DeviceMesh) -> Tensor:
    """The part of ``local`` that this rank holds once each dim is split further along its chain."""
    for dim, chain in enumerate(chains):
        if not chain:
            continue
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        mine = held(local.size(dim), chain, mesh.shape, coordinate)
        parts = [local.narrow(dim, start, stop - start) for start, stop in mine]
        if len(parts) == 1:
            local = parts[0]
        else:
            local = torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)
    return local


def embedded(part: Tensor, chains: Sequence[Sequence[Split]], shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """``part`` at its place in zeros of ``shape``."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, (size, chain) in reversed(list(enumerate(zip(shape, chains, strict=True)))):
        if not chain:
            continue
        whole = part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :]))
        at = 0
        for start, stop in held(size, chain, mesh.shape, coordinate):
            whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start
        part = whole
    return part


def summed(local: Tensor, steps: Sequence[Step], mesh: DeviceMesh) -> Tensor:
    for step in steps:
        local = collectives.all_reduce(local, "sum", group_name(mesh, step.mesh_dims), 0)
    return local
