"""Device code of the backward pass for rows in chunks, which may be split over the programs of a thread-block cluster.

A program's WIDTH columns are CHUNKS tensors of CHUNK columns, so that a width needs not be padded to a power of two.

The PARTS programs of a cluster run at the same time on neighbouring multiprocessors and reach each other's shared
memory. So the exchange of a row's sums takes a few hundred nanoseconds, where a poll of slots in memory takes more than
a microsecond, and it needs neither memory of its own nor any promise that all programs are resident.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import mean, row_offsets, scale_of, tile_rows, widened

VARYING = ["M", "hidden_size", "x_b", "x_stride_a", "x_stride_b", "dy_b", "dy_stride_a", "dy_stride_b"]


@triton.jit
def wait_for_all():
    """Until all programs of the cluster run, and their shared memory may be written to."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def cluster_sum(value, parity):
    """The sum of the programs' values, one float32 each, in their order; the same bits in all of them.

    Each program writes its value into a box of every other's shared memory. ``parity`` alternates: a program that is
    ahead writes into the other half, and cannot be further ahead, since all meet at the barrier in between.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .shared .align 16 .b32 box[32];
        .reg .b32 mine, peer, size, rank, at, j;
        .reg .f32 other;
        .reg .pred more;
        mov.u32 size, %cluster_nctaid.x;
        mov.u32 rank, %cluster_ctarank;
        mov.u32 peer, %tid.x;
        mov.u32 mine, box;
        shl.b32 at, $2, 6;
        add.u32 mine, mine, at;
        shl.b32 at, rank, 2;
        add.u32 at, mine, at;
        setp.lt.u32 more, peer, size;
        @more mapa.shared::cluster.u32 at, at, peer;
        @more st.shared::cluster.f32 [at], $1;
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
        mov.f32 $0, 0f00000000;
        mov.u32 j, 0;
        NEXT:
        ld.shared.f32 other, [mine];
        add.rn.f32 $0, $0, other;
        add.u32 mine, mine, 4;
        add.u32 j, j, 1;
        setp.lt.u32 more, j, size;
        @more bra NEXT;
        }
        """,
        "=&f,f,r",
        [value, parity],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def columns(k: tl.constexpr, CHUNK: tl.constexpr):
    return k * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def load_chunk(start, k: tl.constexpr, CHUNK: tl.constexpr, width):
    """Chunk k of the ``width`` columns from ``start`` on."""
    cols = columns(k, CHUNK)
    return tl.load(start + cols, mask=cols < width, other=0.0)


@triton.jit
def store_chunk(start, value, k: tl.constexpr, CHUNK: tl.constexpr, width):
    cols = columns(k, CHUNK)
    tl.store(start + cols, value, mask=cols < width)


@triton.jit
def share_of(xs, dys, ws, rstd, OFFSET: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Σ dY·(w + offset)·x̂ over this program's columns."""
    products = tl.zeros([CHUNK], ACC)
    for k in tl.static_range(CHUNKS):
        scaled = widened(dys[k], ACC, True, True) * scale_of(ws[k], OFFSET, ACC, True, True)
        products = tl.fma(scaled, widened(xs[k], ACC, True, True) * rstd, products)
    return tl.sum(products, axis=0)


@triton.jit
def dw_of(x, dy, rstd, dw, ACC: tl.constexpr):
    return tl.fma(widened(dy, ACC, True, True), widened(x, ACC, True, True) * rstd, dw)


@triton.jit
def dx_of(x, dy, w, rstd, c, OFFSET: tl.constexpr, ACC: tl.constexpr):
    scaled = widened(dy, ACC, True, True) * scale_of(w, OFFSET, ACC, True, True)
    return tl.fma(widened(x, ACC, True, True) * rstd, -c, scaled) * rstd


@triton.jit(do_not_specialize=VARYING)
def backward_chunks_kernel(
    DY,
    X,
    W,
    RSTD,
    DX,
    PARTIAL,
    DRESIDUAL_OUT,
    DRESIDUAL,
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
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dX and dW's partial rows. Cluster g of G takes the rows g, g + G, g + 2G, … (A cluster is one program if PARTS
    is 1.)

    x, dY and w are held in their own dtypes and converted anew for each use. dW comes before the exchange: after dX it
    costs a tenth of the speed, between the two a third (65536 columns, H200). DRESIDUAL_OUT and DRESIDUAL as in
    ``backward_kernel``.
    """
    ACC: tl.constexpr = RSTD.dtype.element_ty
    groups = tl.num_programs(0) // PARTS
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first = part * WIDTH
    if N == PARTS * WIDTH and WIDTH == CHUNKS * CHUNK:
        width: tl.constexpr = WIDTH
    else:
        width = tl.minimum(N - first, WIDTH)
    if W is None:
        ws = [None for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
    else:
        ws = [load_chunk(W + first, k, CHUNK, width) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
    dws = [tl.zeros([CHUNK], ACC) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
    if PARTS > 1:
        wait_for_all()
    for step in tl.range(0, tl.cdiv(M - group, groups), num_stages=STAGES):
        row = tile_rows(group + step * groups, 1, INT64_ROWS)
        x_row = X + row_offsets(row, x_b, x_stride_a, x_stride_b, X_UNIT, X_FLAT) + first
        dy_row = DY + row_offsets(row, dy_b, dy_stride_a, dy_stride_b, DY_UNIT, DY_FLAT) + first
        xs = [load_chunk(x_row, k, CHUNK, width) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
        dys = [load_chunk(dy_row, k, CHUNK, width) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
        if DRESIDUAL_OUT is None:
            passed = [None for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
        else:
            passed_row = DRESIDUAL_OUT + row.to(tl.int64) * N + first
            passed = [load_chunk(passed_row, k, CHUNK, width) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
        rstd = tl.load(RSTD + row)
        if DX is not None:
            share = share_of(xs, dys, ws, rstd, OFFSET, ACC, CHUNK, CHUNKS)
        if PARTIAL is not None:
            dws = [dw_of(xs[k], dys[k], rstd, dws[k], ACC) for k in (0, 1, 2, 3, 4, 5, 6, 7)[:CHUNKS]]
        if DX is not None:
            if PARTS > 1:
                share = cluster_sum(share, step & 1)
            c = mean(share, hidden_size)
            dx_row = DX + row.to(tl.int64) * N + first
            for k in tl.static_range(CHUNKS):
                dx = dx_of(xs[k], dys[k], ws[k], rstd, c, OFFSET, ACC)
                if DRESIDUAL_OUT is not None:
                    dx += widened(passed[k], ACC, True, True)
                store_chunk(dx_row, dx.to(DX.dtype.element_ty), k, CHUNK, width)
                if DRESIDUAL is not None:
                    d_residual_row = DRESIDUAL + row.to(tl.int64) * N + first
                    store_chunk(d_residual_row, dx.to(DRESIDUAL.dtype.element_ty), k, CHUNK, width)
    if PARTIAL is not None:
        for k in tl.static_range(CHUNKS):
            store_chunk(PARTIAL + group.to(tl.int64) * N + first, dws[k], k, CHUNK, width)
