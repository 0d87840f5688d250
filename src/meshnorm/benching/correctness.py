"""What a provider returned, held against float64. A norm that is wrong is not worth timing.

Bounds follow from the dtype; its eps is twice what one rounding may be off by. y may be off by 2 eps of itself: x̂
rounded and the product rounded make one. dX = rstd·(g − x̂·mean(g·x̂)) with g = dY·w cancels, so its bound is 2 eps of
its terms' sizes. dW is a sum of M terms t = dY·x̂ that may each have been rounded, at random: 4 eps·√Σt² more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .providers import EPS

_CHUNK = 2**24  # elements in float64 at a time: 128 MiB a tensor


@dataclass(frozen=True)
class Inputs:
    """x and dY of shape (M, N), a weight of shape (N,), random normal; fresh for each provider and each shape.

    Fresh, since a result that a kernel left unwritten may show what the last provider wrote there.
    """

    x: Tensor
    weight: Tensor
    dy: Tensor

    @staticmethod
    def drawn(m: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def draw(*size: int) -> Tensor:
            return torch.randn(*size, dtype=dtype, device=generator.device, generator=generator)

        return Inputs(draw(m, n), draw(n), draw(m, n))


def fault_of_forward(inputs: Inputs, y: Tensor) -> str:
    """What is wrong with y, in words; empty where nothing is."""
    fault = _fault_of_kind("y", y, inputs.x)
    if fault:
        return fault
    weight = inputs.weight.double()
    for rows, x_hat, _ in _normalized(inputs.x):
        fault = _fault("y", y[rows], x_hat * weight, (x_hat * weight).abs(), rows.start)
        if fault:
            return fault
    return ""


def fault_of_backward(inputs: Inputs, dx: Tensor, dw: Tensor) -> str:
    """What is wrong with dX or dW, in words; empty where nothing is."""
    fault = _fault_of_kind("dX", dx, inputs.x) or _fault_of_kind("dW", dw, inputs.weight)
    if fault:
        return fault
    weight = inputs.weight.double()
    total, squares = torch.zeros_like(weight), torch.zeros_like(weight)
    for rows, x_hat, rstd in _normalized(inputs.x):
        dy = inputs.dy[rows].double()
        g = dy * weight
        want = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        size = rstd * (g.abs() + x_hat.abs() * (g * x_hat).abs().mean(-1, keepdim=True))
        fault = _fault("dX", dx[rows], want, size, rows.start)
        if fault:
            return fault
        total += (dy * x_hat).sum(0)
        squares += (dy * x_hat).square().sum(0)
    return _fault("dW", dw, total, total.abs() + 2 * squares.sqrt(), 0)


def _normalized(x: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """x̂ and rstd in float64, a slice of rows at a time."""
    step = max(1, _CHUNK // x.shape[1])
    for first in range(0, len(x), step):
        rows = slice(first, min(first + step, len(x)))
        part = x[rows].double()
        rstd = (part.square().mean(-1, keepdim=True) + EPS).rsqrt()
        yield rows, part * rstd, rstd


def _fault_of_kind(name: str, got: Tensor, like: Tensor) -> str:
    if got.shape == like.shape and got.dtype == like.dtype:
        return ""
    return f"{name} is {got.dtype} of shape {tuple(got.shape)}, not {like.dtype} of {tuple(like.shape)}"


def _fault(name: str, got: Tensor, want: Tensor, size: Tensor, first_row: int) -> str:
    """Where ``got`` is off by more than 2 eps of ``size``; NaN is off."""
    info = torch.finfo(got.dtype)
    # 32 float32 roundings for the row's sum and its root, which bf16 and fp16 kernels do in float32.
    accumulated = 32 * torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    off = ~((got.double() - want).abs() <= (2 * info.eps + accumulated) * size + info.tiny)
    count = int(off.sum())
    if not count:
        return ""
    at = off.nonzero()[0].tolist()
    place = ", ".join(map(str, [at[0] + first_row, *at[1:]]))
    return (
        f"wrong: {name} differs at {count} of {off.numel()} elements; "
        f"{name}[{place}] is {got[tuple(at)].item():.6g}, {want[tuple(at)].item():.6g} in float64"
    )
