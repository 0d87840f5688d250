"""Device meshes: what layouts need to know of one, and the process group that spans some of its dims."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshnorm.layout import Mesh


def mesh_names(device_mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh's dim names; "0", "1", ... where it has none."""
    return tuple(device_mesh.mesh_dim_names or map(str, range(device_mesh.ndim)))


class _Known(NamedTuple):
    """What was read of one DeviceMesh object."""

    mesh: weakref.ref[DeviceMesh]
    facts: Mesh
    groups: dict[tuple[int, ...], str]  # names of process groups, by the mesh dims they span


# By identity: of two equal meshes one may have been flattened, or belong to process groups that are gone.
_known: dict[int, _Known] = {}


def describe(device_mesh: DeviceMesh) -> Mesh:
    """The mesh as layouts see it, read once: groups made after the first norm on this mesh are not looked for.

    Only groups that exist are used. Making one would be a collective call of all ranks in the middle of a forward pass,
    and would hang under pipeline parallelism, where not all ranks run the same norm.
    """
    return _read(device_mesh).facts


def group_name(device_mesh: DeviceMesh, dims: tuple[int, ...]) -> str:
    """The name of the process group over ``dims``: one mesh dim, or a set that ``describe`` calls joint."""
    groups = _read(device_mesh).groups
    if dims not in groups:
        group = device_mesh.get_group(dims[0]) if len(dims) == 1 else _spanning_group(device_mesh, dims)
        assert group is not None, "a route asks for a group that describe() did not find"
        groups[dims] = group.group_name
    return groups[dims]


def _read(device_mesh: DeviceMesh) -> _Known:
    key = id(device_mesh)
    known = _known.get(key)
    if known is not None and known.mesh() is device_mesh:
        return known
    sizes = device_mesh.shape
    active = tuple(dim for dim, size in enumerate(sizes) if size > 1)
    joint = frozenset(
        subset for subset in _subsets(active) if len(subset) > 1 and _spanning_group(device_mesh, subset) is not None
    )
    known = _Known(
        weakref.ref(device_mesh, lambda gone: _forget(key, gone)), Mesh(mesh_names(device_mesh), sizes, joint), {}
    )
    _known[key] = known
    return known


def _forget(key: int, gone: weakref.ref[DeviceMesh]) -> None:
    if key in _known and _known[key].mesh is gone:
        del _known[key]


def _subsets(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for dim in dims:
        found += [(*subset, dim) for subset in found]
    return found


def _spanning_group(device_mesh: DeviceMesh, dims: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The world's group where ``dims`` reach every rank there is, else the flattened mesh dim that a trainer has made
    (``mesh["dp", "cp"]._flatten()`` names it "dp_cp"), else None."""
    size = 1
    for dim in dims:
        size *= device_mesh.size(dim)
    if size == dist.get_world_size():
        return dist.group.WORLD
    coordinate = device_mesh.get_coordinate()
    if coordinate is None or device_mesh.mesh_dim_names is None:
        return None
    try:
        group = device_mesh.get_group("_".join(device_mesh.mesh_dim_names[dim] for dim in dims))
    except (KeyError, RuntimeError, AssertionError):  # no such flattened dim; the error's class varies with the release
        return None
    mine = device_mesh.mesh[tuple(slice(None) if d in dims else c for d, c in enumerate(coordinate))]
    return group if sorted(dist.get_process_group_ranks(group)) == sorted(mine.flatten().tolist()) else None
