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
def load_weight(W, cols, col_mask):
    """The weight in its own dtype, or None: half the registers of ``load_scale`` where it is held through a loop."""
    if W is None:
        weight = None
    else:
        weight = tl.load(W + cols, mask=col_mask, other=0.0)
    return weight


@triton.jit
def scale_of(weight, OFFSET: tl.constexpr, ACC: tl.constexpr):
    """w + offset in ACC, or one without a weight."""
    if weight is None:
        scale = tl.full([1], 1.0, ACC)
    else:
        scale = weight.to(ACC) + OFFSET
    return scale


@triton.jit
def kept(x):
    """x, by a move that the compiler cannot see through.

    For two ends. What is computed from x before a reduction and again after it is computed twice rather than held in
    registers, where wide rows have none to spare; that includes what a loop does not change. And a value that a loop
    passes on unchanged no longer keeps the loop from being pipelined (Triton 3.6 and 3.9).
    """
    if x is None:
        moved = None
    elif x.dtype.primitive_bitwidth == 16:
        moved = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    elif x.dtype.primitive_bitwidth == 32:
        moved = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        moved = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=False, pack=1)
    return moved


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
