"""Device code that forward and backward share: where rows lie, the scale, roundings."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(tile, ROWS: tl.constexpr, INT64_ROWS: tl.constexpr):
    """The ROWS row indices of a tile. In 64 bits only where M needs them: ``row_offsets`` divides by them."""
    if INT64_ROWS:
        rows = tl.full([ROWS], ROWS, tl.int64) * tile + tl.arange(0, ROWS)
    else:
        rows = tile * ROWS + tl.arange(0, ROWS)
    return rows


@triton.jit
def row_offsets(rows, B, stride_a, stride_b, UNIT: tl.constexpr, FLAT: tl.constexpr):
    """Element offset of each row of an (A, B, N) row view. Strides count UNITs of elements: where UNIT elements are 16
    bytes the compiler knows that rows start at multiples of 16 bytes, and loads 16 bytes at once."""
    if FLAT:
        offsets = rows.to(tl.int64) * stride_b
    else:
        offsets = (rows // B).to(tl.int64) * stride_a + (rows % B).to(tl.int64) * stride_b
    return offsets * UNIT


@triton.jit
def load_scale(W, cols, col_mask, OFFSET: tl.constexpr, ACC: tl.constexpr):
    """w + offset in ACC, or ones without a weight (a multiplication by one changes no bit, and is compiled away)."""
    if W is None:
        scale = tl.full(cols.shape, 1.0, ACC)
    else:
        scale = tl.load(W + cols, mask=col_mask, other=0.0).to(ACC) + OFFSET
    return scale


@triton.jit
def mean(total, hidden_size):
    """total / hidden_size, correctly rounded. (Triton's float32 division is not; its float64 division is.)"""
    if total.dtype == tl.float64:
        quotient = total / hidden_size
    else:
        quotient = tl.div_rn(total, hidden_size.to(tl.float32))
    return quotient


@triton.jit
def reciprocal_root(value):
    """1 / √value, each step correctly rounded. (``tl.rsqrt`` is approximate, and differently on each device.)"""
    if value.dtype == tl.float64:
        root = 1.0 / tl.sqrt(value)
    else:
        root = tl.div_rn(1.0, tl.sqrt_rn(value))
    return root
