"""The kernels of a gated norm, as ``ops`` has those of the norm alone: each as a function and as an op.

x, the gate and dY are (*rows, *normalized dims) and the weight has the shape of the normalized dims, whose flattened
numbers are the columns. rstd and totals are (*rows, groups), one number a row and group, in the accumulation dtype.
Gradients are returned as (dX, dGate, dW), an empty tensor for one that is not wanted.

Where a tensor holds only parts of some groups, ``segments`` says which: four numbers for each stretch of columns that
are parts of one size of consecutive groups, (first column, column after the last, first group, columns of each group).
``groups`` then counts the groups of the whole row, and ``size`` the columns of a whole group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshnorm.formula import accumulation_dtype
from meshnorm.formula_gated import Gated
from meshnorm.kernels.gated import gated_kernels_for
from meshnorm.ops import op
from meshnorm.rows import empty_like_contiguous, flat_weight, row_view

HOW = "float eps, float offset, str casting_mode, bool norm_before_gate, str activation"


def _per_group(x: Tensor, ndim: int, groups: int) -> Tensor:
    return torch.empty((*x.shape[: x.ndim - ndim], groups), dtype=accumulation_dtype(x.dtype), device=x.device)


def _columns(x: Tensor, ndim: int) -> int:
    return x.shape[x.ndim - ndim :].numel()


def _rows(x: Tensor | None, ndim: int) -> Tensor | None:
    return None if x is None else row_view(x, ndim)


@op(
    f"(Tensor x, Tensor? gate, Tensor? weight, {HOW}, int group_size, int ndim) -> (Tensor, Tensor)",
    lambda x, gate, weight, *how: (
        empty_like_contiguous(x),
        _per_group(x, how[-1], _columns(x, how[-1]) // how[-2]),
    ),
)
def gated_forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    norm_before_gate: bool,
    activation: str,
    group_size: int,
    ndim: int,
) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    how = Gated(eps, offset, casting_mode, norm_before_gate, activation, group_size)
    rstd = _per_group(x, ndim, _columns(x, ndim) // group_size)
    return _y(x, gate, weight, how, ndim, rstd), rstd


def gated_without_rstd(x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, ndim: int) -> Tensor:
    """y, bit for bit that of ``gated_forward``. No op: where something looks, ``gated_forward`` does."""
    return _y(x, gate, weight, how, ndim, None)


def _y(x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, ndim: int, rstd: Tensor | None) -> Tensor:
    y = empty_like_contiguous(x)
    if x.numel():
        gated_kernels_for(x.device).forward(
            row_view(x, ndim),
            _rows(gate, ndim),
            flat_weight(weight),
            how,
            y.view(-1, _columns(x, ndim)),
            None if rstd is None else rstd.view(-1, rstd.size(-1)),
        )
    return y


def _gradients(
    x: Tensor, gate: Tensor | None, ndim: int, needs_dx: bool, needs_d_gate: bool, dw_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dGate, dW) to write into."""
    dx = empty_like_contiguous(x) if needs_dx else x.new_empty(0)
    d_gate = empty_like_contiguous(gate) if needs_d_gate and gate is not None else x.new_empty(0)
    return dx, d_gate, x.new_empty((0,) if dw_dtype is None else x.shape[x.ndim - ndim :], dtype=dw_dtype)


@op(
    "(Tensor dy, Tensor x, Tensor? gate, Tensor? weight, Tensor rstd, float offset, bool norm_before_gate, "
    "str activation, int group_size, int ndim, bool needs_dx, bool needs_d_gate, ScalarType? dw_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    lambda dy, x, gate, weight, rstd, offset, norm_before_gate, activation, group_size, ndim, *needs: _gradients(
        x, gate, ndim, *needs
    ),
)
def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    norm_before_gate: bool,
    activation: str,
    group_size: int,
    ndim: int,
    needs_dx: bool,
    needs_d_gate: bool,
    dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dGate, dW) in memory of their own; dW is not wanted where it has no dtype."""
    dx, d_gate, dw = _gradients(x, gate, ndim, needs_dx, needs_d_gate, dw_dtype)
    if not x.numel():
        return dx, d_gate, dw.zero_()
    columns = _columns(x, ndim)
    gated_kernels_for(x.device).backward(
        row_view(dy, ndim),
        row_view(x, ndim),
        _rows(gate, ndim),
        flat_weight(weight),
        rstd.view(-1, rstd.size(-1)),
        Gated(0.0, offset, "", norm_before_gate, activation, group_size),
        dx.view(-1, columns) if needs_dx else None,
        d_gate.view(-1, columns) if needs_d_gate else None,
        None if dw_dtype is None else dw.view(-1),
    )
    return dx, d_gate, dw


# --- of tensors that hold parts of groups ---


class Stretch:
    """What a kernel is given of one segment."""

    def __init__(self, segment: Sequence[int]) -> None:
        start, stop, group, self.size = segment
        self.columns = slice(start, stop)
        self.groups = slice(group, group + (stop - start) // self.size)

    def of(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[..., self.columns]


def _stretches(segments: Sequence[int]) -> Iterator[Stretch]:
    for at in range(0, len(segments), 4):
        yield Stretch(segments[at : at + 4])


@op(
    "(Tensor x, Tensor? gate, str activation, int[] segments, int groups, int ndim) -> Tensor",
    lambda x, gate, activation, segments, groups, ndim: _per_group(x, ndim, groups),
)
def gated_statistic(
    x: Tensor, gate: Tensor | None, activation: str, segments: Sequence[int], groups: int, ndim: int
) -> Tensor:
    """Σ v² of each row and group over the columns that x holds; with a gate v = x · act(gate)."""
    total = _per_group(x, ndim, groups).zero_()
    if not x.numel():
        return total
    rows, gates, totals = row_view(x, ndim), _rows(gate, ndim), total.view(-1, groups)
    for part in _stretches(segments):
        how = Gated(0.0, 0.0, "", False, activation, part.size)
        gated_kernels_for(x.device).statistic(part.of(rows), part.of(gates), how, totals[:, part.groups])
    return total


@op(
    f"(Tensor x, Tensor? gate, Tensor? weight, Tensor total, int size, {HOW}, int[] segments, int ndim) "
    "-> (Tensor, Tensor)",
    lambda x, gate, weight, total, *options: (empty_like_contiguous(x), torch.empty_like(total)),
)
def gated_apply(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    size: int,
    eps: float,
    offset: float,
    casting_mode: str,
    norm_before_gate: bool,
    activation: str,
    segments: Sequence[int],
    ndim: int,
) -> tuple[Tensor, Tensor]:
    """(y, rstd) from ``total``, Σ v² over all columns of each group. Of groups that x holds nothing of rstd is 0."""
    y, rstd = empty_like_contiguous(x), torch.zeros_like(total)
    if not x.numel():
        return y, rstd
    groups, weight = total.size(-1), flat_weight(weight)
    rows, gates, ys = row_view(x, ndim), _rows(gate, ndim), y.view(-1, _columns(x, ndim))
    for part in _stretches(segments):
        how = Gated(eps, offset, casting_mode, norm_before_gate, activation, part.size)
        gated_kernels_for(x.device).apply(
            part.of(rows),
            part.of(gates),
            part.of(weight),
            total.view(-1, groups)[:, part.groups],
            size,
            how,
            part.of(ys),
            rstd.view(-1, groups)[:, part.groups],
        )
    return y, rstd


@op(
    "(Tensor dy, Tensor x, Tensor? gate, Tensor? weight, Tensor rstd, float offset, bool norm_before_gate, "
    "str activation, int[] segments, int ndim) -> Tensor",
    lambda dy, x, gate, weight, rstd, *options: torch.empty_like(rstd),
)
def gated_backward_statistic(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    norm_before_gate: bool,
    activation: str,
    segments: Sequence[int],
    ndim: int,
) -> Tensor:
    """Σ E·(w + offset)·x̂ of each row and group, over the columns that x holds."""
    total = torch.zeros_like(rstd)
    if not x.numel():
        return total
    groups, weight = rstd.size(-1), flat_weight(weight)
    grads, rows, gates = row_view(dy, ndim), row_view(x, ndim), _rows(gate, ndim)
    totals, rstds = total.view(-1, groups), rstd.view(-1, groups)
    for part in _stretches(segments):
        how = Gated(0.0, offset, "", norm_before_gate, activation, part.size)
        given = part.of(grads), part.of(rows), part.of(gates), part.of(weight), rstds[:, part.groups]
        gated_kernels_for(x.device).backward_statistic(*given, how, totals[:, part.groups])
    return total


@op(
    "(Tensor dy, Tensor x, Tensor? gate, Tensor? weight, Tensor rstd, Tensor total, int size, float offset, "
    "bool norm_before_gate, str activation, int[] segments, int ndim, bool needs_dx, bool needs_d_gate, "
    "ScalarType? dw_dtype) -> (Tensor, Tensor, Tensor)",
    lambda dy, x, gate, weight, rstd, total, size, offset, norm_before_gate, activation, segments, ndim, *needs: (
        _gradients(x, gate, ndim, *needs)
    ),
)
def gated_backward_apply(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor,
    size: int,
    offset: float,
    norm_before_gate: bool,
    activation: str,
    segments: Sequence[int],
    ndim: int,
    needs_dx: bool,
    needs_d_gate: bool,
    dw_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dGate, dW) from ``total``, Σ E·(w + offset)·x̂ over all columns of each group."""
    dx, d_gate, dw = _gradients(x, gate, ndim, needs_dx, needs_d_gate, dw_dtype)
    if not x.numel():
        return dx, d_gate, dw.zero_()
    groups, columns, weight = rstd.size(-1), _columns(x, ndim), flat_weight(weight)
    grads, rows, gates = row_view(dy, ndim), row_view(x, ndim), _rows(gate, ndim)
    totals, rstds = total.view(-1, groups), rstd.view(-1, groups)
    for part in _stretches(segments):
        gated_kernels_for(x.device).backward_apply(
            part.of(grads),
            part.of(rows),
            part.of(gates),
            part.of(weight),
            rstds[:, part.groups],
            totals[:, part.groups],
            size,
            Gated(0.0, offset, "", norm_before_gate, activation, part.size),
            part.of(dx.view(-1, columns)) if needs_dx else None,
            part.of(d_gate.view(-1, columns)) if needs_d_gate else None,
            None if dw_dtype is None else part.of(dw.view(-1)),
        )
    return dx, d_gate, dw
