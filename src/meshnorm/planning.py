"""What a layout costs, without running it: a route with sizes put in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from meshnorm.checks import DTYPES, HIDDEN, WEIGHT_GRADS
from meshnorm.errors import DTypeError, NormalizedShapeError, OptionError, PlacementError
from meshnorm.formula import accumulation_dtype
from meshnorm.geometry import Split, local_shape, local_size
from meshnorm.layout import Mesh, Move, Placements, Route, Step, move, normalize, route_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        mesh_dim: the name of the mesh dim it runs over; several that share one process group are joined as in "dp_cp".
        bytes: what one rank contributes, padding of uneven shards included.
    """

    kind: str
    mesh_dim: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Where everything lies and what is communicated, as data; ``print(plan)`` says it in words.

    Equal layouts give equal plans, which can be used as keys.

    Attributes:
        shape, dtype: of x, globally. weight_dtype: of the weight, None without one.
        mesh: name and size of each mesh dim.
        x, y, dx, dw: placements, one for each mesh dim. ``dw`` is None where there is no weight gradient; for a plain
            weight it is replicated where it is summed, and each rank's own sum where it is deferred.
        forward, backward: the collectives in the order in which they run. ``backward`` takes dY to arrive in y's
            placement, or in ``dy_placements``.
        gathering: what a norm that does not know DTensor, and so replicates the whole of x first, would communicate in
            its forward.
        rows, columns: what one rank normalizes: how many rows, and how many numbers of each.
        residual: the residual's placements, of ``add_rms_norm``, whose residual_out lies as y does and whose residual
            has its gradient where x has: in ``dx``. None for ``rms_norm``.
        gate, group_size: of ``gated_rms_norm``: the gate's placements, whose gradient lies where x's does, and how many
            numbers are normalized together. None for the others.
        k: of ``qk_rms_norm``: k's own plan but for what is communicated, which is all in this one, q's. None for the
            others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    mesh: tuple[tuple[str, int], ...]
    x: Placements
    y: Placements
    dx: Placements | None
    dw: Placements | None
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    gathering: tuple[Collective, ...]
    rows: int
    columns: int
    residual: Placements | None = None
    gate: Placements | None = None
    group_size: int | None = None
    k: Plan | None = None

    def __str__(self) -> str:
        if self.k is not None:
            from meshnorm.planning_qk import qk_words

            return qk_words(self, self.k)
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        added = "" if self.residual is None else " + residual"
        if self.group_size is not None:
            added = f"{' beside a gate' * (self.gate is not None)}, in groups of {self.group_size},"
        lines = [
            f"RMSNorm of {_words(self.dtype)}[{', '.join(map(str, self.shape))}]{added} on mesh {mesh}",
            f"  x         {_placement_words(self.x)}, a rank normalizes {self.rows} rows of {self.columns}",
            *([f"  residual  {_placement_words(self.residual)}"] if self.residual is not None else []),
            *([f"  gate      {_placement_words(self.gate)}"] if self.gate is not None else []),
            f"  y         {_placement_words(self.y)}",
            f"  dX        {'not needed' if self.dx is None else _placement_words(self.dx)}",
            f"  dW        {'none' if self.dw is None else _placement_words(self.dw)}",
            f"  forward   {_collective_words(self.forward)}",
            f"  backward  {_collective_words(self.backward)}",
            f"  gathering the whole of x first would take {_collective_words(self.gathering)} in the forward alone",
        ]
        return "\n".join(lines)


def plan(
    x_or_shape: Tensor | Sequence[int],
    placements: Sequence[Placement] | None = None,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    *,
    weight: Tensor | str | Sequence[Placement] | None = "replicated",
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    hidden: str = "stats",
    weight_grad: str = "auto",
    output_placements: Sequence[Placement] | None = None,
    dy_placements: Sequence[Placement] | None = None,
    x_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    coordinate: Sequence[int] | None = None,
    residual: Tensor | Sequence[Placement] | None = None,
    residual_dtype: torch.dtype | None = None,
    d_residual_out_placements: Sequence[Placement] | None = None,
    gate: Tensor | Sequence[Placement] | None = None,
    gate_dtype: torch.dtype | None = None,
    group_size: int | None = None,
    k: Tensor | Sequence[Placement] | None = None,
    k_shape: Sequence[int] | None = None,
    k_weight: Tensor | str | Sequence[Placement] | None = "replicated",
    k_normalized_shape: int | Sequence[int] | None = None,
    k_output_placements: Sequence[Placement] | None = None,
    dk_placements: Sequence[Placement] | None = None,
    k_requires_grad: bool = True,
    k_weight_requires_grad: bool = True,
) -> Plan:
    """The plan of ``rms_norm`` for a layout: placements of y, dX and dW, and the collectives of both passes in bytes.
    With a residual that of ``add_rms_norm``, with a gate or a group size of ``gated_rms_norm``, with k of
    ``qk_rms_norm``.

    It is pure arithmetic: no process group is needed, so that a laptop can plan a mesh of any size.

    Args:
        x_or_shape: a DTensor, from which placements, mesh and dtype are taken; or x's global shape.
        placements: one for each mesh dim.
        mesh: a DeviceMesh, or its sizes by name: ``{"dp": 2, "cp": 4}``. Sizes are taken to be all the ranks there are.
        weight: "replicated" (a DTensor weight, replicated), "plain" (a plain tensor), None (no weight), placements (a
            DTensor weight with these), or the weight itself.
        dtype, weight_dtype: of x and of the weight, where they are not given as tensors. The weight's defaults to x's.
        normalized_shape, hidden, weight_grad, output_placements: as in ``rms_norm``.
        dy_placements: of the gradient of y, where it arrives in other placements than y's: what bringing it there costs
            is then part of ``Plan.backward``.
        x_requires_grad, weight_requires_grad: False for a frozen x or weight, which costs no communication.
        coordinate: which rank's bytes to state, by its place on the mesh; the first rank's by default, which holds the
            most where shards are uneven.
        residual: the residual's placements, or the residual itself: the plan is then that of ``add_rms_norm``.
            ``x_requires_grad`` is whether x or the residual needs a gradient.
        residual_dtype: of the residual, where it is not given as a tensor. Defaults to x's.
        d_residual_out_placements: of the gradient of residual_out, as ``dy_placements``.
        gate: the gate's placements, or the gate itself: the plan is then that of ``gated_rms_norm``.
            ``x_requires_grad`` is whether what is normalized needs a gradient: x, or a gate before the norm.
        gate_dtype: of the gate, where it is not given as a tensor. Defaults to x's.
        group_size: as in ``gated_rms_norm``.
        k: k's placements, or k itself: the plan is then that of ``qk_rms_norm``, and all of the above is of q.
            An output that is not used needs no gradient.
        k_shape, k_weight, k_normalized_shape, k_output_placements, dk_placements, k_requires_grad,
            k_weight_requires_grad: of k, as x's shape, ``weight``, ``normalized_shape`` and so on are of q.

    Example:
        >>> print(plan((8, 8192, 4096), [Shard(0), Shard(1)], {"dp": 2, "cp": 4}))  # doctest: +ELLIPSIS
        RMSNorm of bfloat16[8, 8192, 4096] on mesh dp=2, cp=4
        ...
    """
    if hidden not in HIDDEN or weight_grad not in WEIGHT_GRADS:
        raise OptionError(f"hidden={hidden!r}, weight_grad={weight_grad!r}: choose from {HIDDEN} and {WEIGHT_GRADS}")
    if isinstance(x_or_shape, DTensor):
        placements, mesh, dtype = x_or_shape.placements, x_or_shape.device_mesh, x_or_shape.dtype
        x_requires_grad = x_requires_grad and (x_or_shape.requires_grad or not torch.is_grad_enabled())
    elif isinstance(x_or_shape, Tensor):
        raise PlacementError("x is a plain tensor, which no mesh holds: give its shape, placements and a mesh")
    if placements is None or mesh is None:
        raise PlacementError("a shape alone has no layout: give placements and a mesh too")
    shape = tuple(int(size) for size in getattr(x_or_shape, "shape", x_or_shape))  # type: ignore[arg-type]
    _check_sizes(shape, mesh, dtype, coordinate)
    facts = Mesh.of_sizes(dict(mesh)) if isinstance(mesh, Mapping) else _described(mesh)
    normalized = _normalized(shape, weight, normalized_shape)
    x_placements = normalize(placements, len(shape), facts, "x")
    weight_placement, dtype_of_weight = _weight(weight, len(facts.sizes), weight_dtype or dtype)
    if isinstance(weight_placement, tuple):
        weight_placement = normalize(weight_placement, len(normalized), facts, "weight")
    output = None if output_placements is None else normalize(output_placements, len(shape), facts, "output_placements")
    at = tuple(coordinate) if coordinate is not None else (0,) * len(facts.sizes)
    dy = None if dy_placements is None else normalize(dy_placements, len(shape), facts, "dy_placements")
    layout = (facts, x_placements, len(shape), len(normalized), weight_placement, weight_grad, output)
    if k is not None:
        from meshnorm.planning_qk import Side, qk_plan, side_of_k

        if residual is not None or gate is not None or group_size is not None:
            raise OptionError("k stands beside a residual or a gate: no norm has both, so leave one of them out")
        q = Side(
            *(shape, x_placements, len(normalized), weight_placement, dtype_of_weight, output, dy),
            *(x_requires_grad, weight_requires_grad),
        )
        of_k = (k_output_placements, dk_placements), (k_requires_grad, k_weight_requires_grad)
        side = side_of_k(k, k_shape, facts, dtype, k_weight, weight_dtype, k_normalized_shape, *of_k, coordinate)
        return qk_plan(facts, q, side, dtype, weight_grad, at, hidden)
    if gate is not None or group_size is not None:
        from meshnorm.planning_gated import gated_plan

        if residual is not None:
            raise OptionError("residual and gate are both given: no norm has both, so leave one of them out")
        dtypes = dtype, gate_dtype, dtype_of_weight
        return gated_plan(
            gate, group_size, layout, shape, dtypes, (x_requires_grad, weight_requires_grad, dy), at, hidden
        )
    if residual is not None:
        from meshnorm.planning_add import add_plan

        dtypes = dtype, residual_dtype, dtype_of_weight
        gradients = x_requires_grad, weight_requires_grad, dy, d_residual_out_placements
        return add_plan(residual, layout, shape, dtypes, gradients, at, hidden)
    route = route_of(
        facts,
        x_placements,
        len(shape),
        len(normalized),
        weight_placement,
        hidden,
        weight_grad,
        output,
        weight_requires_grad,
    )
    return priced(route, shape, dtype, dtype_of_weight, x_requires_grad, at, dy)


@lru_cache(maxsize=4096)
def priced(
    route: Route,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    x_requires_grad: bool,
    coordinate: tuple[int, ...],
    dy: Placements | None = None,
    numbers: int = 1,
) -> Plan:
    """A route with sizes put in, for the rank at ``coordinate``, which exchanges so many ``numbers`` a row."""
    mesh, ndim = route.mesh, route.normalized_ndim
    hidden_shape = shape[len(shape) - ndim :]
    accumulation = accumulation_dtype(dtype).itemsize
    resolved = local_shape(shape, route.dx, mesh.sizes, coordinate)
    rows = math.prod(resolved[: len(shape) - ndim])
    columns = math.prod(hidden_shape if route.gathers else resolved[len(shape) - ndim :])
    statistic = tuple(_collective(mesh, step, rows * numbers * accumulation) for step in route.statistic_steps)
    moves_x = move_costs(route.x_move, shape, mesh, coordinate, dtype.itemsize)
    moves_weight: tuple[Collective, ...] = ()
    if route.weight_move is not None and weight_dtype is not None:
        moves_weight = move_costs(route.weight_move, hidden_shape, mesh, coordinate, weight_dtype.itemsize)
    moves_dy = (
        () if dy is None else move_costs(move(mesh, dy, route.y, len(shape)), shape, mesh, coordinate, dtype.itemsize)
    )
    dw_numbers = math.prod(hidden_shape) if route.sums_whole_weight else columns
    dw = tuple(_collective(mesh, step, dw_numbers * accumulation) for step in route.dw_steps)
    runs_backward = x_requires_grad or route.dw is not None
    return Plan(
        shape=shape,
        dtype=dtype,
        weight_dtype=weight_dtype,
        mesh=tuple(zip(mesh.names, mesh.sizes, strict=True)),
        x=route.x,
        y=route.y,
        dx=route.dx if x_requires_grad else None,
        dw=route.dw,
        forward=moves_x + moves_weight + statistic,
        backward=moves_dy + (statistic if x_requires_grad else ()) + dw if runs_backward else (),
        gathering=gathering_costs(route, shape, coordinate, dtype.itemsize),
        rows=rows,
        columns=columns,
    )


def _collective(mesh: Mesh, step: Step, size: int) -> Collective:
    return Collective(step.kind, "_".join(mesh.names[dim] for dim in step.mesh_dims), size)


def move_costs(
    moving: Move, shape: tuple[int, ...], mesh: Mesh, coordinate: tuple[int, ...], itemsize: int
) -> tuple[Collective, ...]:
    """The collectives of a move, with what this rank contributes to each."""
    dims = [list(chain) for chain in moving.have]
    local = [local_size(n, chain, mesh.sizes, coordinate) for n, chain in zip(shape, dims, strict=True)]
    found = []
    for step in moving.steps:
        onto = step.tensor_dim
        if onto is None:
            found.append(_collective(mesh, step, math.prod(local) * itemsize))
            continue
        (dim,) = step.mesh_dims
        parts = mesh.sizes[dim]
        others = math.prod(local[:onto]) * math.prod(local[onto + 1 :])
        if step.kind == "reduce_scatter":
            longest = -(-local[onto] // parts)
            found.append(_collective(mesh, step, others * longest * parts * itemsize))
            local[onto] = max(0, min(longest, local[onto] - longest * coordinate[dim]))
            dims[onto].append(Split(dim))
            continue
        split = dims[onto].pop()
        whole = local_size(shape[onto], dims[onto], mesh.sizes, coordinate)
        longest = local_size(whole, (split,), mesh.sizes, (0,) * len(mesh.sizes))
        found.append(_collective(mesh, step, others * longest * itemsize))
        local[onto] = whole
    return tuple(found)


def gathering_costs(
    route: Route, shape: tuple[int, ...], coordinate: tuple[int, ...], itemsize: int
) -> tuple[Collective, ...]:
    """What replicating x over every mesh dim would communicate."""
    whole = move(route.mesh, route.x, (Replicate(),) * len(route.x), len(shape))
    return move_costs(whole, shape, route.mesh, coordinate, itemsize)


def _check_sizes(shape: tuple[int, ...], mesh: Any, dtype: torch.dtype, coordinate: Sequence[int] | None) -> None:
    if any(size < 0 for size in shape):
        raise PlacementError(f"x's shape is {shape}: sizes are 0 or more")
    sizes = tuple(mesh.values()) if isinstance(mesh, Mapping) else tuple(mesh.shape)
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise PlacementError(f"the mesh has sizes {sizes}: each is an int of 1 or more")
    if dtype not in DTYPES:
        raise DTypeError(f"dtype is {dtype}: RMSNorm takes float64, float32, bfloat16 or float16")
    if coordinate is not None and (
        len(coordinate) != len(sizes) or any(not 0 <= at < size for at, size in zip(coordinate, sizes, strict=True))
    ):
        raise PlacementError(f"coordinate is {tuple(coordinate)}: there is no such rank on a mesh of sizes {sizes}")


def _described(mesh: DeviceMesh) -> Mesh:
    from meshnorm.meshes import describe

    return describe(mesh)


def _normalized(shape: tuple[int, ...], weight: Any, normalized_shape: int | Sequence[int] | None) -> tuple[int, ...]:
    if normalized_shape is not None:
        found = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    else:
        found = tuple(weight.shape) if isinstance(weight, Tensor) else shape[-1:]
    if 0 in found:
        raise NormalizedShapeError(
            f"normalized_shape {found} holds a dim of size 0: the mean over nothing is undefined"
        )
    if not found or shape[len(shape) - len(found) :] != found:
        raise NormalizedShapeError(f"normalized_shape is {found}, but x has shape {shape}: its last dims must be these")
    return found


def _weight(weight: Any, mesh_ndim: int, dtype: torch.dtype) -> tuple[Any, torch.dtype | None]:
    """(what route_of takes for the weight, its dtype)."""
    if weight is None:
        return None, None
    if isinstance(weight, DTensor):
        return tuple(weight.placements), weight.dtype
    if isinstance(weight, Tensor):
        return "plain", weight.dtype
    if weight == "plain":
        return "plain", dtype
    if weight == "replicated":
        return (Replicate(),) * mesh_ndim, dtype
    if isinstance(weight, str):
        raise OptionError(f'weight is {weight!r}: choose "replicated", "plain", None, placements, or give the tensor')
    return tuple(weight), dtype


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _placement_words(placements: Placements) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"


def _collective_words(collectives: Sequence[Collective]) -> str:
    if not collectives:
        return "no communication"
    return ", ".join(f"{c.kind} over {c.mesh_dim} of {_byte_words(c.bytes)}" for c in collectives)


def _byte_words(size: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    raise AssertionError
