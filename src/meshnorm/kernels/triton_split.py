"""Device code for wide rows: a row split over PARTS programs, which exchange one number.

Programs come in groups of PARTS; group g of G takes the rows g, g + G, g + 2G, …, and part p of it the columns
from p·BLOCK on. A program keeps LOOKAHEAD rows, reduced and posted, in registers while their sums are on the way; the
rows after those are being loaded by the software pipeline (STAGES). All programs must be resident:
cooperative launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_exchange import advance, post, wait_for_sum
from .triton_forward_tiles import normalized
from .triton_rows import kept, load_scale, mean, reciprocal_root, row_offsets, tile_rows

VARYING = ["M", "capacity", "hidden_size", "x_b", "x_stride_a", "x_stride_b", "dy_b", "dy_stride_a", "dy_stride_b"]


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
    INT64_ROWS: tl.constexpr,
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
    ring = SLOTS + group * (RING * PADDED_PARTS)
    parts = tl.arange(0, PADDED_PARTS)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < N
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)
    steps = tl.cdiv(M, groups) + LOOKAHEAD
    # Each its own zeros: a name that starts as another's value is not carried through the loop (Triton 3.9).
    x1 = tl.zeros([BLOCK], X.dtype.element_ty)
    x2 = tl.zeros([BLOCK], X.dtype.element_ty)
    for step in tl.range(0, steps, num_stages=STAGES):
        before = step - LOOKAHEAD
        old_row = tile_rows(group + before * groups, 1, INT64_ROWS)
        old_mask = (before >= 0) & (old_row < M)
        slots = ring + (before & (RING - 1)) * PADDED_PARTS + parts
        slot_mask = old_mask & (parts < PARTS)

        row = tile_rows(group + step * groups, 1, INT64_ROWS)
        row_mask = row < M
        offsets = row_offsets(row, x_b, x_stride_a, x_stride_b, UNIT, FLAT)
        x = tl.load(X + offsets + cols, mask=row_mask & col_mask, other=0.0)
        values = x.to(ACC)
        share = tl.sum(values * values, axis=0)
        post(ring + (step & (RING - 1)) * PADDED_PARTS + part, share, base + step, group + step * groups < M)

        if LOOKAHEAD == 1:
            old = x1
        else:
            old = x2
        total = wait_for_sum(slots, base + before, slot_mask)
        rstd = reciprocal_root(mean(total, hidden_size) + EPS)
        y = normalized(old.to(ACC), rstd, scale, MODE, Y.dtype.element_ty, True)
        to = Y + old_row.to(tl.int64) * N + cols
        tl.store(to, y, mask=old_mask & col_mask)
        tl.store(RSTD + old_row, tl.zeros([1], ACC) + rstd, mask=old_mask & (part == 0))
        x2 = kept(x1)
        x1 = x
    advance(STATE, SLOTS, capacity, base, steps, BLOCK)


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
    INT64_ROWS: tl.constexpr,
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
    ring = SLOTS + group * (RING * PADDED_PARTS)
    parts = tl.arange(0, PADDED_PARTS)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < N
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)
    steps = tl.cdiv(M, groups) + LOOKAHEAD
    dw = tl.zeros([BLOCK], ACC)
    x1 = tl.zeros([BLOCK], X.dtype.element_ty)
    x2 = tl.zeros([BLOCK], X.dtype.element_ty)
    dy1 = tl.zeros([BLOCK], DY.dtype.element_ty)
    dy2 = tl.zeros([BLOCK], DY.dtype.element_ty)
    rstd1 = tl.zeros([1], ACC)
    rstd2 = tl.zeros([1], ACC)
    for step in tl.range(0, steps, num_stages=STAGES):
        before = step - LOOKAHEAD
        old_row = tile_rows(group + before * groups, 1, INT64_ROWS)
        old_mask = (before >= 0) & (old_row < M)
        slots = ring + (before & (RING - 1)) * PADDED_PARTS + parts
        slot_mask = old_mask & (parts < PARTS)

        row = tile_rows(group + step * groups, 1, INT64_ROWS)
        row_mask = row < M
        mask = row_mask & col_mask
        x_offsets = row_offsets(row, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT)
        dy_offsets = row_offsets(row, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT)
        x = tl.load(X + x_offsets + cols, mask=mask, other=0.0)
        dy = tl.load(DY + dy_offsets + cols, mask=mask, other=0.0)
        rstd = tl.load(RSTD + row, mask=row_mask, other=0.0)
        x_hat = x.to(ACC) * rstd
        grad = dy.to(ACC)
        share = tl.sum(grad * scale * x_hat, axis=0)
        if PARTIAL is not None:
            dw += grad * x_hat
        post(ring + (step & (RING - 1)) * PADDED_PARTS + part, share, base + step, group + step * groups < M)

        if LOOKAHEAD == 1:
            old_x, old_dy, old_rstd = x1, dy1, rstd1
        else:
            old_x, old_dy, old_rstd = x2, dy2, rstd2
        c = mean(wait_for_sum(slots, base + before, slot_mask), hidden_size)
        dx = (old_dy.to(ACC) * scale - old_x.to(ACC) * old_rstd * c) * old_rstd
        to = DX + old_row.to(tl.int64) * N + cols
        tl.store(to, dx.to(DX.dtype.element_ty), mask=old_mask & col_mask)
        x2 = kept(x1)
        x1 = x
        dy2 = kept(dy1)
        dy1 = dy
        rstd2 = kept(rstd1)
        rstd1 = rstd
    if PARTIAL is not None:
        tl.store(PARTIAL + group.to(tl.int64) * N + cols, dw, mask=col_mask)
    advance(STATE, SLOTS, capacity, base, steps, BLOCK)
