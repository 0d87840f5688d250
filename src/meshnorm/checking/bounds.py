"""How far from float64 a result may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshnorm.formula import accumulation_dtype, reference_backward, reference_rstd

if TYPE_CHECKING:
    from meshnorm.checking.case import Case


@dataclass
class Bounds:
    """The largest error that rounding explains, element by element.

    y: relative, one rounding for each cast of the mode. dX: one rounding of the result, and the accumulation dtype's
    rounding of each of the two terms whose difference it is. dW: one rounding (one a rank where the sum is deferred),
    and that of a sum of M terms, whose error grows like √M.
    """

    y: Tensor
    dx: Tensor
    dw: Tensor | None

    @classmethod
    def of(cls, case: Case, x: Tensor, weight: Tensor | None, dy: Tensor) -> Bounds:
        ndim, weight_dtype = case.normalized_ndim, case.weight_dtype or case.dtype
        eps, tiny = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
        acc = torch.finfo(accumulation_dtype(case.dtype)).eps
        x_hat = (x * reference_rstd(x, case.eps, ndim)).abs()
        scale = torch.ones_like(x_hat) if weight is None else (weight.abs() + abs(case.offset)).expand_as(x_hat)
        exact = torch.ones_like(x_hat) if weight is None else (weight + case.offset).abs().expand_as(x_hat)
        roundings = {"gemma": 1, "llama": 2, "none": 3}[case.casting_mode]
        y = (roundings * 0.51 * eps * exact + 24 * acc * scale) * x_hat + 4 * tiny * (1 + exact)
        hidden = tuple(range(x.ndim - ndim, x.ndim))
        terms = dy.abs() * scale
        mean = (terms * x_hat).mean(hidden, keepdim=True)
        rstd = reference_rstd(x, case.eps, ndim)
        dx64, dw64 = reference_backward(dy, x, weight, case.eps, case.offset, ndim)
        dx = 0.51 * eps * dx64.abs() + 48 * acc * (terms + x_hat * mean) * rstd + 4 * tiny
        if weight is None or dw64 is None:
            return cls(y, dx, None)
        rows = tuple(range(x.ndim - ndim))
        each = dy.abs() * x_hat
        total = each.sum(rows) if rows else each
        count = math.prod(x.shape[: x.ndim - ndim])
        w_eps = torch.finfo(weight_dtype).eps
        w_tiny = torch.finfo(weight_dtype).smallest_normal * w_eps
        ranks = math.prod(size for _, size in case.mesh)
        dw = 0.51 * w_eps * (dw64.abs() + total) + (24 + math.sqrt(count)) * acc * total + 4 * ranks * w_tiny
        return cls(y, dx, dw)
