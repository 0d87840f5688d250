"""The kernels of the backward pass for two tensors, q and k: one launch, whose first programs are q's, the others k's,
as in ``triton_qk``.

Each tensor has the programs that it would have alone, and so the partial rows of dW, whose sum then has those bits too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_backward_tiles import backward_apply_tiles, backward_statistic_tile, backward_tiles, sum_columns

VARYING = ["q_programs", "q_m", "q_tiles", "q_hidden", "k_m", "k_tiles", "k_hidden"]
VARYING += ["q_b", "q_stride_a", "q_stride_b", "dqy_b", "dqy_stride_a", "dqy_stride_b"]
VARYING += ["k_b", "k_stride_a", "k_stride_b", "dky_b", "dky_stride_a", "dky_stride_b"]


@triton.jit(do_not_specialize=VARYING)
def qk_backward_kernel(
    DQY,
    Q,
    QW,
    QRSTD,
    DQ,
    QPARTIAL,
    DKY,
    K,
    KW,
    KRSTD,
    DK,
    KPARTIAL,
    q_programs,
    q_m,
    q_tiles,
    q_b,
    q_stride_a,
    q_stride_b,
    dqy_b,
    dqy_stride_a,
    dqy_stride_b,
    q_hidden,
    k_m,
    k_tiles,
    k_b,
    k_stride_a,
    k_stride_b,
    dky_b,
    dky_stride_a,
    dky_stride_b,
    k_hidden,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    DQY_UNIT: tl.constexpr,
    DQY_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    DKY_UNIT: tl.constexpr,
    DKY_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LEAN: tl.constexpr,
    PTX: tl.constexpr,
):
    """Whole rows: ``backward_tiles``."""
    program = tl.program_id(0)
    if program < q_programs:
        backward_tiles(
            *(program, q_programs, DQY, Q, QW, QRSTD, DQ, QPARTIAL, None, None, q_m, q_tiles),
            *(q_b, q_stride_a, q_stride_b, dqy_b, dqy_stride_a, dqy_stride_b, q_hidden),
            *(Q_UNIT, Q_FLAT, DQY_UNIT, DQY_FLAT, Q_INT64, Q_N, OFFSET, ROWS, BLOCK, STAGES, LEAN, PTX),
        )
    else:
        backward_tiles(
            *(program - q_programs, tl.num_programs(0) - q_programs),
            *(DKY, K, KW, KRSTD, DK, KPARTIAL, None, None, k_m, k_tiles),
            *(k_b, k_stride_a, k_stride_b, dky_b, dky_stride_a, dky_stride_b, k_hidden),
            *(K_UNIT, K_FLAT, DKY_UNIT, DKY_FLAT, K_INT64, K_N, OFFSET, ROWS, BLOCK, STAGES, LEAN, PTX),
        )


@triton.jit(do_not_specialize=VARYING)
def qk_backward_statistic_kernel(
    DQY,
    Q,
    QW,
    QRSTD,
    QTOTAL,
    DKY,
    K,
    KW,
    KRSTD,
    KTOTAL,
    q_programs,
    q_m,
    q_b,
    q_stride_a,
    q_stride_b,
    dqy_b,
    dqy_stride_a,
    dqy_stride_b,
    k_m,
    k_b,
    k_stride_a,
    k_stride_b,
    dky_b,
    dky_stride_a,
    dky_stride_b,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    DQY_UNIT: tl.constexpr,
    DQY_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    DKY_UNIT: tl.constexpr,
    DKY_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of rows for each program: ``backward_statistic_tile``."""
    program = tl.program_id(0)
    if program < q_programs:
        backward_statistic_tile(
            *(program, DQY, Q, QW, QRSTD, QTOTAL, q_m),
            *(q_b, q_stride_a, q_stride_b, dqy_b, dqy_stride_a, dqy_stride_b),
            *(Q_UNIT, Q_FLAT, DQY_UNIT, DQY_FLAT, Q_INT64, Q_N, OFFSET, ROWS, BLOCK),
        )
    else:
        backward_statistic_tile(
            *(program - q_programs, DKY, K, KW, KRSTD, KTOTAL, k_m),
            *(k_b, k_stride_a, k_stride_b, dky_b, dky_stride_a, dky_stride_b),
            *(K_UNIT, K_FLAT, DKY_UNIT, DKY_FLAT, K_INT64, K_N, OFFSET, ROWS, BLOCK),
        )


@triton.jit(do_not_specialize=[*VARYING, "q_each", "k_each"])
def qk_backward_apply_kernel(
    DQY,
    Q,
    QW,
    QRSTD,
    QTOTAL,
    DQ,
    QPARTIAL,
    DKY,
    K,
    KW,
    KRSTD,
    KTOTAL,
    DK,
    KPARTIAL,
    q_programs,
    q_each,
    k_each,
    q_m,
    q_tiles,
    q_b,
    q_stride_a,
    q_stride_b,
    dqy_b,
    dqy_stride_a,
    dqy_stride_b,
    q_hidden,
    k_m,
    k_tiles,
    k_b,
    k_stride_a,
    k_stride_b,
    dky_b,
    dky_stride_a,
    dky_stride_b,
    k_hidden,
    Q_UNIT: tl.constexpr,
    Q_FLAT: tl.constexpr,
    DQY_UNIT: tl.constexpr,
    DQY_FLAT: tl.constexpr,
    Q_INT64: tl.constexpr,
    Q_N: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_FLAT: tl.constexpr,
    DKY_UNIT: tl.constexpr,
    DKY_FLAT: tl.constexpr,
    K_INT64: tl.constexpr,
    K_N: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Chunks of columns, ``q_each`` or ``k_each`` programs to each of them: ``backward_apply_tiles``."""
    program = tl.program_id(0)
    if program < q_programs:
        backward_apply_tiles(
            *(program % q_each, q_each, program // q_each, DQY, Q, QW, QRSTD, QTOTAL, DQ, QPARTIAL, None, None),
            *(q_m, q_tiles, q_b, q_stride_a, q_stride_b, dqy_b, dqy_stride_a, dqy_stride_b, q_hidden),
            *(Q_UNIT, Q_FLAT, DQY_UNIT, DQY_FLAT, Q_INT64, Q_N, OFFSET, ROWS, BLOCK, STAGES),
        )
    else:
        program -= q_programs
        backward_apply_tiles(
            *(program % k_each, k_each, program // k_each, DKY, K, KW, KRSTD, KTOTAL, DK, KPARTIAL, None, None),
            *(k_m, k_tiles, k_b, k_stride_a, k_stride_b, dky_b, dky_stride_a, dky_stride_b, k_hidden),
            *(K_UNIT, K_FLAT, DKY_UNIT, DKY_FLAT, K_INT64, K_N, OFFSET, ROWS, BLOCK, STAGES),
        )


@triton.jit(do_not_specialize=["q_programs", "q_partials", "k_partials"])
def qk_sum_partials_kernel(
    QPARTIAL,
    QDW,
    KPARTIAL,
    KDW,
    q_programs,
    q_partials,
    k_partials,
    Q_N: tl.constexpr,
    K_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Columns of both dW: ``sum_columns``."""
    program = tl.program_id(0)
    if program < q_programs:
        sum_columns(program, QPARTIAL, QDW, q_partials, Q_N, ROWS, BLOCK, DEPENDENT)
    else:
        sum_columns(program - q_programs, KPARTIAL, KDW, k_partials, K_N, ROWS, BLOCK, DEPENDENT)
