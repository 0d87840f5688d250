"""The backward's functions: see ``gpu``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .clusters import has_clusters
from .gpu_chunks import backward_chunks, can_chunk
from .gpu_split import backward_split, can_split, widest_split
from .launching import has_ptx, launch, scratch
from .row_views import aligned, row_view
from .settings import (
    ChunkSettings,
    PersistentSettings,
    RowSettings,
    SplitSettings,
    backward_apply_settings,
    backward_chunk_settings,
    backward_settings,
    backward_split_settings,
    statistic_settings,
    sum_settings,
)
from .tiles import ceil_div, fitting_stages, launch_tile, multiprocessors, shared_memory_of, stages_of
from .triton_backward import (
    backward_apply_kernel,
    backward_kernel,
    backward_statistic_kernel,
    sum_partials_kernel,
)

# dW's partial rows take at most this share of x's bytes (they are written and read once more) ...
PARTIALS_SHARE = 0.03
# ... unless that would leave more than a quarter of the multiprocessors without a program.
MACHINE_SHARE = 0.75
# Blocks from which the backward holds rows in their own dtype (see ``backward_kernel``). At 16384 it is what makes room
# (88% of copy bandwidth, 60% without); at 8192 there is room, and converting twice costs (67% at 5120 columns, 95%
# without).
LEAN_FROM = 16384


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    d_residual_out: Tensor | None = None,
    d_residual: Tensor | None = None,
    *,
    settings: PersistentSettings | ChunkSettings | None = None,
) -> None:
    """dX and dW, or the one of them that is not None. One pass; for rows too wide for it the statistic, then the
    rest: beside a residual those that are else split over programs which exchange through memory."""
    n = x.shape[2]
    if dy.element_size() < x.element_size():
        dy = aligned(dy)  # dX may be written in x's dtype alone, and less widely than dY could be read
    passed = d_residual_out, d_residual
    chunks = settings or backward_chunk_settings(n, x.dtype, d_residual_out is not None)
    if (
        isinstance(chunks, ChunkSettings)
        and can_chunk(x.device, x.dtype, n, chunks)
        and _launch_chunk_gradients(dy, x, weight, rstd, offset, dx, dw, passed, chunks)
    ):
        return
    assert not isinstance(settings, ChunkSettings)
    may_split = settings is None and all(t is None for t in passed) and can_split(x.device, x.dtype)
    split = backward_split_settings(n, x.dtype) if may_split else None
    if split is not None and dx is not None and n <= widest_split(split, multiprocessors(x.device)):
        _launch_split_gradients(dy, x, weight, rstd, offset, dx, dw, split)
        return
    tile = settings or backward_settings(n, x.dtype, d_residual_out is not None)
    if tile is not None:
        _launch_gradients(backward_kernel, dy, x, weight, rstd, (), n, offset, dx, dw, passed, tile)
        return
    total = torch.empty_like(rstd)
    if dx is not None:
        backward_statistic(dy, x, weight, rstd, offset, total)
    backward_apply(dy, x, weight, rstd, total, n, offset, dx, dw, *passed)


def backward_statistic(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    total: Tensor,
    *,
    settings: RowSettings | None = None,
) -> None:
    """total = Σ dY·(w+offset)·x̂ over x's columns."""
    n = x.shape[2]
    tile = settings or statistic_settings(n, x.dtype)
    dy, x = aligned(dy), aligned(x)
    dyv, xv = row_view(dy), row_view(x)
    launch_tile(
        backward_statistic_kernel,
        (ceil_div(xv.m, tile.rows),),
        tile,
        (dy, x, weight, rstd, total, xv.m, *xv[1:4], *dyv[1:4]),
        (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset, tile.rows, tile.block),
    )


def backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor,
    hidden_size: int,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    d_residual_out: Tensor | None = None,
    d_residual: Tensor | None = None,
    *,
    settings: PersistentSettings | None = None,
) -> None:
    """dX and dW, given total = Σ dY·(w+offset)·x̂ over all ``hidden_size`` columns, of which x may hold a slice."""
    tile = settings or backward_apply_settings(x.shape[2], x.dtype)
    passed = d_residual_out, d_residual
    _launch_gradients(backward_apply_kernel, dy, x, weight, rstd, (total,), hidden_size, offset, dx, dw, passed, tile)


def _launch_gradients(
    kernel: Any,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    totals: tuple[Tensor, ...],
    hidden_size: int,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    passed: tuple[Tensor | None, Tensor | None],
    tile: PersistentSettings,
) -> None:
    """The persistent kernels: ``kernel`` writes dX and P partial rows of dW, a second kernel adds those."""
    if dx is None and dw is None:
        return
    if dx is not None and dx.data_ptr() % 16:  # dY's memory, at an odd place: see row_views.vector
        own = torch.empty_like(dx)
        _launch_gradients(kernel, dy, x, weight, rstd, totals, hidden_size, offset, own, dw, passed, tile)
        dx.copy_(own)
        return
    n = x.shape[2]
    dyv, xv = row_view(dy), row_view(x)
    tiles, chunks = ceil_div(xv.m, tile.rows), ceil_div(n, tile.block)
    allowed = allowed_partials(x, rstd) if dw is not None else None
    programs = program_count(tiles, chunks, tile.per_sm, multiprocessors(x.device), allowed)
    partial = dw
    if dw is not None and programs > 1:
        partial = scratch((programs, n), rstd.dtype, x.device)
    ptx = has_ptx(x.device)
    lean = (tile.block >= LEAN_FROM and ptx, ptx) if kernel is backward_kernel else ()
    stages = stages_of(tile, loaded_bytes(x, dy, passed[0]), shared_memory_of(x.device))
    launch_tile(
        kernel,
        (programs, chunks),
        tile,
        (dy, x, weight, rstd, *totals, dx, partial, *passed, xv.m, tiles, *xv[1:4], *dyv[1:4], hidden_size),
        (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset, tile.rows, tile.block, stages, *lean),
    )
    if dw is not None and partial is not None and partial is not dw:
        sum_partials(partial, dw)


def _launch_chunk_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    passed: tuple[Tensor | None, Tensor | None],
    tile: ChunkSettings,
) -> bool:
    """Whether it could be done: see ``backward_chunks``."""
    if dx is None and dw is None:
        return True
    own = torch.empty_like(dx) if dx is not None and dx.data_ptr() % 16 else dx  # as in _launch_gradients
    allowed = allowed_partials(x, rstd) if dw is not None else None
    rows = x.shape[0] * x.shape[1]
    stage = tile.chunk * tile.chunks * loaded_bytes(x, dy, passed[0])
    done, partial = backward_chunks(
        *(dy, x, weight, rstd, offset, own, dw is not None, passed, tile),
        fitting_stages(tile.stages, tile.per_sm, stage, shared_memory_of(x.device)),
        multiprocessors(x.device),
        lambda resident, per_sm: program_count(rows, 1, per_sm, resident, allowed),
    )
    if done and dx is not None and own is not None and own is not dx:
        dx.copy_(own)
    if dw is not None and partial is not None:
        sum_partials(partial, dw)
    return done


def _launch_split_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor,
    dw: Tensor | None,
    tile: SplitSettings,
) -> None:
    own = torch.empty_like(dx) if dx.data_ptr() % 16 else dx  # as in _launch_gradients
    stages = stages_of(tile, x.element_size() + dy.element_size(), shared_memory_of(x.device))
    partial = backward_split(dy, x, weight, rstd, offset, own, dw is not None, tile, multiprocessors(x.device), stages)
    if own is not dx:
        dx.copy_(own)
    if dw is not None and partial is not None:
        sum_partials(partial, dw)


def sum_partials(partial: Tensor, dw: Tensor, *, settings: RowSettings | None = None) -> None:
    """dW = the sum of the rows of ``partial``, in a fixed order.

    Where the GPU can, the kernel is set up while the one before it still runs, and waits for its results: 1.5 µs less.
    """
    programs, n = partial.shape
    tile = settings or sum_settings(n)
    dependent = {"launch_pdl": True} if has_clusters(partial.device) else {}
    launch(
        sum_partials_kernel,
        (ceil_div(n, tile.block),),
        (partial, dw, programs),
        (n, tile.rows, tile.block, bool(dependent)),
        num_warps=tile.warps,
        **dependent,
    )


def allowed_partials(x: Tensor, rstd: Tensor) -> int:
    """How many partial rows of dW may be written."""
    return int(PARTIALS_SHARE * x.shape[0] * x.shape[1] * x.element_size() / rstd.element_size())


def program_count(tiles: int, chunks: int, per_sm: int, sms: int, allowed: int | None) -> int:
    """Programs that share the row tiles of each chunk of columns: enough to fill the device, no more than there are
    tiles, and no more than the ``allowed`` partial rows of dW (None: there are none) if these fill most of it."""
    full = ceil_div(sms, chunks)
    programs = full * per_sm
    if allowed is not None:
        programs = min(programs, allowed if allowed >= MACHINE_SHARE * full else full)
    return max(1, min(programs, tiles))


def loaded_bytes(*tensors: Tensor | None) -> int:
    """Bytes that are loaded of them for each element of a row."""
    return sum(tensor.element_size() for tensor in tensors if tensor is not None)
