"""The kernels of two norms at once, of q and of k, as ``ops`` has those of one: each as a function and as an op.

q and k are (*rows, *normalized dims), each with rows, normalized dims and a weight of its own; they share dtype and
device. ``q_ndim`` and ``k_ndim`` are how many dims are normalized. rstds have the shape of the rows. Totals are packed:
a vector of one number for each row of q and then for each of k, which one collective can sum. A gradient that is not
needed comes back as an empty tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshnorm.formula import accumulation_dtype
from meshnorm.kernels.qk import qk_kernels_for
from meshnorm.ops import op
from meshnorm.rows import empty_like_contiguous, empty_per_row, flat_weight, row_view


def rows_of(x: Tensor, ndim: int) -> int:
    return math.prod(x.shape[: x.ndim - ndim])  # a Size.numel() would be a constant to torch.compile


def _rows(y: Tensor, ndim: int) -> Tensor:
    """A contiguous tensor as (M, N)."""
    return y.view(-1, y.shape[y.ndim - ndim :].numel())


def _outputs(q: Tensor, k: Tensor, q_ndim: int, k_ndim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y of q, y of k, rstd of q, rstd of k) to write into."""
    ys = empty_like_contiguous(q), empty_like_contiguous(k)
    return *ys, empty_per_row(q, q_ndim), empty_per_row(k, k_ndim)


Four = tuple[Tensor, Tensor, Tensor, Tensor]


@op(
    "(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, float eps, float offset, str casting_mode, int q_ndim, "
    "int k_ndim) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, q_weight, k_weight, eps, offset, casting_mode, q_ndim, k_ndim: _outputs(q, k, q_ndim, k_ndim),
)
def qk_forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    q_ndim: int,
    k_ndim: int,
) -> Four:
    """(y of q, y of k, rstd of q, rstd of k)."""
    outputs = _outputs(q, k, q_ndim, k_ndim)
    _forward((q, k), (q_weight, k_weight), (eps, offset, casting_mode), (q_ndim, k_ndim), outputs[:2], outputs[2:])
    return outputs


def qk_without_rstd(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    q_ndim: int,
    k_ndim: int,
) -> tuple[Tensor, Tensor]:
    """Both y, bit for bit those of ``qk_forward``. No op: where something looks, ``qk_forward`` does."""
    ys = empty_like_contiguous(q), empty_like_contiguous(k)
    _forward((q, k), (q_weight, k_weight), (eps, offset, casting_mode), (q_ndim, k_ndim), ys, (None, None))
    return ys


def _forward(
    xs: tuple[Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
    how: tuple[float, float, str],
    ndims: tuple[int, int],
    ys: tuple[Tensor, Tensor],
    rstds: tuple[Tensor | None, Tensor | None],
) -> None:
    halves = [
        (row_view(x, ndim), flat_weight(weight), _rows(y, ndim), None if rstd is None else rstd.view(-1))
        for x, weight, ndim, y, rstd in zip(xs, weights, ndims, ys, rstds, strict=True)
        if x.numel()
    ]
    if halves:
        qk_kernels_for(xs[0].device).forward(halves, *how)


def _totals(q: Tensor, k: Tensor, q_ndim: int, k_ndim: int) -> Tensor:
    count = rows_of(q, q_ndim) + rows_of(k, k_ndim)
    return torch.empty(count, dtype=accumulation_dtype(q.dtype), device=q.device)


def _split(totals: Tensor, q: Tensor, q_ndim: int) -> tuple[Tensor, Tensor]:
    count = rows_of(q, q_ndim)
    return totals[:count], totals[count:]


@op("(Tensor q, Tensor k, int q_ndim, int k_ndim) -> Tensor", _totals)
def qk_statistic(q: Tensor, k: Tensor, q_ndim: int, k_ndim: int) -> Tensor:
    """Σ q² and Σ k² of each row, over the columns held."""
    totals = _totals(q, k, q_ndim, k_ndim)
    halves = []
    for x, ndim, total in zip((q, k), (q_ndim, k_ndim), _split(totals, q, q_ndim), strict=True):
        if x.numel():
            halves.append((row_view(x, ndim), total))
        else:
            total.zero_()
    if halves:
        qk_kernels_for(q.device).statistic(halves)
    return totals


@op(
    "(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor totals, int q_size, int k_size, float eps, "
    "float offset, str casting_mode, int q_ndim, int k_ndim) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, q_weight, k_weight, totals, q_size, k_size, eps, offset, casting_mode, q_ndim, k_ndim: _outputs(
        q, k, q_ndim, k_ndim
    ),
)
def qk_apply(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    totals: Tensor,
    q_size: int,
    k_size: int,
    eps: float,
    offset: float,
    casting_mode: str,
    q_ndim: int,
    k_ndim: int,
) -> Four:
    """(y of q, y of k, rstd of q, rstd of k) from ``totals`` over all ``q_size`` and ``k_size`` columns."""
    outputs = _outputs(q, k, q_ndim, k_ndim)
    tensors = zip((q, k), (q_weight, k_weight), _split(totals, q, q_ndim), outputs[:2], outputs[2:], strict=True)
    halves = []
    for (x, weight, total, y, rstd), ndim, size in zip(tensors, (q_ndim, k_ndim), (q_size, k_size), strict=True):
        if x.numel():
            halves.append((row_view(x, ndim), flat_weight(weight), total, size, _rows(y, ndim), rstd.view(-1)))
        else:
            rstd.zero_()
    if halves:
        qk_kernels_for(q.device).apply(halves, eps, offset, casting_mode)
    return outputs


def _gradients(
    q: Tensor,
    k: Tensor,
    q_ndim: int,
    k_ndim: int,
    needs_dq: bool,
    needs_dk: bool,
    q_dw_dtype: torch.dtype | None,
    k_dw_dtype: torch.dtype | None,
) -> Four:
    """(dQ, dK, dW of q, dW of k) to write into."""
    dxs, dws = [], []
    for x, ndim, needs, dtype in ((q, q_ndim, needs_dq, q_dw_dtype), (k, k_ndim, needs_dk, k_dw_dtype)):
        dxs.append(empty_like_contiguous(x) if needs else x.new_empty(0))
        dws.append(x.new_empty((0,) if dtype is None else x.shape[x.ndim - ndim :], dtype=dtype))
    return *dxs, *dws  # type: ignore[return-value]


NEEDS = "bool needs_dq, bool needs_dk, ScalarType? q_dw_dtype, ScalarType? k_dw_dtype"


@op(
    "(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? q_rstd, "
    f"Tensor? k_rstd, float offset, int q_ndim, int k_ndim, {NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda dq_out, dk_out, q, k, q_weight, k_weight, q_rstd, k_rstd, offset, *rest: _gradients(q, k, *rest),
)
def qk_backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    offset: float,
    q_ndim: int,
    k_ndim: int,
    needs_dq: bool,
    needs_dk: bool,
    q_dw_dtype: torch.dtype | None,
    k_dw_dtype: torch.dtype | None,
) -> Four:
    """(dQ, dK, dW of q, dW of k) in memory of their own, from the gradients of both y. A tensor of whose y there is no
    gradient wants none; its rstd may be missing. A dW without a dtype is not wanted."""
    needs = needs_dq, needs_dk, q_dw_dtype, k_dw_dtype
    gradients = _gradients(q, k, q_ndim, k_ndim, *needs)
    tensors = zip((dq_out, dk_out), (q, k), (q_weight, k_weight), (q_rstd, k_rstd), strict=True)
    halves = []
    for place, (dy, x, weight, rstd) in enumerate(tensors):
        ndim = (q_ndim, k_ndim)[place]
        found = _wanted(x, ndim, gradients[place], gradients[place + 2], needs[place], needs[place + 2])
        if found is not None and dy is not None and rstd is not None:
            halves.append((row_view(dy, ndim), row_view(x, ndim), flat_weight(weight), rstd.view(-1), *found))
    if halves:
        qk_kernels_for(q.device).backward(halves, offset)
    return gradients


def _wanted(
    x: Tensor, ndim: int, dx: Tensor, dw: Tensor, needs_dx: object, needs_dw: object
) -> tuple[Tensor | None, Tensor | None] | None:
    """(dX, dW) as the kernels take them; None where there is nothing to compute."""
    if not x.numel():
        dw.zero_()
        return None
    if not needs_dx and needs_dw is None:
        return None
    return _rows(dx, ndim) if needs_dx else None, None if needs_dw is None else dw.view(-1)


@op(
    "(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor q_rstd, "
    "Tensor k_rstd, float offset, int q_ndim, int k_ndim) -> Tensor",
    lambda dq_out, dk_out, q, k, q_weight, k_weight, q_rstd, k_rstd, offset, q_ndim, k_ndim: _totals(
        q, k, q_ndim, k_ndim
    ),
)
def qk_backward_statistic(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    q_ndim: int,
    k_ndim: int,
) -> Tensor:
    """Σ dY·(w + offset)·x̂ of each row of q and of k, over the columns held."""
    totals = _totals(q, k, q_ndim, k_ndim)
    tensors = zip((dq_out, dk_out), (q, k), (q_weight, k_weight), (q_rstd, k_rstd), strict=True)
    halves = []
    for (dy, x, weight, rstd), ndim, total in zip(tensors, (q_ndim, k_ndim), _split(totals, q, q_ndim), strict=True):
        if x.numel():
            halves.append((row_view(dy, ndim), row_view(x, ndim), flat_weight(weight), rstd.view(-1), total))
        else:
            total.zero_()
    if halves:
        qk_kernels_for(q.device).backward_statistic(halves, offset)
    return totals


@op(
    "(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor q_rstd, "
    "Tensor k_rstd, Tensor totals, int q_size, int k_size, float offset, int q_ndim, int k_ndim, "
    f"{NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda dq_out, dk_out, q, k, q_weight, k_weight, q_rstd, k_rstd, totals, q_size, k_size, offset, *rest: _gradients(
        q, k, *rest
    ),
)
def qk_backward_apply(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    totals: Tensor,
    q_size: int,
    k_size: int,
    offset: float,
    q_ndim: int,
    k_ndim: int,
    needs_dq: bool,
    needs_dk: bool,
    q_dw_dtype: torch.dtype | None,
    k_dw_dtype: torch.dtype | None,
) -> Four:
    """(dQ, dK, dW of q, dW of k) from ``totals`` over all ``q_size`` and ``k_size`` columns."""
    needs = needs_dq, needs_dk, q_dw_dtype, k_dw_dtype
    gradients = _gradients(q, k, q_ndim, k_ndim, *needs)
    tensors = zip((dq_out, dk_out), (q, k), (q_weight, k_weight), (q_rstd, k_rstd), strict=True)
    halves = []
    for place, (dy, x, weight, rstd) in enumerate(tensors):
        ndim, size, total = (q_ndim, k_ndim)[place], (q_size, k_size)[place], _split(totals, q, q_ndim)[place]
        found = _wanted(x, ndim, gradients[place], gradients[place + 2], needs[place], needs[place + 2])
        if found is not None:
            given = row_view(dy, ndim), row_view(x, ndim), flat_weight(weight), rstd.view(-1), total, size
            halves.append((*given, *found))
    if halves:
        qk_kernels_for(q.device).backward_apply(halves, offset)
    return gradients
