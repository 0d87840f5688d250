"""What a program of the forward pass does: a tile of ROWS rows, of which BLOCK columns are in hand at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import (
    load_scale,
    load_weight,
    mean,
    reciprocal_root,
    rounded,
    row_offsets,
    scale_of,
    sum_of,
    tile_rows,
    widened,
)


@triton.jit
def forward_tile(
    tile,
    X,
    W,
    Y,
    RSTD,
    RESIDUAL,
    RESIDUAL_OUT,
    M,
    B,
    stride_a,
    stride_b,
    hidden_size,
    r_b,
    r_stride_a,
    r_stride_b,
    R_UNIT: tl.constexpr,
    R_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows of up to BLOCK columns: read once, held in registers. Without RSTD it is not stored.

    With RESIDUAL the rows of X + RESIDUAL, as RESIDUAL_OUT holds them. Without it all that concerns it is None, and
    no argument of the compiled kernel.
    """
    ACC: tl.constexpr = tl.float64 if X.dtype.element_ty == tl.float64 else tl.float32
    rows = tile_rows(tile, ROWS, INT64_ROWS)
    cols = tl.arange(0, BLOCK)
    row_mask, col_mask = rows < M, cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    offsets = row_offsets(rows, B, stride_a, stride_b, UNIT, FLAT)
    x = tl.load(X + offsets[:, None] + cols[None, :], mask=mask, other=0.0)
    if RESIDUAL is not None:
        r_offsets = row_offsets(rows, r_b, r_stride_a, r_stride_b, R_UNIT, R_FLAT)
        r = tl.load(RESIDUAL + r_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
        x = sum_of(x, r, ACC, PTX)
        tl.store(RESIDUAL_OUT + rows.to(tl.int64)[:, None] * N + cols[None, :], x, mask=mask)
    x = widened(x, ACC, PTX)
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)
    rstd = reciprocal_root(mean(tl.sum(x * x, axis=1), hidden_size) + EPS)
    if RSTD is not None:
        tl.store(RSTD + rows, rstd, mask=row_mask)
    y = normalized(x, rstd[:, None], scale[None, :], MODE, Y.dtype.element_ty, PTX)
    tl.store(Y + rows.to(tl.int64)[:, None] * N + cols[None, :], y, mask=mask)


@triton.jit
def forward_row(
    program,
    X,
    W,
    Y,
    RSTD,
    RESIDUAL,
    RESIDUAL_OUT,
    M,
    B,
    stride_a,
    stride_b,
    hidden_size,
    r_b,
    r_stride_a,
    r_stride_b,
    R_UNIT: tl.constexpr,
    R_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    SUM_AGAIN: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows of any width in chunks of BLOCK columns. The first HELD chunks are read once and held in registers, the
    others are read twice: the second time from a cache, which is asked to keep them until then.

    A row of up to 4 chunks, all of them held, is one that waits for memory once: its weight is loaded before the
    reduction. It is summed in the same order as one of which no chunk is held.

    With RESIDUAL as ``forward_tile``; what is read twice is then x and the residual, and added again, or with
    SUM_AGAIN their sum where it was stored: half as much, but from no nearer than the L2 cache.
    """
    ACC: tl.constexpr = tl.float64 if X.dtype.element_ty == tl.float64 else tl.float32
    row = tile_rows(program, 1, INT64_ROWS)
    x_row = X + row_offsets(row, B, stride_a, stride_b, UNIT, FLAT)
    y_row = Y + row.to(tl.int64) * N
    if RESIDUAL is None:
        r_row = None
        out_row = None
    else:
        r_row = RESIDUAL + row_offsets(row, r_b, r_stride_a, r_stride_b, R_UNIT, R_FLAT)
        out_row = RESIDUAL_OUT + row.to(tl.int64) * N
    held = [
        load_chunk(x_row, r_row, out_row, k * BLOCK, N, BLOCK, ACC, PTX, "evict_first") for k in (0, 1, 2, 3)[:HELD]
    ]
    # Triton 3.6 makes no list of Nones.
    AHEAD: tl.constexpr = (N + BLOCK - 1) // BLOCK if W is not None and HELD * BLOCK >= N else 0
    weights = [load_chunk_weight(W, k * BLOCK, N, BLOCK) for k in (0, 1, 2, 3)[:AHEAD]]
    squares = tl.zeros([BLOCK], ACC)
    for start in tl.range(HELD * BLOCK, N, BLOCK):
        keep: tl.constexpr = "evict_first" if SUM_AGAIN else "evict_last"
        x = widened(load_chunk(x_row, r_row, out_row, start, N, BLOCK, ACC, PTX, keep), ACC, PTX)
        squares = tl.fma(x, x, squares)
    for k in tl.static_range(HELD):
        x_held = widened(held[k], ACC, PTX, PTX)
        squares = tl.fma(x_held, x_held, squares)
    rstd = reciprocal_root(mean(tl.sum(squares, axis=0), hidden_size) + EPS)
    if RSTD is not None:
        tl.store(RSTD + row, tl.zeros([1], ACC) + rstd)
    for k in tl.static_range(HELD):
        weight = weights[k] if AHEAD > 0 else load_chunk_weight(W, k * BLOCK, N, BLOCK)
        store_normalized(y_row, widened(held[k], ACC, PTX, PTX), rstd, weight, k * BLOCK, N, OFFSET, MODE, BLOCK, PTX)
    if SUM_AGAIN:
        tl.debug_barrier()  # another thread may have stored it
        x_row = out_row
        r_row = None
    for start in tl.range(HELD * BLOCK, N, BLOCK):
        again = widened(load_chunk(x_row, r_row, None, start, N, BLOCK, ACC, PTX, "evict_first"), ACC, PTX)
        # No name of its own: Triton 3.6 would carry it through the loop, and cannot where it is None.
        store_normalized(
            y_row,
            again,
            rstd,
            load_chunk_weight(W, start, N, BLOCK),
            start,
            N,
            OFFSET,
            MODE,
            BLOCK,
            PTX,
        )


@triton.jit
def statistic_tile(
    tile,
    X,
    TOTAL,
    RESIDUAL,
    RESIDUAL_OUT,
    M,
    B,
    stride_a,
    stride_b,
    r_b,
    r_stride_a,
    r_stride_b,
    R_UNIT: tl.constexpr,
    R_FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Σ x² of each row: chunks of BLOCK columns are added elementwise, in order, then along the row. With RESIDUAL that
    of x + residual, which is stored."""
    ACC: tl.constexpr = TOTAL.dtype.element_ty
    rows = tile_rows(tile, ROWS, INT64_ROWS)
    row_mask = rows < M
    x_rows = X + row_offsets(rows, B, stride_a, stride_b, UNIT, FLAT)[:, None]
    squares = tl.zeros([ROWS, BLOCK], ACC)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (cols < N)[None, :]
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0)
        if RESIDUAL is not None:
            r_rows = RESIDUAL + row_offsets(rows, r_b, r_stride_a, r_stride_b, R_UNIT, R_FLAT)[:, None]
            x = sum_of(x, tl.load(r_rows + cols[None, :], mask=mask, other=0.0), ACC, PTX)
            tl.store(RESIDUAL_OUT + rows.to(tl.int64)[:, None] * N + cols[None, :], x, mask=mask)
        x = widened(x, ACC, PTX)
        squares = tl.fma(x, x, squares)
    tl.store(TOTAL + rows, tl.sum(squares, axis=1), mask=row_mask)


@triton.jit
def apply_tile(
    tile,
    chunk,
    X,
    W,
    TOTAL,
    Y,
    RSTD,
    M,
    B,
    stride_a,
    stride_b,
    hidden_size,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """y of one tile of rows and one chunk of columns, given each row's Σ x²."""
    ACC: tl.constexpr = RSTD.dtype.element_ty
    rows = tile_rows(tile, ROWS, INT64_ROWS)
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    row_mask, col_mask = rows < M, cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    total = tl.load(TOTAL + rows, mask=row_mask, other=1.0)
    offsets = row_offsets(rows, B, stride_a, stride_b, UNIT, FLAT)
    x = tl.load(X + offsets[:, None] + cols[None, :], mask=mask, other=0.0)
    x = widened(x, ACC, PTX)
    scale = load_scale(W, cols, col_mask, OFFSET, ACC)
    rstd = reciprocal_root(mean(total, hidden_size) + EPS)
    if chunk == 0:
        tl.store(RSTD + rows, rstd, mask=row_mask)
    y = normalized(x, rstd[:, None], scale[None, :], MODE, Y.dtype.element_ty, PTX)
    tl.store(Y + rows.to(tl.int64)[:, None] * N + cols[None, :], y, mask=mask)


@triton.jit
def normalized(x, rstd, scale, MODE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """y = x̂ · scale, rounded to DTYPE where the casting mode says (see ``formula``)."""
    x_hat = x * rstd
    if MODE != "gemma":
        x_hat = rounded(x_hat, DTYPE, PTX)
    if MODE == "none":
        scale = rounded(scale, DTYPE, PTX)
    return (x_hat * scale).to(DTYPE)


@triton.jit
def load_chunk(
    x_row,
    r_row,
    out_row,
    start,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    PTX: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The columns of a row from ``start`` on; with ``r_row`` those of the sum, which are stored unless ``out_row`` is
    None."""
    cols = start + tl.arange(0, BLOCK)
    x = tl.load(x_row + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION)
    if r_row is not None:
        x = sum_of(x, tl.load(r_row + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION), ACC, PTX)
        if out_row is not None:
            tl.store(out_row + cols, x, mask=cols < N)
    return x


@triton.jit
def load_chunk_weight(W, start, N: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the columns from ``start`` on, in its own dtype; None where there is none."""
    cols = start + tl.arange(0, BLOCK)
    return load_weight(W, cols, cols < N)


@triton.jit
def store_normalized(
    y_row,
    x,
    rstd,
    weight,
    start,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """The columns of y from ``start`` on."""
    cols = start + tl.arange(0, BLOCK)
    scale = scale_of(weight, OFFSET, x.dtype, PTX, False)
    y = normalized(x, rstd, scale, MODE, y_row.dtype.element_ty, PTX)
    tl.store(y_row + cols, y, mask=cols < N, eviction_policy="evict_first")
