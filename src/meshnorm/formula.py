"""What is computed: RMSNorm in plain torch, the definition that every kernel is held to.

With H the product of the normalized dims (the last ``normalized_ndim`` dims of x)::

    rstd = rsqrt(mean(x²) + eps)          one number a row, mean over H
    x̂    = x · rstd
    y    = x̂ · (w + offset)

and, for a gradient dY of y::

    c  = mean(dY · (w + offset) · x̂)      one number a row, mean over H
    dX = (dY · (w + offset) − x̂ · c) · rstd
    dW = Σ over the rows of dY · x̂

Without a weight y = x̂, whatever the offset. (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019; the offset
is the Gemma family's.)

A casting mode says where a result is rounded to x's dtype. Statistics and sums are always in the accumulation dtype:
float32, or float64 for a float64 x.

=========  ==============================================================================================
casting    y
=========  ==============================================================================================
"llama"    cast(cast(x̂) · (w + offset)): x̂ is rounded first, the product is rounded again
"gemma"    cast(x̂ · (w + offset)): one rounding, at the end
"none"     cast(cast(x̂) · cast(w + offset)): every tensor is rounded to x's dtype, the weight too
=========  ==============================================================================================

The gradients do not depend on the mode: they are those of the exact formula, rounded once at the end. In float64
the three modes are one and the same function, whose value is what "correct" means in this library.
"""

from __future__ import annotations

import torch
from torch import Tensor

CASTING_MODES = ("llama", "gemma", "none")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, sums and intermediate products for an x of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    normalized_ndim: int = 1,
) -> Tensor:
    """y of x's shape and dtype. ``weight`` has the last ``normalized_ndim`` dims of x as its shape."""
    acc = accumulation_dtype(x.dtype)
    x_hat = x.to(acc) * reference_rstd(x, eps, normalized_ndim)
    if casting_mode in ("llama", "none"):
        x_hat = x_hat.to(x.dtype).to(acc)
    if weight is None:
        return x_hat.to(x.dtype)
    scale = weight.to(acc) + offset
    if casting_mode == "none":
        scale = scale.to(x.dtype).to(acc)
    return (x_hat * scale).to(x.dtype)


def reference_rstd(x: Tensor, eps: float, normalized_ndim: int = 1) -> Tensor:
    """rsqrt(mean(x²) + eps) in the accumulation dtype, the normalized dims kept with size 1."""
    dims = tuple(range(x.ndim - normalized_ndim, x.ndim))
    return torch.rsqrt(x.to(accumulation_dtype(x.dtype)).square().mean(dims, keepdim=True) + eps)


def reference_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """(dX of x's shape and dtype, dW of the weight's shape and dtype, or None without a weight)."""
    acc = accumulation_dtype(x.dtype)
    hidden = tuple(range(x.ndim - normalized_ndim, x.ndim))
    rows = tuple(range(x.ndim - normalized_ndim))
    rstd = reference_rstd(x, eps, normalized_ndim)
    x_hat = x.to(acc) * rstd
    g = dy.to(acc)
    scaled = g if weight is None else g * (weight.to(acc) + offset)
    c = (scaled * x_hat).mean(hidden, keepdim=True)
    dx = ((scaled - x_hat * c) * rstd).to(x.dtype)
    if weight is None:
        return dx, None
    dw = (g * x_hat).sum(rows) if rows else g * x_hat
    return dx, dw.to(weight.dtype)
