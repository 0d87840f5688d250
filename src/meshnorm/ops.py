"""The kernels on tensors of any shape, each as a function and as an op of ``torch.ops.meshnorm``.

Calling one runs its kernel directly where nothing could be looking, since a trip through the dispatcher costs more than
launching a small norm, and through the op where something does (torch.compile, FakeTensor, selective checkpointing,
torch.func). Both run the same lines.

Shapes: x and dY are (*rows, *normalized dims), ``ndim`` is how many dims are normalized, the weight has their shape or
is None; rstd and totals have the shape of the rows, in the accumulation dtype. ``hidden_size`` is the global H, of
which x may hold a slice. A gradient that is not needed comes back as an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from meshnorm.dispatch import unobserved
from meshnorm.kernels import kernels_for
from meshnorm.rows import empty_like_contiguous, empty_per_row, flat_weight, row_view


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as ``meshnorm::<its name>``; calls go to it directly or through the op."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        registered = torch.library.custom_op(f"meshnorm::{function.__name__}", function, mutates_args=(), schema=schema)
        registered.register_fake(fake)

        def call(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            return function(*args) if unobserved(*tensors) else registered(*args)

        call.__doc__ = function.__doc__
        call.direct, call.op = function, registered  # type: ignore[attr-defined]
        return call

    return register


def _y_and_rstd(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    ndim = args[-1]
    return empty_like_contiguous(x), empty_per_row(x, ndim)


def _gradients(
    dy: Tensor, x: Tensor, ndim: int, needs_dx: bool, needs_dw: bool, dw_dtype: torch.dtype, into_dy: bool = False
) -> tuple[Tensor, Tensor]:
    """(dX, dW) to write into, an empty tensor for the one that nobody needs."""
    if not needs_dx:
        dx = x.new_empty(0)
    elif into_dy and dy.is_contiguous() and dy.dtype == x.dtype and not dy.is_neg() and not dy.is_inference():
        dx = dy
        increment_version(dy)  # autograd then refuses what still wants dY as it was
    else:
        dx = empty_like_contiguous(x)
    shape = x.shape[x.ndim - ndim :] if needs_dw else (0,)
    return dx, torch.empty(shape, dtype=dw_dtype, device=x.device)


@op("(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, int ndim) -> (Tensor, Tensor)", _y_and_rstd)
def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int
) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    rstd = empty_per_row(x, ndim)
    return _y(x, weight, eps, offset, casting_mode, ndim, rstd), rstd


def only_y(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int) -> Tensor:
    """y, bit for bit that of ``forward``. No op: where something looks, ``forward`` does."""
    return _y(x, weight, eps, offset, casting_mode, ndim, None)


def _y(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int, rstd: Tensor | None
) -> Tensor:
    y = empty_like_contiguous(x)
    if x.numel():
        rows = row_view(x, ndim)
        kernels_for(x.device).forward(
            rows,
            flat_weight(weight),
            eps,
            offset,
            casting_mode,
            y.view(-1, rows.size(-1)),
            None if rstd is None else rstd.view(-1),
        )
    return y


def backward_into(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    ndim: int,
    needs_dx: bool,
    needs_dw: bool,
    dw_dtype: torch.dtype,
    into_dy: bool,
) -> tuple[Tensor, Tensor]:
    """(dX, dW); with ``into_dy`` dX takes dY's memory where that is possible. No op: its output may alias an input."""
    dx, dw = _gradients(dy, x, ndim, needs_dx, needs_dw, dw_dtype, into_dy)
    if not x.numel():
        return dx, dw.zero_()
    if needs_dx or needs_dw:
        rows = row_view(x, ndim)
        kernels_for(x.device).backward(
            row_view(dy, ndim),
            rows,
            flat_weight(weight),
            rstd.view(-1),
            offset,
            dx.view(-1, rows.size(-1)) if needs_dx else None,
            dw.view(-1) if needs_dw else None,
        )
    return dx, dw


@op(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, int ndim, bool needs_dx, bool needs_dw, "
    "ScalarType dw_dtype) -> (Tensor, Tensor)",
    lambda dy, x, weight, rstd, offset, ndim, needs_dx, needs_dw, dw_dtype: _gradients(
        dy, x, ndim, needs_dx, needs_dw, dw_dtype
    ),
)
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    ndim: int,
    needs_dx: bool,
    needs_dw: bool,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(dX, dW), dX in memory of its own."""
    return backward_into(dy, x, weight, rstd, offset, ndim, needs_dx, needs_dw, dw_dtype, False)


@op("(Tensor x, int ndim) -> Tensor", empty_per_row)
def statistic(x: Tensor, ndim: int) -> Tensor:
    """Σ x² of each row, over the columns that x holds."""
    total = empty_per_row(x, ndim)
    if not x.numel():
        return total.zero_()
    kernels_for(x.device).statistic(row_view(x, ndim), total.view(-1))
    return total


@op(
    "(Tensor x, Tensor? weight, Tensor total, int hidden_size, float eps, float offset, str casting_mode, int ndim, "
    "ScalarType? dtype=None) -> (Tensor, Tensor)",
    lambda x, weight, total, hidden_size, eps, offset, casting_mode, ndim, dtype=None: (
        empty_like_contiguous(x, dtype),
        empty_per_row(x, ndim),
    ),
)
def apply(
    x: Tensor,
    weight: Tensor | None,
    total: Tensor,
    hidden_size: int,
    eps: float,
    offset: float,
    casting_mode: str,
    ndim: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, rstd) from ``total``, Σ x² of each row over all ``hidden_size`` columns. y has ``dtype``, x's by default."""
    y, rstd = empty_like_contiguous(x, dtype), empty_per_row(x, ndim)
    if not x.numel():
        return y, rstd.zero_()
    rows = row_view(x, ndim)
    kernels_for(x.device).apply(
        rows,
        flat_weight(weight),
        total.view(-1),
        hidden_size,
        eps,
        offset,
        casting_mode,
        y.view(-1, rows.size(-1)),
        rstd.view(-1),
    )
    return y, rstd


@op(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, int ndim) -> Tensor",
    lambda dy, x, weight, rstd, offset, ndim: empty_per_row(x, ndim),
)
def backward_statistic(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, ndim: int) -> Tensor:
    """Σ dY·(w + offset)·x̂ of each row, over the columns that x holds."""
    total = empty_per_row(x, ndim)
    if not x.numel():
        return total.zero_()
    kernels_for(x.device).backward_statistic(
        row_view(dy, ndim), row_view(x, ndim), flat_weight(weight), rstd.view(-1), offset, total.view(-1)
    )
    return total


def backward_apply_into(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor,
    hidden_size: int,
    offset: float,
    ndim: int,
    needs_dx: bool,
    needs_dw: bool,
    dw_dtype: torch.dtype,
    into_dy: bool,
) -> tuple[Tensor, Tensor]:
    """(dX, dW) from ``total``; with ``into_dy`` dX takes dY's memory where that is possible."""
    dx, dw = _gradients(dy, x, ndim, needs_dx, needs_dw, dw_dtype, into_dy)
    if not x.numel():
        return dx, dw.zero_()
    if needs_dx or needs_dw:
        rows = row_view(x, ndim)
        kernels_for(x.device).backward_apply(
            row_view(dy, ndim),
            rows,
            flat_weight(weight),
            rstd.view(-1),
            total.view(-1),
            hidden_size,
            offset,
            dx.view(-1, rows.size(-1)) if needs_dx else None,
            dw.view(-1) if needs_dw else None,
        )
    return dx, dw


@op(
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor total, int hidden_size, float offset, int ndim, "
    "bool needs_dx, bool needs_dw, ScalarType dw_dtype) -> (Tensor, Tensor)",
    lambda dy, x, weight, rstd, total, hidden_size, offset, ndim, needs_dx, needs_dw, dw_dtype: _gradients(
        dy, x, ndim, needs_dx, needs_dw, dw_dtype
    ),
)
def backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor,
    hidden_size: int,
    offset: float,
    ndim: int,
    needs_dx: bool,
    needs_dw: bool,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(dX, dW) from ``total``, Σ dY·(w + offset)·x̂ of each row over all ``hidden_size`` columns."""
    return backward_apply_into(
        dy, x, weight, rstd, total, hidden_size, offset, ndim, needs_dx, needs_dw, dw_dtype, False
    )
