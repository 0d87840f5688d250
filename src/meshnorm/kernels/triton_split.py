"""Device code for wide rows: a row split over PARTS programs, which exchange one number.

Programs come in groups of PARTS; group g of G takes the rows g, g + G, g + 2G, …, and part p of it the columns from
p·BLOCK on. A program keeps LOOKAHEAD rows, reduced and posted, in registers while their sums are on the way; the rows
after those are being loaded by the software pipeline (STAGES). All programs must be resident: cooperative launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_exchange import advance, post, wait_for_sum
from .triton_forward import normalized
from .triton_rows import load_scale, mean, reciprocal_root, row_offsets

VARYING = ["M", "capacity", "hidden_size", "x_b", "x_stride_a", "x_stride_b", "dy_b", "dy_stride_a", "dy_stride_b"]


@triton.jit
def kept(x):
    """x, for the next iteration but one. A move that the compiler cannot see through: a loop that passes a value on
    unchanged is not pipelined (Triton 3.6 to 3.9)."""
    if x.dtype.primitive_bitwidth == 16:
        moved = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
    else:
        moved = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1)
    return moved


@triton.jit(do_not_specialize=VARYING)
def forward_split_kernel(
    X,
    W,
    Y,
    RSTD,
    STATE,
    SLOTS,
    capacity,
    hidden_size,
    M,
    x_b,
    x_stride_a,
    x_stride_b,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RING: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    ACC: tl.constexpr = RSTD.dtype.element_ty
    groups = tl.num_programs(0) // PARTS
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    base = tl.load(STATE)
    ring = SLOTS + group * RING * PADDED_PARTS
    parts = tl.arange(0, PADDED_PARTS)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < N
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)
    # Each its own zeros: a name that starts as another's value is not carried through the loop (Triton 3.6 to 3.9).
    x1 = tl.zeros([BLOCK], X.dtype.element_ty)
    x2 = tl.zeros([BLOCK], X.dtype.element_ty)
    x3 = tl.zeros([BLOCK], X.dtype.element_ty)
    for step in tl.range(0, tl.cdiv(M, groups) + LOOKAHEAD, num_stages=STAGES):
        row = group + step * groups
        there = row < M
        x = tl.load(
            X + row_offsets(row, x_b, x_stride_a, x_stride_b, UNIT, FLAT) + cols, mask=col_mask & there, other=0.0
        )
        values = x.to(ACC)
        post(ring + (step % RING) * PADDED_PARTS + part, tl.sum(values * values, axis=0), base + step, there)
        if LOOKAHEAD == 1:
            old = x1
        elif LOOKAHEAD == 2:
            old = x2
        else:
            old = x3
        before = step - LOOKAHEAD
        old_row = row - LOOKAHEAD * groups
        wanted = (before >= 0) & (old_row < M)
        slots = ring + ((before + RING) % RING) * PADDED_PARTS + parts
        total = wait_for_sum(slots, base + before, (parts < PARTS) & wanted)
        rstd = reciprocal_root(mean(total, hidden_size) + EPS)
        y = normalized(old.to(ACC), rstd, scale, MODE, Y.dtype.element_ty)
        tl.store(Y + old_row.to(tl.int64) * N + cols, y, mask=col_mask & wanted)
        tl.store(RSTD + old_row, rstd, mask=wanted & (part == 0))
        x3 = kept(x2)
        x2 = kept(x1)
        x1 = x
    advance(STATE, SLOTS, capacity, base, tl.cdiv(M, groups) + LOOKAHEAD, BLOCK)


@triton.jit(do_not_specialize=VARYING)
def backward_split_kernel(
    DY,
    X,
    W,
    RSTD,
    DX,
    PARTIAL,
    STATE,
    SLOTS,
    capacity,
    hidden_size,
    M,
    x_b,
    x_stride_a,
    x_stride_b,
    dy_b,
    dy_stride_a,
    dy_stride_b,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FLAT: tl.constexpr,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RING: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    ACC: tl.constexpr = RSTD.dtype.element_ty
    groups = tl.num_programs(0) // PARTS
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    base = tl.load(STATE)
    ring = SLOTS + group * RING * PADDED_PARTS
    parts = tl.arange(0, PADDED_PARTS)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < N
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)
    dw = tl.zeros([BLOCK], ACC)
    # Each its own zeros: a name that starts as another's value is not carried through the loop (Triton 3.6 to 3.9).
    x1 = tl.zeros([BLOCK], X.dtype.element_ty)
    x2 = tl.zeros([BLOCK], X.dtype.element_ty)
    x3 = tl.zeros([BLOCK], X.dtype.element_ty)
    dy1 = tl.zeros([BLOCK], DY.dtype.element_ty)
    dy2 = tl.zeros([BLOCK], DY.dtype.element_ty)
    dy3 = tl.zeros([BLOCK], DY.dtype.element_ty)
    rstd1 = tl.zeros([], ACC)
    rstd2 = tl.zeros([], ACC)
    rstd3 = tl.zeros([], ACC)
    for step in tl.range(0, tl.cdiv(M, groups) + LOOKAHEAD, num_stages=STAGES):
        row = group + step * groups
        there = row < M
        mask = col_mask & there
        x = tl.load(X + row_offsets(row, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT) + cols, mask=mask, other=0.0)
        dy = tl.load(
            DY + row_offsets(row, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT) + cols, mask=mask, other=0.0
        )
        rstd = tl.load(RSTD + row, mask=there, other=0.0)
        share = tl.sum(dy.to(ACC) * scale * (x.to(ACC) * rstd), axis=0)
        post(ring + (step % RING) * PADDED_PARTS + part, share, base + step, there)
        if LOOKAHEAD == 1:
            old_x, old_dy, old_rstd = x1, dy1, rstd1
        elif LOOKAHEAD == 2:
            old_x, old_dy, old_rstd = x2, dy2, rstd2
        else:
            old_x, old_dy, old_rstd = x3, dy3, rstd3
        before = step - LOOKAHEAD
        old_row = row - LOOKAHEAD * groups
        wanted = (before >= 0) & (old_row < M)
        slots = ring + ((before + RING) % RING) * PADDED_PARTS + parts
        c = mean(wait_for_sum(slots, base + before, (parts < PARTS) & wanted), hidden_size)
        x_hat = old_x.to(ACC) * old_rstd
        grad = old_dy.to(ACC)
        dx = ((grad * scale - x_hat * c) * old_rstd).to(DX.dtype.element_ty)
        tl.store(DX + old_row.to(tl.int64) * N + cols, dx, mask=col_mask & wanted)
        if PARTIAL is not None:
            dw += grad * x_hat
        x3 = kept(x2)
        x2 = kept(x1)
        x1 = x
        dy3 = kept(dy2)
        dy2 = kept(dy1)
        dy1 = dy
        rstd3 = kept(rstd2)
        rstd2 = kept(rstd1)
        rstd1 = rstd
    if PARTIAL is not None:
        tl.store(PARTIAL + group.to(tl.int64) * N + cols, dw, mask=col_mask)
    advance(STATE, SLOTS, capacity, base, tl.cdiv(M, groups) + LOOKAHEAD, BLOCK)
