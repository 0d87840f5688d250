"""The kernels of the forward pass for two tensors, q and k: one launch, whose first programs are q's, the others k's.

A program's branch is the same for all its threads. Each does what the kernel of one tensor does (``triton_forward``),
in a tile of the same shape on as many warps, so that both have the bits of a norm alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward_tiles import apply_tile, forward_row, forward_tile, statistic_tile

# As in ``triton_forward``. q has the programs before ``q_programs``.
VARYING = ["q_programs", "q_m", "q_b", "q_stride_a", "q_stride_b", "q_hidden"]
VARYING += ["k_m", "k_b", "k_stride_a", "k_stride_b", "k_hidden"]


@triton.jit(do_not_specialize=VARYING)
def qk_forward_kernel(
    Q,
    QW,
    QY,
    QRSTD,
    K,
    KW,
    KY,
    KRSTD,
    q_programs,
    q_m,
    q_b,
    q_stride_a,
    q_stride_b,
    q_hidden,
    k_m,
    k_b,
    k_stride_a,
    k_stride_b,
    k_hidden,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """A tile of whole rows for each program: ``forward_tile``."""
    program = tl.program_id(0)
    if program < q_programs:
        forward_tile(
            *(program, Q, QW, QY, QRSTD, None, None, q_m, q_b, q_stride_a, q_stride_b, q_hidden),
            *(None, None, None, None, None),
            *(Q_UNIT, Q_FLAT, Q_INT64, Q_N, EPS, OFFSET, MODE, ROWS, BLOCK, PTX),
        )
    else:
        forward_tile(
            *(program - q_programs, K, KW, KY, KRSTD, None, None, k_m, k_b, k_stride_a, k_stride_b, k_hidden),
            *(None, None, None, None, None),
            *(K_UNIT, K_FLAT, K_INT64, K_N, EPS, OFFSET, MODE, ROWS, BLOCK, PTX),
        )


@triton.jit(do_not_specialize=VARYING)
def qk_forward_wide_kernel(
    Q,
    QW,
    QY,
    QRSTD,
    K,
    KW,
    KY,
    KRSTD,
    q_programs,
    q_m,
    q_b,
    q_stride_a,
    q_stride_b,
    q_hidden,
    k_m,
    k_b,
    k_stride_a,
    k_stride_b,
    k_hidden,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PTX: tl.constexpr,
):
    """A row for each program: ``forward_row``."""
    program = tl.program_id(0)
    if program < q_programs:
        forward_row(
            *(program, Q, QW, QY, QRSTD, None, None, q_m, q_b, q_stride_a, q_stride_b, q_hidden),
            *(None, None, None, None, None),
            *(Q_UNIT, Q_FLAT, Q_INT64, Q_N, EPS, OFFSET, MODE, BLOCK, HELD, False, PTX),
        )
    else:
        forward_row(
            *(program - q_programs, K, KW, KY, KRSTD, None, None, k_m, k_b, k_stride_a, k_stride_b, k_hidden),
            *(None, None, None, None, None),
            *(K_UNIT, K_FLAT, K_INT64, K_N, EPS, OFFSET, MODE, BLOCK, HELD, False, PTX),
        )


@triton.jit(do_not_specialize=VARYING)
def qk_statistic_kernel(
    Q,
    QTOTAL,
    K,
    KTOTAL,
    q_programs,
    q_m,
    q_b,
    q_stride_a,
    q_stride_b,
    k_m,
    k_b,
    k_stride_a,
    k_stride_b,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """A tile of rows for each program: ``statistic_tile``."""
    program = tl.program_id(0)
    if program < q_programs:
        statistic_tile(
            *(program, Q, QTOTAL, None, None, q_m, q_b, q_stride_a, q_stride_b, None, None, None, None, None),
            *(Q_UNIT, Q_FLAT, Q_INT64, Q_N, ROWS, BLOCK, PTX),
        )
    else:
        statistic_tile(
            *(program - q_programs, K, KTOTAL, None, None, k_m, k_b, k_stride_a, k_stride_b),
            *(None, None, None, None, None),
            *(K_UNIT, K_FLAT, K_INT64, K_N, ROWS, BLOCK, PTX),
        )


@triton.jit(do_not_specialize=[*VARYING, "q_tiles", "k_tiles"])
def qk_apply_kernel(
    Q,
    QW,
    QTOTAL,
    QY,
    QRSTD,
    K,
    KW,
    KTOTAL,
    KY,
    KRSTD,
    q_programs,
    q_tiles,
    k_tiles,
    q_m,
    q_b,
    q_stride_a,
    q_stride_b,
    q_hidden,
    k_m,
    k_b,
    k_stride_a,
    k_stride_b,
    k_hidden,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """A tile of rows and a chunk of columns for each program, first all tiles of the first chunk: ``apply_tile``."""
    program = tl.program_id(0)
    if program < q_programs:
        apply_tile(
            *(program % q_tiles, program // q_tiles, Q, QW, QTOTAL, QY, QRSTD),
            *(q_m, q_b, q_stride_a, q_stride_b, q_hidden),
            *(Q_UNIT, Q_FLAT, Q_INT64, Q_N, EPS, OFFSET, MODE, ROWS, BLOCK, PTX),
        )
    else:
        program -= q_programs
        apply_tile(
            *(program % k_tiles, program // k_tiles, K, KW, KTOTAL, KY, KRSTD),
            *(k_m, k_b, k_stride_a, k_stride_b, k_hidden),
            *(K_UNIT, K_FLAT, K_INT64, K_N, EPS, OFFSET, MODE, ROWS, BLOCK, PTX),
        )
