"""One call of the norm on a mesh, held against float64 and against its plan. Run by every rank alike.

Inputs are drawn from a seed that all ranks share. What a rank should hold is cut from the float64 result by torch's own
``distribute_tensor``, so that nothing here leans on the arithmetic that is being checked. Values that are reduced in a
low precision (a partial x or dY) are multiples of 1/8 whose sums are exact, so that the reduction adds no error of its
own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from meshnorm.checking.bounds import Bounds
from meshnorm.checking.collectives import Recorder
from meshnorm.errors import MeshnormError
from meshnorm.formula import reference_backward, reference_forward
from meshnorm.functional import rms_norm
from meshnorm.notation import parse_placements
from meshnorm.planning import Collective, Plan, plan

REDUCTIONS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


@dataclass(frozen=True)
class Case:
    """A layout and a norm. Placements are text (``meshnorm.notation``), so that a case prints as what one would type.

    ``weight`` is "none", "plain", or the placements of a DTensor weight; "" stands for replicated. ``dy`` is "" for y's
    own placements. ``leaf`` False puts a multiplication before the norm (not for a partial x, which torch would
    reduce).
    """

    mesh: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    x: str
    weight: str = ""
    dy: str = ""
    output: str = ""
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    casting_mode: str = "llama"
    offset: float = 0.0
    eps: float = 1e-6
    normalized_ndim: int = 1
    hidden: str = "stats"
    weight_grad: str = "auto"
    in_place: bool = False
    leaf: bool = True
    x_requires_grad: bool = True
    weight_requires_grad: bool = True
    seed: int = 0


@dataclass
class Outcome:
    """What one rank found. ``relative``: the largest error of y, dX and dW over the largest value of each; ``faults``:
    what was wrong, in words, empty where all is well."""

    relative: dict[str, float] = field(default_factory=dict)
    planned: tuple[Collective, ...] = ()
    seen: tuple[Collective, ...] = ()
    faults: list[str] = field(default_factory=list)


_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def mesh_for(dims: tuple[tuple[str, int], ...], device_type: str = "cpu") -> DeviceMesh:
    """The mesh of these names and sizes over all ranks, made once."""
    if dims not in _meshes:
        names, sizes = zip(*dims, strict=True)
        _meshes[dims] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return _meshes[dims]


def attempt_case(case: Case, device_type: str = "cpu") -> Outcome:
    """``run_case``, with a refusal as a fault: every rank is refused alike, so the next case can go on."""
    try:
        return run_case(case, device_type)
    except MeshnormError as error:
        return Outcome(faults=[f"{type(error).__name__}: {error}"])


def run_case(case: Case, device_type: str = "cpu") -> Outcome:
    """Runs forward and backward of a case twice, once plainly and once recorded, and says what differs."""
    mesh = mesh_for(case.mesh, device_type)
    inputs = _Inputs.drawn(case, mesh)
    outcome = Outcome()
    expected = plan(
        case.shape,
        inputs.x_placements,
        mesh,
        weight=inputs.weight_for_plan,
        dtype=case.dtype,
        weight_dtype=inputs.weight64.dtype if inputs.weight is None else inputs.weight.dtype,
        normalized_shape=case.shape[len(case.shape) - case.normalized_ndim :],
        hidden=case.hidden,
        weight_grad=case.weight_grad,
        output_placements=parse_placements(case.output) if case.output else None,
        dy_placements=parse_placements(case.dy) if case.dy else None,
        x_requires_grad=case.x_requires_grad,
        weight_requires_grad=case.weight_requires_grad,
        coordinate=mesh.get_coordinate(),
    )
    y, dx, dw, _ = _run(case, mesh, inputs, expected, recorded=False)
    _compare(case, mesh, inputs, expected, y, dx, dw, outcome)
    y2, dx2, dw2, seen = _run(case, mesh, inputs, expected, recorded=True)
    outcome.planned, outcome.seen = expected.forward + expected.backward, seen
    if seen != outcome.planned:
        outcome.faults.append(f"planned {_listed(outcome.planned)}, seen {_listed(seen)}")
    for name, first, second in (("y", y, y2), ("dX", dx, dx2), ("dW", dw, dw2)):
        if first is not None and not torch.equal(_bits(_part(first)), _bits(_part(second))):
            outcome.faults.append(f"{name} differs between the direct way and the way through the op")
    return outcome


@dataclass
class _Inputs:
    x: DTensor
    x64: Tensor
    weight: Tensor | None
    weight64: Tensor
    dy64: Tensor
    x_placements: tuple[Placement, ...]
    weight_for_plan: Any

    @classmethod
    def drawn(cls, case: Case, mesh: DeviceMesh) -> _Inputs:
        generator = torch.Generator().manual_seed(case.seed)
        x_placements = parse_placements(case.x)
        local, x64 = _drawn(case.shape, x_placements, case.dtype, mesh, generator)
        x = _wrapped(local, mesh, x_placements, case.shape)
        hidden_shape = case.shape[len(case.shape) - case.normalized_ndim :]
        weight_dtype = case.weight_dtype or case.dtype
        weight64 = torch.randn(hidden_shape, generator=generator, dtype=torch.float64).to(weight_dtype).double()
        weight: Tensor | None = None
        in_plan: Any = None
        if case.weight == "plain":
            weight, in_plan = weight64.to(weight_dtype).to(local.device), "plain"
        elif case.weight != "none":
            placements = parse_placements(case.weight) if case.weight else (Replicate(),) * mesh.ndim
            part, weight64 = _drawn(hidden_shape, placements, weight_dtype, mesh, generator)
            weight, in_plan = _wrapped(part, mesh, placements, hidden_shape), placements
        return cls(x, x64, weight, weight64, torch.empty(0), x_placements, in_plan)


def _drawn(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """(this rank's local tensor, the logical value in float64) of a random tensor with these placements."""
    partial = [dim for dim, p in enumerate(placements) if p.is_partial()]
    if not partial:
        whole = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return _cut(whole, mesh, placements), whole.double()
    op = placements[partial[0]].reduce_op  # type: ignore[attr-defined]
    counts = [mesh.size(dim) for dim in partial]
    if op == "product":
        choices = torch.tensor([0.5, -1.0, 1.0, 2.0], dtype=torch.float64)
        parts = choices[torch.randint(0, 4, (math.prod(counts), *shape), generator=generator)]
    else:
        parts = torch.randint(-15, 16, (math.prod(counts), *shape), generator=generator).double() / 8
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    mine = list(product(*map(range, counts))).index(tuple(coordinate[dim] for dim in partial))
    rest = tuple(Replicate() if p.is_partial() else p for p in placements)
    return _cut(parts[mine].to(dtype), mesh, rest), REDUCTIONS[op](parts)


def _cut(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """What this rank holds of ``whole``, cut by torch itself and without communication."""
    device = "cpu" if mesh.device_type == "cpu" else f"{mesh.device_type}:{torch.cuda.current_device()}"
    placed = distribute_tensor(whole.to(device), mesh, placements, src_data_rank=None)
    return placed.to_local().contiguous().clone()


def _wrapped(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _run(
    case: Case, mesh: DeviceMesh, inputs: _Inputs, expected: Plan, recorded: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Collective, ...]]:
    """(y, dX, dW, the collectives seen), dY having been drawn in the placement that the case asks for."""
    # From the local tensor: DTensor's own clone() may redistribute a partial one.
    local = inputs.x.to_local() * 1.0
    leaf = _wrapped(local, mesh, inputs.x_placements, case.shape)
    leaf.requires_grad_(case.x_requires_grad)
    x = leaf if case.leaf else leaf * 1.0
    weight = inputs.weight
    if isinstance(weight, DTensor):
        weight = _wrapped(weight.to_local().clone(), mesh, weight.placements, weight.shape)
    elif weight is not None:
        weight = weight.clone()
    if weight is not None:
        weight.requires_grad_(case.weight_requires_grad)
    options = dict(
        offset=case.offset,
        casting_mode=case.casting_mode,
        normalized_shape=case.shape[len(case.shape) - case.normalized_ndim :],
        hidden=case.hidden,
        weight_grad=case.weight_grad,
        output_placements=parse_placements(case.output) if case.output else None,
        in_place=case.in_place,
    )
    seen: list[Collective] = []
    if recorded:
        with Recorder(mesh) as recorder:
            y = rms_norm(x, weight, case.eps, **options)  # type: ignore[arg-type]
        seen += recorder.seen
    else:
        y = rms_norm(x, weight, case.eps, **options)  # type: ignore[arg-type]
    dy_placements = parse_placements(case.dy) if case.dy else expected.y
    generator = torch.Generator().manual_seed(case.seed + 1)
    part, inputs.dy64 = _drawn(case.shape, dy_placements, case.dtype, mesh, generator)
    dy = _wrapped(part, mesh, dy_placements, case.shape)
    if y.requires_grad and not recorded:
        y.backward(dy)
    elif y.requires_grad:
        with Recorder(mesh) as recorder:
            y.backward(dy)
        seen += recorder.seen
    dx = leaf.grad
    return y.detach(), dx, None if weight is None else weight.grad, tuple(seen)


def _compare(
    case: Case,
    mesh: DeviceMesh,
    inputs: _Inputs,
    expected: Plan,
    y: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
    outcome: Outcome,
) -> None:
    ndim = case.normalized_ndim
    x64, dy64 = inputs.x64, inputs.dy64
    weight64 = None if inputs.weight is None else inputs.weight64
    y64 = reference_forward(x64, weight64, case.eps, case.offset, "gemma", ndim)
    dx64, dw64 = reference_backward(dy64, x64, weight64, case.eps, case.offset, ndim)
    bounds = Bounds.of(case, x64, weight64, dy64)

    placed = [("y", y, expected.y)]
    if case.x_requires_grad:
        placed.append(("dX", dx, expected.dx))  # type: ignore[arg-type]
    if expected.dw is not None and inputs.weight_for_plan != "plain":
        placed.append(("dW", dw, expected.dw))  # type: ignore[arg-type]
    for name, tensor, placements in placed:
        if not isinstance(tensor, DTensor):
            outcome.faults.append(f"{name} is {type(tensor).__name__}, not a DTensor")
            return
        if tuple(tensor.placements) != placements:
            outcome.faults.append(f"{name} has placements {tensor.placements}, planned {placements}")
            return
        if tensor.dtype != (case.dtype if name != "dW" else inputs.weight.dtype):  # type: ignore[union-attr]
            outcome.faults.append(f"{name} has dtype {tensor.dtype}")
    if not case.x_requires_grad and dx is not None:
        outcome.faults.append("a frozen x has a gradient")
    if expected.dw is None and dw is not None:
        outcome.faults.append("a frozen weight has a gradient")

    _check(outcome, "y", _part(y), y64, bounds.y, expected.y, mesh)
    if dx is not None and expected.dx is not None:
        _check(outcome, "dX", _part(dx), dx64, bounds.dx, expected.dx, mesh)
    if dw is not None and dw64 is not None and expected.dw is not None:
        total, placements = _summed(dw, case, mesh, inputs, expected)
        _check(outcome, "dW", total, dw64, bounds.dw, placements, mesh)
    _check_bits(case, mesh, inputs, expected, y, dx, outcome)


def _summed(
    dw: Tensor, case: Case, mesh: DeviceMesh, inputs: _Inputs, expected: Plan
) -> tuple[Tensor, tuple[Placement, ...]]:
    """The local part of dW once what was deferred is summed, and where it lies."""
    total = _part(dw).double().clone()
    assert expected.dw is not None
    if inputs.weight_for_plan == "plain":
        # What is split while it is normalized is what y is split by.
        deferred = case.weight_grad == "deferred"
        pending = [dim for dim, p in enumerate(expected.y) if deferred and getattr(p, "dim", None) is not None]
    else:
        pending = [dim for dim, p in enumerate(expected.dw) if p.is_partial()]
    for dim in pending:
        dist.all_reduce(total, group=mesh.get_group(dim))
    return total, tuple(Replicate() if p.is_partial() else p for p in expected.dw)


def _check_bits(
    case: Case, mesh: DeviceMesh, inputs: _Inputs, expected: Plan, y: Tensor, dx: Tensor | None, outcome: Outcome
) -> None:
    """Where no row is split, y and dX must be bit for bit what one device computes."""
    rows = len(case.shape) - case.normalized_ndim
    splits = any(
        getattr(p, "dim", -1) >= rows and mesh.size(dim) > 1 for dim, p in enumerate(expected.dx or expected.y)
    )
    if splits:
        return
    device = _part(y).device
    x = inputs.x64.to(case.dtype).to(device).requires_grad_()
    weight = None if inputs.weight is None else inputs.weight64.to(inputs.weight.dtype).to(device)
    shape = case.shape[rows:]
    whole = rms_norm(x, weight, case.eps, offset=case.offset, casting_mode=case.casting_mode, normalized_shape=shape)
    if not torch.equal(_bits(_part(y)), _bits(_cut(whole.detach(), mesh, expected.y))):
        outcome.faults.append("y is not bit for bit that of one device")
    if dx is not None and expected.dx is not None:
        whole.backward(inputs.dy64.to(case.dtype).to(device))
        assert x.grad is not None
        if not torch.equal(_bits(_part(dx)), _bits(_cut(x.grad, mesh, expected.dx))):
            outcome.faults.append("dX is not bit for bit that of one device")


def _check(
    outcome: Outcome,
    name: str,
    found: Tensor,
    reference: Tensor,
    bound: Tensor | None,
    placements: tuple[Placement, ...],
    mesh: DeviceMesh,
) -> None:
    assert bound is not None
    expected, allowed = _cut(reference, mesh, placements).double(), _cut(bound, mesh, placements).double()
    if found.shape != expected.shape:
        outcome.faults.append(f"{name} has local shape {tuple(found.shape)}, should have {tuple(expected.shape)}")
        return
    if not found.numel():
        outcome.relative[name] = 0.0
        return
    error = (found.double() - expected).abs()
    outcome.relative[name] = (error.max() / reference.abs().max().clamp_min(1e-300)).item()
    if not bool((error <= allowed).all()):  # NaN is not <=
        worst = (error / allowed).nan_to_num(nan=math.inf).max().item()
        outcome.faults.append(f"{name} is off by {worst:.3g} times what rounding explains")


def _part(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bits(tensor: Tensor) -> Tensor:
    """The numbers with -0 as 0, so that equal means equal."""
    return tensor + 0.0


def _listed(collectives: tuple[Collective, ...]) -> str:
    return "[" + ", ".join(f"{c.kind} {c.mesh_dim} {c.bytes}" for c in collectives) + "]"
