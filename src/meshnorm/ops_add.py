"""The kernels of a norm behind an addition, as ``ops`` has those of the norm alone.

``residual_out`` is x + residual in the residual's dtype; it stands for x wherever ``ops`` says x. y and the gradient of
x have x's dtype. Gradients are returned as (dX, dResidual, dW): dX in the first dtype that is asked for, which serves x
and the residual where they have the same one; dResidual in the second, an empty tensor where none is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshnorm.kernels import kernels_for
from meshnorm.ops import op
from meshnorm.rows import empty_like_contiguous, empty_per_row, flat_weight, row_view


def _outputs(x: Tensor, residual: Tensor, weight: Tensor | None, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    ndim: int = args[-1]  # type: ignore[assignment]
    return empty_like_contiguous(x), empty_like_contiguous(residual), empty_per_row(x, ndim)


@op(
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting_mode, int ndim) "
    "-> (Tensor, Tensor, Tensor)",
    _outputs,
)
def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, residual_out, rstd)."""
    rstd = empty_per_row(x, ndim)
    return *_y_and_residual_out(x, residual, weight, eps, offset, casting_mode, ndim, rstd), rstd


def add_without_rstd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int
) -> tuple[Tensor, Tensor]:
    """(y, residual_out), bit for bit those of ``add_forward``. No op: where something looks, ``add_forward`` does."""
    return _y_and_residual_out(x, residual, weight, eps, offset, casting_mode, ndim, None)


def _y_and_residual_out(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    ndim: int,
    rstd: Tensor | None,
) -> tuple[Tensor, Tensor]:
    y, residual_out = empty_like_contiguous(x), empty_like_contiguous(residual)
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
            row_view(residual, ndim),
            residual_out.view(-1, rows.size(-1)),
        )
    return y, residual_out


@op(
    "(Tensor x, Tensor residual, int ndim) -> (Tensor, Tensor)",
    lambda x, residual, ndim: (empty_like_contiguous(residual), empty_per_row(x, ndim)),
)
def add_statistic(x: Tensor, residual: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
    """(residual_out, Σ residual_out² of each row over the columns held)."""
    residual_out, total = empty_like_contiguous(residual), empty_per_row(x, ndim)
    if not x.numel():
        return residual_out, total.zero_()
    rows = row_view(x, ndim)
    kernels_for(x.device).statistic(
        rows, total.view(-1), row_view(residual, ndim), residual_out.view(-1, rows.size(-1))
    )
    return residual_out, total


def _gradients(
    residual_out: Tensor,
    ndim: int,
    dx_dtype: torch.dtype | None,
    d_residual_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dResidual, dW) to write into, empty tensors for those without a dtype."""
    nothing, shape = (0,), residual_out.shape
    dx = residual_out.new_empty(nothing if dx_dtype is None else shape, dtype=dx_dtype)
    d_residual = residual_out.new_empty(nothing if d_residual_dtype is None else shape, dtype=d_residual_dtype)
    dw_shape = nothing if dw_dtype is None else shape[len(shape) - ndim :]
    return dx, d_residual, residual_out.new_empty(dw_shape, dtype=dw_dtype)


def _fake_gradients(dy: Tensor, residual_out: Tensor, weight: Tensor | None, rstd: Tensor, *args: object) -> object:
    ndim, *dtypes = args[-4:]
    return _gradients(residual_out, ndim, *dtypes)  # type: ignore[arg-type]


@op(
    "(Tensor dy, Tensor residual_out, Tensor? weight, Tensor rstd, Tensor? d_residual_out, float offset, int ndim, "
    "ScalarType? dx_dtype, ScalarType? d_residual_dtype, ScalarType? dw_dtype) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def add_backward(
    dy: Tensor,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    offset: float,
    ndim: int,
    dx_dtype: torch.dtype | None,
    d_residual_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dResidual, dW), in memory of their own. A gradient without a dtype is not wanted."""
    dx, d_residual, dw = _gradients(residual_out, ndim, dx_dtype, d_residual_dtype, dw_dtype)
    if not residual_out.numel():
        return dx, d_residual, dw.zero_()
    rows = row_view(residual_out, ndim)
    kernels_for(residual_out.device).backward(
        row_view(dy, ndim),
        rows,
        flat_weight(weight),
        rstd.view(-1),
        offset,
        None if dx_dtype is None else dx.view(-1, rows.size(-1)),
        None if dw_dtype is None else dw.view(-1),
        _contiguous(d_residual_out, rows) if dx_dtype is not None else None,
        None if d_residual_dtype is None else d_residual.view(-1, rows.size(-1)),
    )
    return dx, d_residual, dw


@op(
    "(Tensor dy, Tensor residual_out, Tensor? weight, Tensor rstd, Tensor? d_residual_out, Tensor total, "
    "int hidden_size, float offset, int ndim, ScalarType? dx_dtype, ScalarType? d_residual_dtype, "
    "ScalarType? dw_dtype) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def add_backward_apply(
    dy: Tensor,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    d_residual_out: Tensor | None,
    total: Tensor,
    hidden_size: int,
    offset: float,
    ndim: int,
    dx_dtype: torch.dtype | None,
    d_residual_dtype: torch.dtype | None,
    dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dResidual, dW) from ``total``, Σ dY·(w + offset)·x̂ of each row over all ``hidden_size`` columns."""
    dx, d_residual, dw = _gradients(residual_out, ndim, dx_dtype, d_residual_dtype, dw_dtype)
    if not residual_out.numel():
        return dx, d_residual, dw.zero_()
    rows = row_view(residual_out, ndim)
    kernels_for(residual_out.device).backward_apply(
        row_view(dy, ndim),
        rows,
        flat_weight(weight),
        rstd.view(-1),
        total.view(-1),
        hidden_size,
        offset,
        None if dx_dtype is None else dx.view(-1, rows.size(-1)),
        None if dw_dtype is None else dw.view(-1),
        _contiguous(d_residual_out, rows) if dx_dtype is not None else None,
        None if d_residual_dtype is None else d_residual.view(-1, rows.size(-1)),
    )
    return dx, d_residual, dw


def _contiguous(d_residual_out: Tensor | None, rows: Tensor) -> Tensor | None:
    """As the kernels take it: the gradient that reaches a block's residual is one that a kernel wrote, so that a copy
    is rare."""
    if d_residual_out is None:
        return None
    return d_residual_out.resolve_neg().contiguous().view(-1, rows.size(-1))
