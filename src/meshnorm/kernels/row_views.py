"""How the Triton kernels see an (A, B, N) row view: strides, and what is known of their alignment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowView(NamedTuple):
    """M rows, B of them to each a. Strides count ``unit`` elements. ``flat``: row r lies at r·stride_b. ``int64``: row
    indices do not fit into 32 bits."""

    m: int
    b: int
    stride_a: int
    stride_b: int
    unit: int
    flat: bool
    int64: bool


def row_view(x: Tensor) -> RowView:
    a, b, n = x.shape
    stride_a, stride_b, _ = x.stride()
    flat = b == 1 or a == 1 or stride_a == b * stride_b
    if flat:
        stride_a, stride_b = 0, stride_a if b == 1 else stride_b
    if a * b == 1:
        stride_b = 0
    unit = vector(n, x.element_size())
    if stride_a % unit or stride_b % unit:
        unit = 1
    # A tile of rows may reach past the last one.
    return RowView(a * b, b, stride_a // unit, stride_b // unit, unit, flat, a * b > 2**31 - 2**16)


def residual_rows(residual: Tensor | None) -> tuple[tuple, tuple]:
    """(arguments, constants) that say where a residual's rows lie; Nones, which a compiled kernel has no arguments for,
    where there is none."""
    if residual is None:
        return (None,) * 3, (None,) * 2
    view = row_view(residual)
    return view[1:4], (view.unit, view.flat)


def vector(n: int, element_size: int) -> int:
    """Elements that one load may take of a contiguous row of ``n``: 16 bytes' worth, or what divides n.

    Never more, although a strided x might allow it. Triton lays a tile out over the threads by the widest access to it,
    and the layout decides in which order a row is summed. Outputs are contiguous and start at a multiple of 16 bytes;
    with this bound no input is accessed more widely than they are, and the order follows from n and the dtype alone.
    (Seen in the compiler's output of Triton 3.6 and 3.9; without it a row's last bit depends on its alignment.)
    """
    return min(n & -n, 16 // element_size)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where x's alignment would change the order of its row sums: for kernels that write no rows."""
    unit = vector(x.shape[2], x.element_size())
    if unit == 1 or (row_view(x).unit == unit and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)
