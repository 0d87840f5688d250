"""One call of the norms of q and k on a mesh, held against float64 and against its plan, by every rank alike.

What ``meshnorm.checking.case`` is for one norm, and made from its pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from meshnorm import plan, qk_rms_norm
from meshnorm.checking.case import _cut, _drawn, _wrapped, mesh_for
from meshnorm.checking.collectives import Recorder
from meshnorm.formula import accumulation_dtype, reference_backward, reference_forward, reference_rstd
from meshnorm.notation import parse_placements
from meshnorm.planning import Collective, Plan

Pair = tuple[str, str]


@dataclass(frozen=True)
class QKCase:
    """Placements are text, of q and of k; "" of a weight stands for replicated, of dY for where y lies. ``needs``: q,
    k, the weight of q, that of k; ``used``: whether the backward starts from the norm of q, from that of k."""

    mesh: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    x: Pair
    weight: Pair = ("", "")
    output: Pair = ("", "")
    dy: Pair = ("", "")
    dtype: torch.dtype = torch.float32
    casting_mode: str = "gemma"
    offset: float = 0.0
    ndim: int = 1  # that of the weights
    weight_grad: str = "auto"
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True)
    used: tuple[bool, bool] = (True, True)
    seed: int = 0

    def hidden(self, place: int) -> tuple[int, ...]:
        shape = self.shapes[place]
        return shape[len(shape) - self.ndim :]


@dataclass
class Found:
    """Local tensors of one run, and the collectives seen."""

    tensors: dict[str, Tensor | None]
    placements: dict[str, tuple[Placement, ...] | None]
    seen: tuple[Collective, ...]
    dys64: list[Tensor]


def run_qk_case(case: QKCase) -> list[str]:
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
    for place, side in enumerate((expected, expected.k)):
        assert side is not None
        faults += _compare(case, place, mesh, side, plain)
    return faults


def _parsed(text: str) -> tuple[Placement, ...] | None:
    return parse_placements(text) if text else None


def _for_plan(weight: str) -> Any:
    if weight in ("", "plain", "none"):
        return {"": "replicated", "plain": "plain", "none": None}[weight]
    return parse_placements(weight)


def _plan(case: QKCase, mesh: DeviceMesh) -> Plan:
    needs = [need and case.used[place % 2] for place, need in enumerate(case.needs)]
    return plan(
        case.shapes[0],
        parse_placements(case.x[0]),
        mesh,
        weight=_for_plan(case.weight[0]),
        dtype=case.dtype,
        normalized_shape=case.hidden(0),
        weight_grad=case.weight_grad,
        output_placements=_parsed(case.output[0]),
        dy_placements=_parsed(case.dy[0]),
        x_requires_grad=needs[0],
        weight_requires_grad=needs[2],
        coordinate=mesh.get_coordinate(),
        k=parse_placements(case.x[1]),
        k_shape=case.shapes[1],
        k_weight=_for_plan(case.weight[1]),
        k_normalized_shape=case.hidden(1),
        k_output_placements=_parsed(case.output[1]),
        dk_placements=_parsed(case.dy[1]),
        k_requires_grad=needs[1],
        k_weight_requires_grad=needs[3],
    )


def _inputs(case: QKCase, mesh: DeviceMesh, place: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(x's local part, x in float64, the weight, the weight in float64) of q or of k."""
    generator = torch.Generator().manual_seed(2 * case.seed + place)
    x, x64 = _drawn(case.shapes[place], parse_placements(case.x[place]), case.dtype, mesh, generator)
    kind = case.weight[place]
    if kind == "none":
        return x, x64, None, None
    if kind == "plain":
        weight = torch.randn(case.hidden(place), generator=generator).to(case.dtype)
        return x, x64, weight, weight.double()
    placements = parse_placements(kind) if kind else (Replicate(),) * mesh.ndim
    part, weight64 = _drawn(case.hidden(place), placements, case.dtype, mesh, generator)
    return x, x64, _wrapped(part, mesh, placements, case.hidden(place)), weight64


def _run(case: QKCase, mesh: DeviceMesh, expected: Plan, recorded: bool) -> Found:
    inputs = [_inputs(case, mesh, place) for place in range(2)]
    xs = [_wrapped(x, mesh, parse_placements(case.x[p]), case.shapes[p]) for p, (x, *_) in enumerate(inputs)]
    leaves = [*xs, *(weight for _, _, weight, _ in inputs)]
    for leaf, need in zip(leaves, case.needs, strict=True):
        if leaf is not None:
            leaf.requires_grad_(need)
    dys, dys64 = [], []
    for place, side in enumerate((expected, expected.k)):
        assert side is not None
        placements = _parsed(case.dy[place]) or side.y
        generator = torch.Generator().manual_seed(1000 + 2 * case.seed + place)
        part, dy64 = _drawn(case.shapes[place], placements, case.dtype, mesh, generator)
        dys.append(_wrapped(part, mesh, placements, case.shapes[place]))
        dys64.append(dy64)

    def run() -> tuple[Tensor, Tensor]:
        ys = qk_rms_norm(
            *leaves,  # type: ignore[arg-type]
            offset=case.offset,
            casting_mode=case.casting_mode,
            q_normalized_shape=case.hidden(0),
            k_normalized_shape=case.hidden(1),
            weight_grad=case.weight_grad,
            q_output_placements=_parsed(case.output[0]),
            k_output_placements=_parsed(case.output[1]),
        )
        used = [place for place in range(2) if case.used[place] and ys[place].requires_grad]
        torch.autograd.backward([ys[place] for place in used], [dys[place] for place in used])
        return ys

    recorder = Recorder(mesh)
    if recorded:
        with recorder:
            ys = run()
    else:
        ys = run()
    named: dict[str, Tensor | None] = {"y of q": ys[0], "y of k": ys[1]}
    names = ("dX of q", "dX of k", "dW of q", "dW of k")
    named |= {name: None if leaf is None else leaf.grad for name, leaf in zip(names, leaves, strict=True)}
    return Found(
        {
            name: None if t is None else (t.to_local() if isinstance(t, DTensor) else t).detach()
            for name, t in named.items()
        },
        {name: tuple(t.placements) if isinstance(t, DTensor) else None for name, t in named.items()},
        tuple(recorder.seen),
        dys64,
    )


def _compare(case: QKCase, place: int, mesh: DeviceMesh, expected: Plan, found: Found) -> list[str]:
    _, x64, _, weight64 = _inputs(case, mesh, place)
    dy64, ndim = found.dys64[place], case.ndim
    of = f" of {'qk'[place]}"
    acc = torch.finfo(accumulation_dtype(case.dtype)).eps
    y64 = reference_forward(x64, weight64, 1e-6, case.offset, "gemma", ndim)
    dx64, dw64 = reference_backward(dy64, x64, weight64, 1e-6, case.offset, ndim)
    rstd = reference_rstd(x64, 1e-6, ndim)
    x_hat = (x64 * rstd).abs()
    scale = torch.ones_like(x64) if weight64 is None else (weight64.abs() + abs(case.offset)).expand_as(x64)
    s = dy64.abs() * scale
    dims = tuple(range(x64.ndim - ndim, x64.ndim))
    dx_terms = (s + x_hat * (s * x_hat).mean(dims, keepdim=True)) * rstd
    used = case.used[place]
    wanted = {"y": True, "dX": case.needs[place] and used, "dW": case.needs[place + 2] and used and dw64 is not None}
    checks = [("y", y64, 64 * acc * x_hat * scale, expected.y), ("dX", dx64, 96 * acc * dx_terms, expected.y)]
    if dw64 is not None and expected.dw is not None:
        rows = tuple(range(x64.ndim - ndim))
        summed = (dy64.abs() * x_hat).sum(rows)
        bound = (64 + math.sqrt(math.prod(case.shapes[place][: len(rows)]))) * acc * summed
        bound = bound + 0.51 * torch.finfo(case.dtype).eps * summed  # one rounding a rank where the sum is deferred
        checks.append(("dW", dw64, bound, expected.dw))
    roundings = {"gemma": 1, "llama": 3, "none": 4}[case.casting_mode]
    faults = []
    if (found.tensors["dW" + of] is not None) != wanted["dW"]:
        faults.append(f"dW{of} is {'missing' if wanted['dW'] else 'there'}")
    for name, exact, bound, placements in checks:
        tensor = found.tensors[name + of]
        if (tensor is None) == wanted[name]:
            faults.append(f"{name}{of} is {'missing' if tensor is None else 'there'}")
        if tensor is None:
            continue
        plain = case.weight[place] == "plain"
        if (name != "dW" or not plain) and found.placements[name + of] != placements:
            faults.append(f"{name}{of} has placements {found.placements[name + of]}, planned {placements}")
            continue
        if tensor.dtype != case.dtype:
            faults.append(f"{name}{of} has dtype {tensor.dtype}")
        if name == "dW" and (any(p.is_partial() for p in placements) or case.weight_grad == "deferred"):
            if plain:
                placements = tuple(Partial() if getattr(p, "dim", None) is not None else p for p in expected.y)
            tensor = _wrapped(tensor, mesh, placements, exact.shape).full_tensor()
            placements = (Replicate(),) * mesh.ndim
        info = torch.finfo(tensor.dtype)
        allowed = (roundings if name == "y" else 1) * 0.51 * info.eps * exact.abs() + bound
        allowed = allowed + 8 * info.smallest_normal * info.eps
        error = (tensor.double() - _cut(exact, mesh, placements)).abs()
        if not bool((error <= _cut(allowed, mesh, placements)).all()):
            worst = (error / _cut(allowed, mesh, placements)).nan_to_num(nan=math.inf).max().item()
            faults.append(f"{name}{of} is off by {worst:.3g} times what rounding explains")
    return faults
