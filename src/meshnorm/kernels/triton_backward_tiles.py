"""What a program of the backward pass does: the row tiles ``program``, ``program + programs``, …, or one tile."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .triton_rows import load_scale, load_weight, mean, row_offsets, scale_of, tile_rows, widened


@triton.jit
def backward_tiles(
    program,
    programs,
    DY,
    X,
    W,
    RSTD,
    DX,
    PARTIAL,
    DRESIDUAL_OUT,
    DRESIDUAL,
    M,
    tiles,
    x_b,
    x_stride_a,
    x_stride_b,
    dy_b,
    dy_stride_a,
    dy_stride_b,
    hidden_size,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LEAN: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows of up to BLOCK columns.

    LEAN holds x, dY and w through the row's reduction in their own dtypes and converts them again after it, which makes
    room for rows of 16384 columns in one program.

    Where x is a residual_out, DRESIDUAL_OUT is the gradient that comes to it by other ways, added to dX, and DRESIDUAL
    takes dX once more, in its own dtype. Both are contiguous, and so is x then. Either may be None.
    """
    ACC: tl.constexpr = RSTD.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    col_mask = cols < N
    weight = load_weight(W, cols, col_mask)
    dw = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        rows = tile_rows(tile, ROWS, INT64_ROWS)
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        x_offsets = row_offsets(rows, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT)
        dy_offsets = row_offsets(rows, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT)
        x = tl.load(X + x_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
        dy = tl.load(DY + dy_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
        if DRESIDUAL_OUT is not None:
            passed = tl.load(DRESIDUAL_OUT + x_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
        rstd = tl.load(RSTD + rows, mask=row_mask, other=0.0)[:, None]
        x_hat = widened(x, ACC, PTX, LEAN) * rstd
        grad = widened(dy, ACC, PTX, LEAN)
        if LEAN and PARTIAL is not None:
            dw = tl.fma(grad, x_hat, dw)
        if DX is not None:
            scale = scale_of(weight, OFFSET, ACC, PTX, LEAN)[None, :]
            c = mean(tl.sum(grad * scale * x_hat, axis=1), hidden_size)[:, None]
            if LEAN:
                x_hat = widened(x, ACC, PTX, LEAN) * rstd
                grad = widened(dy, ACC, PTX, LEAN)
                scale = scale_of(weight, OFFSET, ACC, PTX, LEAN)[None, :]
            dx = tl.fma(x_hat, -c, grad * scale) * rstd
            if DRESIDUAL_OUT is not None:
                dx += widened(passed, ACC, PTX, LEAN)
            at = rows.to(tl.int64)[:, None] * N + cols[None, :]
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
            if DRESIDUAL is not None:
                tl.store(DRESIDUAL + at, dx.to(DRESIDUAL.dtype.element_ty), mask=mask)
        # dW after dX is faster where registers are not short: 95% instead of 86% at 5120 columns.
        if not LEAN and PARTIAL is not None:
            dw = tl.fma(grad, x_hat, dw)
    if PARTIAL is not None:
        partial = tl.sum(dw, axis=0).to(PARTIAL.dtype.element_ty)
        tl.store(PARTIAL + program.to(tl.int64) * N + cols, partial, mask=col_mask)


@triton.jit
def backward_statistic_tile(
    tile,
    DY,
    X,
    W,
    RSTD,
    TOTAL,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ dY·(w+offset)·x̂ of each row: chunks of BLOCK columns added elementwise, in order, then along the row."""
    ACC: tl.constexpr = RSTD.dtype.element_ty
    rows = tile_rows(tile, ROWS, INT64_ROWS)
    row_mask = rows < M
    x_rows = X + row_offsets(rows, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT)[:, None]
    dy_rows = DY + row_offsets(rows, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT)[:, None]
    rstd = tl.load(RSTD + rows, mask=row_mask, other=0.0)[:, None]
    products = tl.zeros([ROWS, BLOCK], ACC)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(ACC)
        dy = tl.load(dy_rows + cols[None, :], mask=mask, other=0.0).to(ACC)
        products += dy * load_scale(W, cols, col_mask, OFFSET, ACC)[None, :] * (x * rstd)
    tl.store(TOTAL + rows, tl.sum(products, axis=1), mask=row_mask)


@triton.jit
def backward_apply_tiles(
    program,
    programs,
    chunk,
    DY,
    X,
    W,
    RSTD,
    TOTAL,
    DX,
    PARTIAL,
    DRESIDUAL_OUT,
    DRESIDUAL,
    M,
    tiles,
    x_b,
    x_stride_a,
    x_stride_b,
    dy_b,
    dy_stride_a,
    dy_stride_b,
    hidden_size,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dX and dW of one chunk of BLOCK columns, given each row's Σ dY·(w+offset)·x̂. DRESIDUAL_OUT and DRESIDUAL as in
    ``backward_tiles``."""
    ACC: tl.constexpr = RSTD.dtype.element_ty
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < N
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)[None, :]
    dw = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        rows = tile_rows(tile, ROWS, INT64_ROWS)
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        x_offsets = row_offsets(rows, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT)
        dy_offsets = row_offsets(rows, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT)
        x = tl.load(X + x_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(ACC)
        dy = tl.load(DY + dy_offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(ACC)
        rstd = tl.load(RSTD + rows, mask=row_mask, other=0.0)[:, None]
        x_hat = x * rstd
        if DX is not None:
            c = mean(tl.load(TOTAL + rows, mask=row_mask, other=0.0), hidden_size)[:, None]
            dx = (dy * scale - x_hat * c) * rstd
            at = rows.to(tl.int64)[:, None] * N + cols[None, :]
            if DRESIDUAL_OUT is not None:
                dx += tl.load(DRESIDUAL_OUT + at, mask=mask, other=0.0).to(ACC)
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
            if DRESIDUAL is not None:
                tl.store(DRESIDUAL + at, dx.to(DRESIDUAL.dtype.element_ty), mask=mask)
        if PARTIAL is not None:
            dw += dy * x_hat
    if PARTIAL is not None:
        partial = tl.sum(dw, axis=0).to(PARTIAL.dtype.element_ty)
        tl.store(PARTIAL + program.to(tl.int64) * N + cols, partial, mask=col_mask)


@triton.jit
def sum_columns(
    program,
    PARTIAL,
    DW,
    P,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """dW = the sum of P partial rows: ROWS at a time, added elementwise in order, then over the ROWS.

    DEPENDENT: launched before the kernel that writes PARTIAL has ended, which is waited for here.
    """
    if DEPENDENT:
        gdc_wait()
    cols = program * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    total = tl.zeros([ROWS, BLOCK], PARTIAL.dtype.element_ty)
    for start in tl.range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(PARTIAL + offsets, mask=(rows < P)[:, None] & mask[None, :], other=0.0)
    tl.store(DW + cols, tl.sum(total, axis=0).to(DW.dtype.element_ty), mask=mask)
