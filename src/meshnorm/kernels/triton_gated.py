"""Device code of the gated norm. A program owns a tile of rows of one group: BLOCK columns of it are in hand at a time.

Groups are slices of the rows: program ``p`` works on group ``p % GROUPS``, so that programs that run side by side read
whole rows. All rows, those of outputs too, lie at strides counted in UNITs, of which no tensor has more than another
(see ``gpu_gated``): a tile's layout, and with it the order of a row's sum, follows from the sizes and dtypes alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_chunks import cluster_sum, wait_for_all
from .triton_rows import (
    load_scale,
    load_weight,
    mean,
    reciprocal_root,
    rounded,
    row_offsets,
    scale_of,
    tile_rows,
    widened,
)

VARYING = ["M", "tiles", "size", "y_stride", "rstd_stride", "total_stride", "dx_stride", "d_gate_stride"]
VARYING += [f"{name}_{part}" for name in ("x", "g", "dy") for part in ("b", "stride_a", "stride_b")]


@triton.jit
def power_of_two(exponent, PTX: tl.constexpr):
    """2^exponent of float32; less than the least normal number is 0 on a GPU: what looks after that takes as long again
    as the power."""
    if PTX:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp2(exponent)
    return power


@triton.jit
def reciprocal(value, PTX: tl.constexpr):
    """1 / value for value of 1 to 2, off by one rounding: Triton's division, off by two, takes five instructions."""
    if PTX and value.dtype == tl.float32:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / value
    return inverse


@triton.jit
def sigmoid_of(g, PRECISE: tl.constexpr, PTX: tl.constexpr):
    """(σ(g), 1 − σ(g)), neither by a cancellation: with e = exp(−|g|), which does not overflow, they are 1 / (1 + e)
    and e / (1 + e), or the other way round.

    The exponential is that of a product which was rounded: off by |g| roundings. PRECISE puts the product's error back;
    16-bit results do not show it. There e is a square, whose root is a normal number wherever e is not 0.
    """
    if g.dtype == tl.float64:
        e = tl.exp(-tl.abs(g))
    elif PRECISE:
        exponent = tl.abs(g) * -1.4426950216293335
        e = tl.exp2(exponent)
        missing = tl.fma(tl.abs(g), -1.4426950216293335, -exponent)
        missing = tl.fma(tl.abs(g), -1.925963033500011e-08, missing)
        e = tl.where(exponent > -126.0, tl.fma(e, missing * 0.6931471805599453, e), e)
    else:
        root = power_of_two(tl.abs(g) * -0.7213475108146667, PTX)
        e = root * root
    larger = reciprocal(1.0 + e, PTX)
    smaller = e * larger
    return tl.where(g >= 0.0, larger, smaller), tl.where(g >= 0.0, smaller, larger)


@triton.jit
def smaller_of(g, PRECISE: tl.constexpr, PTX: tl.constexpr):
    """The smaller of σ(g) and 1 − σ(g): a number that gives both, by a subtraction, as exactly."""
    sigmoid, other = sigmoid_of(g, PRECISE, PTX)
    return tl.where(g >= 0.0, other, sigmoid)


@triton.jit
def activation_and_slope(g, smaller, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, PTX: tl.constexpr):
    """(act(g), act'(g)); with ``smaller_of(g)`` from that."""
    if smaller is None:
        sigmoid, other = sigmoid_of(g, PRECISE, PTX)
    else:
        larger = 1.0 - smaller
        sigmoid, other = tl.where(g >= 0.0, larger, smaller), tl.where(g >= 0.0, smaller, larger)
    if ACTIVATION == "silu":
        act = g * sigmoid
        slope = tl.fma(act, other, sigmoid)
    else:
        act = sigmoid
        slope = sigmoid * other
    return act, slope


@triton.jit
def activation_of(g, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, PTX: tl.constexpr):
    act, _ = activation_and_slope(g, None, ACTIVATION, PRECISE, PTX)
    return act


@triton.jit
def input_of(
    x, g, FIRST: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr
):
    """v: x, times the activation where the gate comes first."""
    v = widened(x, ACC, PTX)
    if FIRST:
        v *= activation_of(widened(g, ACC, PTX), ACTIVATION, PRECISE, PTX)
    return v


@triton.jit
def finished(
    x_hat,
    g,
    scale,
    AFTER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):
    """y of x̂, rounded where the casting mode says (see ``formula_gated``)."""
    if MODE != "gemma":
        x_hat = rounded(x_hat, DTYPE, PTX)
    if WEIGHTED:
        if MODE == "none":
            scale = rounded(scale, DTYPE, PTX)
        x_hat *= scale
    if AFTER:
        if ROUNDS_PRODUCT:
            x_hat = rounded(x_hat, DTYPE, PTX)
        act = activation_of(widened(g, x_hat.dtype, PTX), ACTIVATION, PRECISE, PTX)
        if MODE == "none":
            act = rounded(act, DTYPE, PTX)
        x_hat *= act
    return x_hat.to(DTYPE)


@triton.jit(do_not_specialize=VARYING)
def gated_forward_kernel(
    X,
    GATE,
    W,
    Y,
    RSTD,
    TOTAL,
    M,
    size,
    x_b,
    x_stride_a,
    x_stride_b,
    g_b,
    g_stride_a,
    g_stride_b,
    y_stride,
    rstd_stride,
    total_stride,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    G_UNIT: tl.constexpr,
    G_FLAT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
):
    """y of a tile of rows of one group of N columns: read once, held in registers; with TOTAL of one of CHUNKS chunks
    of its columns, given Σ v². FIRST: the gate comes before the norm. Without RSTD it is not stored."""
    ACC: tl.constexpr = tl.float64 if X.dtype.element_ty == tl.float64 else tl.float32
    group = tl.program_id(0) % GROUPS
    chunk = (tl.program_id(0) // GROUPS) % CHUNKS
    rows = tile_rows(tl.program_id(0) // (GROUPS * CHUNKS), ROWS, INT64_ROWS)
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    row_mask, col_mask = rows < M, cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    x_rows = X + (row_offsets(rows, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT) + group * N)[:, None]
    x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0)
    if GATE is None:
        g = None
    else:
        g_rows = GATE + (row_offsets(rows, g_b, g_stride_a, g_stride_b, G_UNIT, G_FLAT) + group * N)[:, None]
        g = tl.load(g_rows + cols[None, :], mask=mask, other=0.0)
    v = input_of(x, g, FIRST and GATE is not None, ACTIVATION, PRECISE, ACC, PTX)
    scale = load_scale(None if W is None else W + group * N, cols, col_mask, OFFSET, ACC)
    if TOTAL is None:
        squares = tl.sum(v * v, axis=1)
    else:
        squares = tl.load(TOTAL + rows.to(tl.int64) * total_stride + group, mask=row_mask, other=1.0)
    rstd = reciprocal_root(mean(squares, size) + EPS)
    if RSTD is not None:  # noqa: SIM102 # the outer condition is known when the kernel is compiled
        if chunk == 0:
            tl.store(RSTD + rows.to(tl.int64) * rstd_stride + group, rstd, mask=row_mask)
    y = finished(
        v * rstd[:, None],
        g,
        scale[None, :],
        not FIRST and GATE is not None,
        W is not None,
        ROUNDS_PRODUCT,
        MODE,
        ACTIVATION,
        PRECISE,
        Y.dtype.element_ty,
        PTX,
    )
    y_rows = Y + (rows.to(tl.int64) * y_stride * Y_UNIT + group * N)[:, None]
    tl.store(y_rows + cols[None, :], y, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def gated_forward_wide_kernel(
    X,
    GATE,
    W,
    Y,
    RSTD,
    M,
    size,
    x_b,
    x_stride_a,
    x_stride_b,
    g_b,
    g_stride_a,
    g_stride_b,
    y_stride,
    rstd_stride,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    G_UNIT: tl.constexpr,
    G_FLAT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    MODE: tl.constexpr,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PTX: tl.constexpr,
):
    """Groups of any width in chunks of BLOCK columns. The first HELD chunks are read once and held in registers: v in
    ACC where the gate comes first, else x in its own dtype. Of the others what the statistic needs, x and a gate before
    the norm, is read twice: the second time from a cache, which is asked to keep it until then."""
    ACC: tl.constexpr = tl.float64 if X.dtype.element_ty == tl.float64 else tl.float32
    GATED: tl.constexpr = FIRST and GATE is not None
    AFTER: tl.constexpr = not FIRST and GATE is not None
    group = tl.program_id(0) % GROUPS
    row = tile_rows(tl.program_id(0) // GROUPS, 1, INT64_ROWS)
    x_row = X + row_offsets(row, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT) + group * N
    y_row = Y + row.to(tl.int64) * y_stride * Y_UNIT + group * N
    w_row = None if W is None else W + group * N
    if GATE is None:
        g_row = None
    else:
        g_row = GATE + row_offsets(row, g_b, g_stride_a, g_stride_b, G_UNIT, G_FLAT) + group * N
    held = [
        load_input(x_row, g_row, k * BLOCK, N, BLOCK, GATED, GATED, ACTIVATION, PRECISE, ACC, PTX, "evict_first")
        for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HELD]
    ]
    squares = tl.zeros([BLOCK], ACC)
    for start in tl.range(HELD * BLOCK, N, BLOCK):
        v = load_input(x_row, g_row, start, N, BLOCK, GATED, True, ACTIVATION, PRECISE, ACC, PTX, "evict_last")
        squares = tl.fma(v, v, squares)
    for k in tl.static_range(HELD):
        v_held = held[k] if GATED else widened(held[k], ACC, PTX, PTX)
        squares = tl.fma(v_held, v_held, squares)
    rstd = reciprocal_root(mean(tl.sum(squares, axis=0), size) + EPS)
    if RSTD is not None:
        tl.store(RSTD + row.to(tl.int64) * rstd_stride + group, tl.zeros([1], ACC) + rstd)
    for k in tl.static_range(HELD):
        cols = k * BLOCK + tl.arange(0, BLOCK)
        v_again = held[k] if GATED else widened(held[k], ACC, PTX, PTX)
        g_after = None
        if AFTER:
            g_after = tl.load(g_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        y_held = finished(
            v_again * rstd,
            g_after,
            load_scale(w_row, cols, cols < N, OFFSET, ACC),
            AFTER,
            W is not None,
            ROUNDS_PRODUCT,
            MODE,
            ACTIVATION,
            PRECISE,
            Y.dtype.element_ty,
            PTX,
        )
        tl.store(y_row + cols, y_held, mask=cols < N, eviction_policy="evict_first")
    for start in tl.range(HELD * BLOCK, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = load_input(x_row, g_row, start, N, BLOCK, GATED, True, ACTIVATION, PRECISE, ACC, PTX, "evict_first")
        g = None
        if AFTER:
            g = tl.load(g_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        y = finished(
            v * rstd,
            g,
            load_scale(w_row, cols, cols < N, OFFSET, ACC),
            AFTER,
            W is not None,
            ROUNDS_PRODUCT,
            MODE,
            ACTIVATION,
            PRECISE,
            Y.dtype.element_ty,
            PTX,
        )
        tl.store(y_row + cols, y, mask=cols < N, eviction_policy="evict_first")


@triton.jit
def load_input(
    x_row,
    g_row,
    start,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    ACC: tl.constexpr,
    PTX: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The columns of x from ``start`` on; GATED: times the gate's activation; WIDE: in ACC."""
    cols = start + tl.arange(0, BLOCK)
    x = tl.load(x_row + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION)
    g = None
    if GATED:
        g = tl.load(g_row + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION)
    if WIDE:
        x = input_of(x, g, GATED, ACTIVATION, PRECISE, ACC, PTX)
    return x


@triton.jit(do_not_specialize=VARYING)
def gated_statistic_kernel(
    X,
    GATE,
    W,
    DY,
    RSTD,
    TOTAL,
    M,
    x_b,
    x_stride_a,
    x_stride_b,
    g_b,
    g_stride_a,
    g_stride_b,
    dy_b,
    dy_stride_a,
    dy_stride_b,
    rstd_stride,
    total_stride,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    G_UNIT: tl.constexpr,
    G_FLAT: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FLAT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Σ v² of each row and group; with DY Σ E·(w+offset)·x̂. Chunks of BLOCK columns are added elementwise, in order,
    then along the row."""
    ACC: tl.constexpr = TOTAL.dtype.element_ty
    group = tl.program_id(0) % GROUPS
    rows = tile_rows(tl.program_id(0) // GROUPS, ROWS, INT64_ROWS)
    row_mask = rows < M
    x_rows = X + (row_offsets(rows, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT) + group * N)[:, None]
    sums = tl.zeros([ROWS, BLOCK], ACC)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0)
        g = None
        if GATE is not None:
            g_rows = GATE + (row_offsets(rows, g_b, g_stride_a, g_stride_b, G_UNIT, G_FLAT) + group * N)[:, None]
            g = tl.load(g_rows + cols[None, :], mask=mask, other=0.0)
        v = input_of(x, g, FIRST and GATE is not None, ACTIVATION, PRECISE, ACC, PTX)
        if DY is None:
            sums = tl.fma(v, v, sums)
        else:
            rstd = tl.load(RSTD + rows.to(tl.int64) * rstd_stride + group, mask=row_mask, other=0.0)[:, None]
            dy_offsets = row_offsets(rows, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT) + group * N
            dy = tl.load(DY + dy_offsets[:, None] + cols[None, :], mask=mask, other=0.0)
            scale = load_scale(None if W is None else W + group * N, cols, col_mask, OFFSET, ACC)[None, :]
            e = widened(dy, ACC, PTX) * scale
            if not FIRST and GATE is not None:
                e *= activation_of(widened(g, ACC, PTX), ACTIVATION, PRECISE, PTX)
            sums = tl.fma(e, v * rstd, sums)
    tl.store(TOTAL + rows.to(tl.int64) * total_stride + group, tl.sum(sums, axis=1), mask=row_mask)


@triton.jit
def columns(k: tl.constexpr, first, BLOCK: tl.constexpr):
    return first + k * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def load_columns(rows, row_mask, k: tl.constexpr, first, N: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a tile of rows."""
    cols = columns(k, first, BLOCK)
    return tl.load(rows + cols[None, :], mask=row_mask[:, None] & (cols < N)[None, :], other=0.0)


@triton.jit
def store_columns(rows, value, row_mask, k: tl.constexpr, first, N: tl.constexpr, BLOCK: tl.constexpr):
    cols = columns(k, first, BLOCK)
    tl.store(rows + cols[None, :], value, mask=row_mask[:, None] & (cols < N)[None, :])


@triton.jit
def x_hat_and_e(
    x,
    g,
    smaller,
    dy,
    rstd,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    ACC: tl.constexpr,
    PTX: tl.constexpr,
    HELD: tl.constexpr,
):
    x_hat, e = widened(x, ACC, PTX, HELD), widened(dy, ACC, PTX, HELD)
    if g is not None:
        act, _ = activation_and_slope(widened(g, ACC, PTX, HELD), smaller, ACTIVATION, PRECISE, PTX)
        if FIRST:
            x_hat *= act
        else:
            e *= act
    return x_hat * rstd, e


@triton.jit
def dw_of(x_hat_and_e, dw):
    return tl.fma(x_hat_and_e[1], x_hat_and_e[0], dw)


@triton.jit(do_not_specialize=VARYING)
def gated_backward_kernel(
    DY,
    X,
    GATE,
    W,
    RSTD,
    TOTAL,
    DX,
    DGATE,
    PARTIAL,
    M,
    tiles,
    size,
    x_b,
    x_stride_a,
    x_stride_b,
    g_b,
    g_stride_a,
    g_stride_b,
    dy_b,
    dy_stride_a,
    dy_stride_b,
    rstd_stride,
    total_stride,
    dx_stride,
    d_gate_stride,
    X_UNIT: tl.constexpr,
    X_FLAT: tl.constexpr,
    G_UNIT: tl.constexpr,
    G_FLAT: tl.constexpr,
    DY_UNIT: tl.constexpr,
    DY_FLAT: tl.constexpr,
    DX_UNIT: tl.constexpr,
    DGATE_UNIT: tl.constexpr,
    INT64_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HOLDS: tl.constexpr,
    KEEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """dX, dGate and dW's partial rows of one group, from one reading of dY, x and the gate.

    Programs are persistent: of the P of each group, program p works through the row tiles p, p + P, …, keeps its share
    of dW in registers, and writes it once, as row p of PARTIAL. It has HOLDS blocks of BLOCK columns in hand, one of
    the CHUNKS parts of the group: whose sums TOTAL gives, or else the programs of its parts, a cluster, exchange.

    With more than one block tensors are held in their own dtypes through the row's reduction and what follows from them
    is computed again after it: a group's float32 numbers would take all registers. KEEPS: but for the sigmoid, which is
    the dearest. DX, DGATE and PARTIAL may be None.
    """
    ACC: tl.constexpr = RSTD.dtype.element_ty
    HELD: tl.constexpr = HOLDS > 1
    NEEDS_DV: tl.constexpr = DX is not None or (FIRST and DGATE is not None)
    EXCHANGES: tl.constexpr = NEEDS_DV and TOTAL is None and CHUNKS > 1
    first = (tl.program_id(0) % CHUNKS) * (HOLDS * BLOCK)
    group = (tl.program_id(0) // CHUNKS) % GROUPS
    program = tl.program_id(0) // (GROUPS * CHUNKS)
    programs = tl.num_programs(0) // (GROUPS * CHUNKS)
    if W is None:  # a list of what a function returns must not hold None: Triton 3.6 does not compile it
        ws = [None for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
    else:
        ws = [
            load_weight(W + group * N, columns(k, first, BLOCK), columns(k, first, BLOCK) < N)
            for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]
        ]
    dws = [tl.zeros([ROWS, BLOCK], ACC) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
    if EXCHANGES:
        wait_for_all()
    for step in tl.range(0, tl.cdiv(tiles - program, programs), num_stages=STAGES):
        rows = tile_rows(program + step * programs, ROWS, INT64_ROWS)
        row_mask = rows < M
        x_rows = X + (row_offsets(rows, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT) + group * N)[:, None]
        dy_rows = DY + (row_offsets(rows, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT) + group * N)[:, None]
        xs = [load_columns(x_rows, row_mask, k, first, N, BLOCK) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
        dys = [load_columns(dy_rows, row_mask, k, first, N, BLOCK) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
        if GATE is None:
            gs = [None for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
        else:
            g_rows = GATE + (row_offsets(rows, g_b, g_stride_a, g_stride_b, G_UNIT, G_FLAT) + group * N)[:, None]
            gs = [load_columns(g_rows, row_mask, k, first, N, BLOCK) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
        if GATE is not None and KEEPS:
            smallers = [
                smaller_of(widened(gs[k], ACC, PTX, HELD), PRECISE, PTX) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]
            ]
        else:
            smallers = [None for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
        rstd = tl.load(RSTD + rows.to(tl.int64) * rstd_stride + group, mask=row_mask, other=0.0)[:, None]
        pairs = [
            x_hat_and_e(xs[k], gs[k], smallers[k], dys[k], rstd, FIRST, ACTIVATION, PRECISE, ACC, PTX, HELD)
            for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]
        ]
        if PARTIAL is not None:
            dws = [dw_of(pairs[k], dws[k]) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:HOLDS]]
        products = tl.zeros([ROWS, BLOCK], ACC)
        if NEEDS_DV and TOTAL is None:
            for k in tl.static_range(HOLDS):
                scaled = pairs[k][1] * scale_of(ws[k], OFFSET, ACC, PTX, HELD)[None, :]
                products = tl.fma(scaled, pairs[k][0], products)
        if NEEDS_DV:
            if TOTAL is None:
                c = tl.sum(products, axis=1)
                if EXCHANGES:
                    c = cluster_sum(c, step & 1)
            else:
                c = tl.load(TOTAL + rows.to(tl.int64) * total_stride + group, mask=row_mask, other=0.0)
            c = mean(c, size)[:, None]
        for k in tl.static_range(HOLDS):
            x, dy = widened(xs[k], ACC, PTX, HELD), widened(dys[k], ACC, PTX, HELD)
            x_hat, e = x, dy
            if GATE is not None:
                act, slope = activation_and_slope(widened(gs[k], ACC, PTX, HELD), smallers[k], ACTIVATION, PRECISE, PTX)
                if FIRST:
                    x_hat *= act
                else:
                    e *= act
            x_hat *= rstd
            scale = scale_of(ws[k], OFFSET, ACC, PTX, HELD)[None, :]
            if NEEDS_DV:
                dv = tl.fma(x_hat, -c, e * scale) * rstd
            if DX is not None:
                dx = dv
                if FIRST and GATE is not None:
                    dx *= act
                dx_rows = DX + (rows.to(tl.int64) * dx_stride * DX_UNIT + group * N)[:, None]
                store_columns(dx_rows, dx.to(DX.dtype.element_ty), row_mask, k, first, N, BLOCK)
            if DGATE is not None:
                if FIRST:
                    d_gate = slope * (dv * x)
                else:
                    d_gate = slope * (dy * x_hat * scale)
                d_gate_rows = DGATE + (rows.to(tl.int64) * d_gate_stride * DGATE_UNIT + group * N)[:, None]
                store_columns(d_gate_rows, d_gate.to(DGATE.dtype.element_ty), row_mask, k, first, N, BLOCK)
    if PARTIAL is not None:
        for k in tl.static_range(HOLDS):
            cols = columns(k, first, BLOCK)
            partial = tl.sum(dws[k], axis=0).to(PARTIAL.dtype.element_ty)
            at = program.to(tl.int64) * (GROUPS * N) + group * N
            tl.store(PARTIAL + at + cols, partial, mask=cols < N)
