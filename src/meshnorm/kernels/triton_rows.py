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
        scale = tl.load(W + cols, mask=col_mask, other=0.0).to(ACC)
        if OFFSET != 0.0:
            scale += OFFSET
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
def scale_of(weight, OFFSET: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr, HELD: tl.constexpr):
    """w + offset in ACC, or one without a weight."""
    if weight is None:
        scale = tl.full([1], 1.0, ACC)
    else:
        scale = widened(weight, ACC, PTX, HELD)
        if OFFSET != 0.0:  # x + 0 is an instruction: it makes +0 of -0
            scale += OFFSET
    return scale


@triton.jit
def widened(x, ACC: tl.constexpr, PTX: tl.constexpr, HELD: tl.constexpr = False):
    """x in ACC. From 16-bit types two numbers at a time: Triton's own conversion first takes each register apart, and
    costs twice the instructions.

    HELD: by an operation that the compiler cannot see through. What is computed from x before a reduction and again
    after it is then computed twice rather than held in registers, where wide rows have none to spare; that includes
    what a loop does not change.
    """
    if not PTX:
        wide = x.to(ACC)
    elif x.dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.int32,
            is_pure=not HELD,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        wide = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=not HELD,
            pack=2,
        )
    elif HELD:
        wide = kept(x).to(ACC)
    else:
        wide = x.to(ACC)
    return wide


@triton.jit
def rounded(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """x rounded to DTYPE and back, two numbers at a time (Triton's conversion of single numbers runs at an eighth of
    the rate)."""
    if PTX and tl.bfloat16 == DTYPE and x.dtype == tl.float32:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,f,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
        narrow = bits.to(tl.float32, bitcast=True)
    elif PTX and tl.float16 == DTYPE and x.dtype == tl.float32:
        narrow = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 pair; cvt.rn.f16x2.f32 pair, $3, $2; mov.b32 {a, b}, pair; "
            "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        narrow = x.to(DTYPE).to(x.dtype)
    return narrow


@triton.jit
def sum_of(x, r, ACC: tl.constexpr, PTX: tl.constexpr):
    """x + r in r's dtype: how a residual stream holds what a block adds to it."""
    return (widened(x, ACC, PTX) + widened(r, ACC, PTX)).to(r.dtype)


@triton.jit
def kept(x):
    """x, by a move that the compiler cannot see through: see ``widened``. Also, a value that a loop passes on unchanged
    no longer keeps the loop from being pipelined (Triton 3.6 and 3.9)."""
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
