"""The kernels of the backward pass: dX and dW of a row from one reading of dY and x, by ``triton_backward_tiles``.

Programs are persistent: program p of P works through the row tiles p, p + P, p + 2P, …, keeps its share of dW in
registers, and writes it once, as row p of PARTIAL. ``sum_partials_kernel`` adds these P rows in order. There are no
atomics, so dW has the same bits each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_backward_tiles import backward_apply_tiles, backward_statistic_tile, backward_tiles, sum_columns

VARYING = ["M", "tiles", "x_b", "x_stride_a", "x_stride_b", "dy_b", "dy_stride_a", "dy_stride_b", "hidden_size"]


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
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
    """Whole rows: ``backward_tiles``."""
    backward_tiles(
        tl.program_id(0),
        tl.num_programs(0),
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
        X_UNIT,
        X_FLAT,
        DY_UNIT,
        DY_FLAT,
        INT64_ROWS,
        N,
        OFFSET,
        ROWS,
        BLOCK,
        STAGES,
        LEAN,
        PTX,
    )


@triton.jit(do_not_specialize=VARYING)
def backward_statistic_kernel(
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
    """A tile of rows for each program: ``backward_statistic_tile``."""
    backward_statistic_tile(
        tl.program_id(0),
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
        X_UNIT,
        X_FLAT,
        DY_UNIT,
        DY_FLAT,
        INT64_ROWS,
        N,
        OFFSET,
        ROWS,
        BLOCK,
    )


@triton.jit(do_not_specialize=VARYING)
def backward_apply_kernel(
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
    """Chunks of columns: ``backward_apply_tiles``."""
    backward_apply_tiles(
        tl.program_id(0),
        tl.num_programs(0),
        tl.program_id(1),
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
        X_UNIT,
        X_FLAT,
        DY_UNIT,
        DY_FLAT,
        INT64_ROWS,
        N,
        OFFSET,
        ROWS,
        BLOCK,
        STAGES,
    )


@triton.jit(do_not_specialize=["P"])
def sum_partials_kernel(
    PARTIAL,
    DW,
    P,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Columns of dW: ``sum_columns``."""
    sum_columns(
        tl.program_id(0),
        PARTIAL,
        DW,
        P,
        N,
        ROWS,
        BLOCK,
        DEPENDENT,
    )
