"""One call of the gated norm on a mesh, held against float64 and against its plan, by every rank alike.

What ``meshnorm.checking.case`` is for the norm alone, and made from its pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from meshnorm import gated_rms_norm, plan
from meshnorm.checking.case import _cut, _drawn, _wrapped, mesh_for
from meshnorm.checking.collectives import Recorder
from meshnorm.formula import accumulation_dtype
from meshnorm.formula_gated import (
    Gated,
    activated,
    reference_gated_backward,
    reference_gated_forward,
    reference_gated_rstd,
)
from meshnorm.notation import parse_placements
from meshnorm.planning import Collective, Plan


@dataclass(frozen=True)
class GatedCase:
    """Placements are text; "" of the weight stands for replicated, of dY for where y lies; "none" of the gate and the
    weight for none."""

    mesh: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    x: str
    gate: str
    weight: str = ""
    output: str = ""
    dy: str = ""
    group: int = 0
    before: bool = True
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype = torch.float32
    casting_mode: str = "gemma"
    offset: float = 0.0
    normalized_ndim: int = 1
    weight_grad: str = "auto"
    needs: tuple[bool, bool, bool] = (True, True, True)  # x, gate, weight
    seed: int = 0

    @property
    def hidden(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.normalized_ndim :]

    @property
    def how(self) -> Gated:
        size = self.group or math.prod(self.hidden)
        return Gated(1e-6, self.offset, self.casting_mode, self.before, self.activation, size)


@dataclass
class Found:
    """Local tensors of one run, and the collectives seen."""

    tensors: dict[str, Tensor | None]
    placements: dict[str, tuple[Placement, ...] | None]
    seen: tuple[Collective, ...]
    dy64: Tensor


def run_gated_case(case: GatedCase) -> list[str]:
    """What was wrong, in words: empty where all is well."""
    mesh = mesh_for(case.mesh)
    expected = _plan(case, mesh)
    plain, recorded = (_run(case, mesh, expected, recorded) for recorded in (False, True))
    faults = []
    if recorded.seen != expected.forward + expected.backward:
        faults.append(f"planned {expected.forward + expected.backward}, seen {recorded.seen}")
    for name, first in plain.tensors.items():
        second = recorded.tensors[name]
        if (first is None) != (second is None) or (first is not None and not torch.equal(first + 0.0, second + 0.0)):
            faults.append(f"{name} differs between the direct way and the way through the op")
    return faults + _compare(case, mesh, expected, plain)


def _plan(case: GatedCase, mesh: DeviceMesh) -> Plan:
    weight = {"": "replicated", "plain": "plain", "none": None}.get(case.weight, case.weight)
    if isinstance(weight, str) and weight not in ("replicated", "plain"):
        weight = parse_placements(weight)
    return plan(
        case.shape,
        parse_placements(case.x),
        mesh,
        gate=None if case.gate == "none" else parse_placements(case.gate),
        gate_dtype=case.gate_dtype,
        group_size=case.how.group_size,
        weight=weight,
        dtype=case.dtype,
        normalized_shape=case.hidden,
        weight_grad=case.weight_grad,
        output_placements=parse_placements(case.output) if case.output else None,
        dy_placements=parse_placements(case.dy) if case.dy else None,
        x_requires_grad=case.needs[0] or (case.needs[1] and not case.before and case.gate != "none"),
        weight_requires_grad=case.needs[2],
        coordinate=mesh.get_coordinate(),
    )


Input = tuple[Tensor | None, Tensor | None]


def _inputs(case: GatedCase, mesh: DeviceMesh) -> tuple[Input, Input, Input]:
    """(as it is passed, but unwrapped for x and the gate; its logical value in float64) of x, the gate, the weight."""
    generator = torch.Generator().manual_seed(case.seed)
    x = _drawn(case.shape, parse_placements(case.x), case.dtype, mesh, generator)
    gate: Input = (None, None)
    if case.gate != "none":
        gate = _drawn(case.shape, parse_placements(case.gate), case.gate_dtype, mesh, generator)
    if case.weight == "none":
        return x, gate, (None, None)
    if case.weight == "plain":
        weight = torch.randn(case.hidden, generator=generator).to(case.dtype)
        return x, gate, (weight, weight.double())
    placements = parse_placements(case.weight) if case.weight else (Replicate(),) * mesh.ndim
    part, weight64 = _drawn(case.hidden, placements, case.dtype, mesh, generator)
    return x, gate, (_wrapped(part, mesh, placements, case.hidden), weight64)


def _run(case: GatedCase, mesh: DeviceMesh, expected: Plan, recorded: bool) -> Found:
    (x, _), (gate, _), (weight, _) = _inputs(case, mesh)
    assert x is not None
    leaves: list[Tensor | None] = [
        None if local is None else _wrapped(local, mesh, parse_placements(placements), case.shape)
        for local, placements in ((x, case.x), (gate, case.gate))
    ]
    leaves.append(weight)
    for leaf, needs in zip(leaves, case.needs, strict=True):
        if leaf is not None:
            leaf.requires_grad_(needs)
    recorder = Recorder(mesh)

    def forward() -> Tensor:
        return gated_rms_norm(
            *leaves,  # type: ignore[arg-type]
            norm_before_gate=case.before,
            activation=case.activation,
            group_size=case.group or None,
            offset=case.offset,
            casting_mode=case.casting_mode,
            normalized_shape=case.hidden,
            weight_grad=case.weight_grad,
            output_placements=parse_placements(case.output) if case.output else None,
        )

    placements = parse_placements(case.dy) if case.dy else expected.y
    generator = torch.Generator().manual_seed(case.seed + 1)
    part, dy64 = _drawn(case.shape, placements, case.dtype, mesh, generator)
    dy = _wrapped(part, mesh, placements, case.shape)
    if recorded:
        with recorder:
            y = forward()
            y.backward(dy)
    else:
        y = forward()
        y.backward(dy)
    named: dict[str, Tensor | None] = {"y": y}
    named |= {n: None if t is None else t.grad for n, t in zip(("dX", "dGate", "dW"), leaves, strict=True)}
    return Found(
        {
            name: None if t is None else (t.to_local() if isinstance(t, DTensor) else t).detach()
            for name, t in named.items()
        },
        {name: tuple(t.placements) if isinstance(t, DTensor) else None for name, t in named.items()},
        tuple(recorder.seen),
        dy64,
    )


def _compare(case: GatedCase, mesh: DeviceMesh, expected: Plan, found: Found) -> list[str]:
    x64, gate64, weight64 = (value for _, value in _inputs(case, mesh))
    dy64, how = found.dy64, case.how
    assert x64 is not None
    ndim = case.normalized_ndim
    acc = torch.finfo(accumulation_dtype(case.dtype)).eps
    y64 = reference_gated_forward(x64, gate64, weight64, how, ndim)
    dx64, d_gate64, dw64 = reference_gated_backward(dy64, x64, gate64, weight64, how, ndim)
    one = torch.ones_like(x64)
    act, slope = one, one
    if gate64 is not None:
        act, sigmoid = activated(gate64, case.activation), torch.sigmoid(gate64)
        slope = sigmoid + gate64.abs() * sigmoid * torch.sigmoid(-gate64)
    first, last = (one, act) if case.before else (act, one)
    v = x64 * first
    rstd = reference_gated_rstd(v, how, ndim)
    x_hat = (v * rstd).abs()
    scale = one if weight64 is None else (weight64.abs() + abs(case.offset)).expand_as(one)
    e = (dy64 * last).abs()
    rows = tuple(range(x64.ndim - ndim))
    count = math.prod(case.hidden) // how.group_size
    groups = (e * scale * x_hat).reshape(*x64.shape[: len(rows)], count, how.group_size)
    mean = groups.mean(-1, keepdim=True).expand_as(groups).reshape(x64.shape)
    dv = (e * scale + x_hat * mean) * rstd
    d_gate = (dy64.abs() * x_hat * scale if case.before else dv * x64.abs()) * slope
    checks = [
        ("y", y64, 64 * acc * x_hat * scale * last.abs(), expected.y),
        ("dX", dx64, 96 * acc * dv * first.abs(), expected.y),
    ]
    wanted = {"dX": case.needs[0], "dGate": case.needs[1] and gate64 is not None, "dW": expected.dw is not None}
    if d_gate64 is not None:
        checks.append(("dGate", d_gate64, 96 * acc * d_gate, expected.y))
    if dw64 is not None and expected.dw is not None:
        each = e * x_hat
        summed = each.sum(rows) if rows else each
        bound = (64 + math.sqrt(math.prod(case.shape[: len(rows)]))) * acc * summed
        bound = bound + 0.51 * torch.finfo(case.dtype).eps * summed  # one rounding a rank where the sum is deferred
        checks.append(("dW", dw64, bound, expected.dw))
    roundings = {"gemma": 1, "llama": 3, "none": 5}[case.casting_mode]
    faults = []
    for name, exact, bound, placements in checks:
        tensor = found.tensors[name]
        if (tensor is None) == wanted.get(name, True):
            faults.append(f"{name} is {'missing' if tensor is None else 'there'}")
        if tensor is None:
            continue
        if (case.weight != "plain" or name != "dW") and found.placements[name] != placements:
            faults.append(f"{name} has placements {found.placements[name]}, planned {placements}")
            continue
        if tensor.dtype != (case.gate_dtype if name == "dGate" else case.dtype):
            faults.append(f"{name} has dtype {tensor.dtype}")
        if (name == "dW" and any(p.is_partial() for p in placements)) or (case.weight_grad, name) == ("deferred", "dW"):
            if case.weight == "plain":
                placements = tuple(Partial() if getattr(p, "dim", None) is not None else p for p in expected.y)
            tensor = _wrapped(tensor, mesh, placements, exact.shape).full_tensor()
            placements = (Replicate(),) * mesh.ndim
        info = torch.finfo(tensor.dtype)
        allowed = (roundings if name == "y" else 1) * 0.51 * info.eps * exact.abs() + bound
        allowed = allowed + 8 * info.smallest_normal * info.eps
        error = (tensor.double() - _cut(exact, mesh, placements)).abs()
        if not bool((error <= _cut(allowed, mesh, placements)).all()):
            worst = (error / _cut(allowed, mesh, placements)).nan_to_num(nan=math.inf).max().item()
            faults.append(f"{name} is off by {worst:.3g} times what rounding explains")
    return faults
