"""One call of the norm behind an addition on a mesh, held against float64 and against its plan, by every rank alike.

What ``meshnorm.checking.case`` is for the norm alone, and made from its pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from meshnorm import add_rms_norm, plan
from meshnorm.checking.case import _cut, _drawn, _wrapped, mesh_for
from meshnorm.checking.collectives import Recorder
from meshnorm.formula import accumulation_dtype, reference_add_backward, reference_add_forward, reference_rstd
from meshnorm.notation import parse_placements
from meshnorm.planning import Collective, Plan


@dataclass(frozen=True)
class AddCase:
    """Placements are text; "" of the weight stands for replicated, of gradients for where their outputs lie; "none" of
    a gradient for an output that is not used."""

    mesh: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    x: str
    residual: str
    weight: str = ""
    output: str = ""
    dy: str = ""
    d_residual_out: str = ""
    dtype: torch.dtype = torch.float32
    residual_dtype: torch.dtype = torch.float32
    casting_mode: str = "llama"
    offset: float = 0.0
    normalized_ndim: int = 1
    weight_grad: str = "auto"
    leaf: bool = True
    needs: tuple[bool, bool, bool] = (True, True, True)  # x, residual, weight
    seed: int = 0


@dataclass
class Found:
    """Local tensors of one run, and the collectives seen."""

    tensors: dict[str, Tensor | None]
    placements: dict[str, tuple[Placement, ...] | None]
    seen: tuple[Collective, ...]
    d_out64: dict[str, Tensor]


def run_add_case(case: AddCase) -> list[str]:
    """What was wrong, in words: empty where all is well."""
    mesh = mesh_for(case.mesh)
    expected = _plan(case, mesh)
    plain, recorded = (_run(case, mesh, expected, recorded) for recorded in (False, True))
    faults = []
    planned = expected.forward + (expected.backward if case.dy != "none" else ())  # no dY: what arrives is passed on
    if recorded.seen != planned:
        faults.append(f"planned {planned}, seen {recorded.seen}")
    for name, first in plain.tensors.items():
        second = recorded.tensors[name]
        if (first is None) != (second is None) or (first is not None and not torch.equal(first + 0.0, second + 0.0)):
            faults.append(f"{name} differs between the direct way and the way through the op")
    return faults + _compare(case, mesh, expected, plain)


def _placements(case: AddCase) -> tuple[tuple[Placement, ...], ...]:
    return parse_placements(case.x), parse_placements(case.residual)


def _plan(case: AddCase, mesh: DeviceMesh) -> Plan:
    x, residual = _placements(case)
    weight = {"": "replicated", "plain": "plain", "none": None}.get(case.weight, case.weight)
    if isinstance(weight, str) and weight not in ("replicated", "plain"):
        weight = parse_placements(weight)
    return plan(
        case.shape,
        x,
        mesh,
        residual=residual,
        residual_dtype=case.residual_dtype,
        weight=weight,
        dtype=case.dtype,
        normalized_shape=case.shape[len(case.shape) - case.normalized_ndim :],
        weight_grad=case.weight_grad,
        output_placements=parse_placements(case.output) if case.output else None,
        dy_placements=parse_placements(case.dy) if case.dy not in ("", "none") else None,
        d_residual_out_placements=(
            parse_placements(case.d_residual_out) if case.d_residual_out not in ("", "none") else None
        ),
        x_requires_grad=case.needs[0] or case.needs[1],
        weight_requires_grad=case.needs[2],
        coordinate=mesh.get_coordinate(),
    )


def _inputs(case: AddCase, mesh: DeviceMesh) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None, Tensor | None]:
    """((local, logical value in float64) of x and the residual, the weight, its value)."""
    generator = torch.Generator().manual_seed(case.seed)
    both = [
        _drawn(case.shape, placements, dtype, mesh, generator)
        for placements, dtype in zip(_placements(case), (case.dtype, case.residual_dtype), strict=True)
    ]
    if case.weight == "none":
        return both, None, None
    hidden = case.shape[len(case.shape) - case.normalized_ndim :]
    if case.weight == "plain":
        weight = torch.randn(hidden, generator=generator).to(case.dtype)
        return both, weight, weight.double()
    placements = parse_placements(case.weight) if case.weight else (Replicate(),) * mesh.ndim
    part, weight64 = _drawn(hidden, placements, case.dtype, mesh, generator)
    return both, _wrapped(part, mesh, placements, hidden), weight64


def _run(case: AddCase, mesh: DeviceMesh, expected: Plan, recorded: bool) -> Found:
    both, weight, _ = _inputs(case, mesh)
    leaves = [
        _wrapped(local, mesh, placements, case.shape).requires_grad_(needs)
        for (local, _), placements, needs in zip(both, _placements(case), case.needs, strict=False)
    ]
    used = [
        leaf if case.leaf or any(p.is_partial() for p in placements) else leaf * 1.0
        for leaf, placements in zip(leaves, _placements(case), strict=True)
    ]
    if weight is not None:
        weight.requires_grad_(case.needs[2])
    recorder = Recorder(mesh)
    options = dict(
        offset=case.offset,
        casting_mode=case.casting_mode,
        normalized_shape=case.shape[len(case.shape) - case.normalized_ndim :],
        weight_grad=case.weight_grad,
        output_placements=parse_placements(case.output) if case.output else None,
    )
    if recorded:
        with recorder:
            outputs = add_rms_norm(*used, weight, **options)  # type: ignore[arg-type]
    else:
        outputs = add_rms_norm(*used, weight, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(case.seed + 1)
    grads, values = [], {}
    for name, out, given in zip(("y", "residual_out"), outputs, (case.dy, case.d_residual_out), strict=True):
        dtype = case.dtype if name == "y" else case.residual_dtype
        placements = expected.y if given in ("", "none") else parse_placements(given)
        part, value = _drawn(case.shape, placements, dtype, mesh, generator)
        values[name] = value * (given != "none")
        if given != "none" and out.requires_grad:
            grads.append((out, _wrapped(part, mesh, placements, case.shape)))
    if grads and recorded:
        with recorder:
            torch.autograd.backward(*map(list, zip(*grads, strict=True)))  # type: ignore[arg-type]
    elif grads:
        torch.autograd.backward(*map(list, zip(*grads, strict=True)))  # type: ignore[arg-type]
    gradients = {"dX": leaves[0].grad, "dResidual": leaves[1].grad, "dW": None if weight is None else weight.grad}
    named = dict(zip(("y", "residual_out"), outputs, strict=True)) | gradients
    if leaves[0].grad is not None and leaves[1].grad is not None:
        storages = {leaf.grad.to_local().untyped_storage().data_ptr() for leaf in leaves}  # type: ignore[union-attr]
        assert len(storages) == 2 or not leaves[0].grad.to_local().numel(), "gradients share their memory"
    return Found(
        {
            name: None if t is None else (t.to_local() if isinstance(t, DTensor) else t).detach()
            for name, t in named.items()
        },
        {name: tuple(t.placements) if isinstance(t, DTensor) else None for name, t in named.items()},
        tuple(recorder.seen),
        values,
    )


def _compare(case: AddCase, mesh: DeviceMesh, expected: Plan, found: Found) -> list[str]:
    (x64, residual64), weight64 = [value for _, value in _inputs(case, mesh)[0]], _inputs(case, mesh)[2]
    ndim, acc_dtype = case.normalized_ndim, accumulation_dtype(case.dtype)
    # What x and the residual are once their partial dims are reduced, which their own dtypes hold exactly.
    total = (x64.to(acc_dtype) + residual64.to(acc_dtype)).to(case.residual_dtype).double()
    y64, _ = reference_add_forward(torch.zeros_like(total), total, weight64, 1e-6, case.offset, "gemma", ndim)
    dy64, d_out64 = found.d_out64["y"], found.d_out64["residual_out"]
    dx64, _, dw64 = reference_add_backward(dy64, d_out64, total, weight64, 1e-6, case.offset, ndim)
    acc = torch.finfo(acc_dtype).eps
    rstd = reference_rstd(total, 1e-6, ndim)
    x_hat = (total * rstd).abs()
    scale = torch.ones_like(x_hat) if weight64 is None else (weight64.abs() + abs(case.offset)).expand_as(x_hat)
    roundings = {"gemma": 1, "llama": 2, "none": 3}[case.casting_mode]
    terms = dy64.abs() * scale
    mean = (terms * x_hat).mean(tuple(range(x_hat.ndim - ndim, x_hat.ndim)), keepdim=True)
    terms = 48 * acc * ((terms + x_hat * mean) * rstd + d_out64.abs())
    checks = [
        ("y", y64, roundings, 24 * acc * scale * x_hat, expected.y),
        ("residual_out", total, 0, torch.zeros_like(total), expected.y),
        ("dX", dx64, 1, terms, expected.dx),
        ("dResidual", dx64, 1, terms, expected.dx),
    ]
    if dw64 is not None and expected.dw is not None:
        rows = tuple(range(x_hat.ndim - ndim))
        each = dy64.abs() * x_hat
        summed = each.sum(rows) if rows else each
        bound = (24 + math.sqrt(math.prod(case.shape[: len(rows)]))) * acc * summed
        bound = bound + 0.51 * torch.finfo(case.dtype).eps * summed  # one rounding a rank where the sum is deferred
        checks.append(("dW", dw64, 1, bound, expected.dw))
    wanted = {"dX": case.needs[0], "dResidual": case.needs[1], "dW": expected.dw is not None and case.dy != "none"}
    faults = []
    for name, exact, count, bound, placements in checks:
        tensor = found.tensors[name]
        if (tensor is None) == wanted.get(name, True):
            faults.append(f"{name} is {'missing' if tensor is None else 'there'}")
        if tensor is None or placements is None:
            continue
        if (case.weight != "plain" or name != "dW") and found.placements[name] != placements:
            faults.append(f"{name} has placements {found.placements[name]}, planned {placements}")
            continue
        if tensor.dtype != (case.residual_dtype if name in ("residual_out", "dResidual") else case.dtype):
            faults.append(f"{name} has dtype {tensor.dtype}")
        if (name == "dW" and any(p.is_partial() for p in placements)) or (case.weight_grad, name) == ("deferred", "dW"):
            tensor = _wrapped(tensor, mesh, _summed(case, placements, expected), exact.shape).full_tensor()
            placements = (Replicate(),) * mesh.ndim
        info = torch.finfo(tensor.dtype)
        allowed = count * 0.51 * info.eps * exact.abs() + bound + 8 * info.smallest_normal * info.eps
        allowed = allowed * (name != "residual_out")
        error = (tensor.double() - _cut(exact, mesh, placements)).abs()
        if not bool((error <= _cut(allowed, mesh, placements)).all()):
            worst = (error / _cut(allowed, mesh, placements)).nan_to_num(nan=math.inf).max().item()
            faults.append(f"{name} is off by {worst:.3g} times what rounding explains")
    return faults


def _summed(case: AddCase, placements: tuple[Placement, ...], expected: Plan) -> tuple[Placement, ...]:
    """The placements of a dW whose sum is deferred."""
    from torch.distributed.tensor.placement_types import Partial

    if case.weight != "plain":
        return placements
    return tuple(Partial() if getattr(p, "dim", None) is not None else p for p in expected.y)
