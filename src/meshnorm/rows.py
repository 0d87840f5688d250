"""Tensors of any shape as rows: what the kernels take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshnorm.formula import accumulation_dtype


def row_view(x: Tensor, ndim: int) -> Tensor:
    """x as (A, B, N): rows a·B + b of N contiguous numbers, N the product of the last ``ndim`` dims.

    A view wherever two row strides describe x (slices of a fused QKV, transposed or expanded rows); a copy elsewhere.
    """
    if x.is_neg():
        x = x.resolve_neg()
    row_ndim = x.ndim - ndim
    n = x.size(-1) if ndim == 1 else math.prod(x.shape[row_ndim:])
    if x.is_contiguous():
        return x.view(1, -1, n)
    expected = 1
    for dim in range(x.ndim - 1, row_ndim - 1, -1):
        if x.size(dim) != 1 and x.stride(dim) != expected:
            return x.contiguous().view(1, -1, n)
        expected *= x.size(dim)
    groups: list[tuple[int, int]] = []  # (size, stride) of row dims that cannot be merged further, outer first
    for size, stride in zip(x.shape[:row_ndim], x.stride()[:row_ndim], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if len(groups) > 2:
        return x.contiguous().view(1, -1, n)
    (a, a_stride), (b, b_stride) = [(1, 0)] * (2 - len(groups)) + groups
    return x.as_strided((a, b, n), (a_stride, b_stride, 1))


def memory_order(x: Tensor, normalized_ndim: int) -> tuple[int, ...] | None:
    """x's dims, those of rows in the order of their strides, the largest first; None where they are in it.

    With it y gets the strides that torch's elementwise operations give it: queries that were transposed to
    (batch, heads, sequence, head_dim) stay so, and a ``view`` that reads them back works as before.
    """
    if x.is_contiguous():
        return None
    strides = x.stride()[: x.ndim - normalized_ndim]
    order = list(range(x.ndim))
    for last in range(len(strides) - 1, 0, -1):  # sorted by hand, since torch.compile sorts no symbolic sizes
        for dim in range(last):
            if strides[order[dim]] < strides[order[dim + 1]]:
                order[dim], order[dim + 1] = order[dim + 1], order[dim]
    if order == list(range(x.ndim)) or any(stride == 0 for stride in strides):
        return None
    return tuple(order)


def flat_weight(weight: Tensor | None) -> Tensor | None:
    """The weight as a contiguous vector."""
    if weight is None:
        return None
    if weight.dim() == 1 and weight.is_contiguous() and not weight.is_neg():
        return weight
    weight = weight.detach()
    return (weight.resolve_neg() if weight.is_neg() else weight).reshape(-1).contiguous()


def empty_like_contiguous(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def empty_per_row(x: Tensor, ndim: int) -> Tensor:
    """One number a row, in the accumulation dtype, with the shape of the row dims."""
    return torch.empty(x.shape[: x.ndim - ndim], dtype=accumulation_dtype(x.dtype), device=x.device)
