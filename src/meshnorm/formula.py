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

With a residual, the norm that stands between two blocks of a model::

    residual_out = cast(x + residual)            to the residual's dtype, which may differ from x's
    y            = the norm of residual_out      in x's dtype

    dX = dResidual = the norm's dX + dResidual_out

The norm is that of residual_out as it is stored, after the rounding: what models compute that add first and normalize
then (Llama and its kin in transformers), and vLLM's fused kernel for 16-bit types. Some fused norms take the statistic
of the sum before it is rounded; then y is no function of residual_out, and a backward that recomputes x̂ from it, as all
of them do, is the gradient of something else than what was computed.

What stands beside a gate, and is normalized in groups, is in ``formula_gated``.
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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y of x's shape and of ``dtype``, which is what the modes round to: x's own where it is not given. ``weight`` has
    the last ``normalized_ndim`` dims of x as its shape."""
    acc, dtype = accumulation_dtype(x.dtype), dtype or x.dtype
    x_hat = x.to(acc) * reference_rstd(x, eps, normalized_ndim)
    if casting_mode in ("llama", "none"):
        x_hat = x_hat.to(dtype).to(acc)
    if weight is None:
        return x_hat.to(dtype)
    scale = weight.to(acc) + offset
    if casting_mode == "none":
        scale = scale.to(dtype).to(acc)
    return (x_hat * scale).to(dtype)


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
    dx, dw = _backward(dy, x, weight, eps, offset, normalized_ndim)
    return dx.to(x.dtype), None if dw is None or weight is None else dw.to(weight.dtype)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, normalized_ndim: int
) -> tuple[Tensor, Tensor | None]:
    """dX and dW in the accumulation dtype."""
    acc = accumulation_dtype(x.dtype)
    hidden = tuple(range(x.ndim - normalized_ndim, x.ndim))
    rows = tuple(range(x.ndim - normalized_ndim))
    rstd = reference_rstd(x, eps, normalized_ndim)
    x_hat = x.to(acc) * rstd
    g = dy.to(acc)
    scaled = g if weight is None else g * (weight.to(acc) + offset)
    c = (scaled * x_hat).mean(hidden, keepdim=True)
    dx = (scaled - x_hat * c) * rstd
    if weight is None:
        return dx, None
    return dx, (g * x_hat).sum(rows) if rows else g * x_hat


def reference_add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    """(y of x's dtype, residual_out of the residual's dtype), both of the shape that x and the residual have."""
    acc = accumulation_dtype(x.dtype)
    residual_out = (x.to(acc) + residual.to(acc)).to(residual.dtype)
    return reference_forward(residual_out, weight, eps, offset, casting_mode, normalized_ndim, x.dtype), residual_out


def reference_add_backward(
    dy: Tensor,
    d_residual_out: Tensor,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dX of dY's dtype, which is x's, dResidual of the residual's dtype, dW or None)."""
    dx, dw = _backward(dy, residual_out, weight, eps, offset, normalized_ndim)
    dx = dx + d_residual_out.to(dx.dtype)
    return dx.to(dy.dtype), dx.to(residual_out.dtype), None if dw is None or weight is None else dw.to(weight.dtype)
