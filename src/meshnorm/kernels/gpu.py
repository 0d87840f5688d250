"""The six functions on Triton kernels: settings, a grid, and a launch on x's device and its current stream.

``y`` and ``dx`` are best aligned to 16 bytes, as torch allocates them: a ``dx`` that is not takes a copy. ``settings``
overrides the ladders of ``settings.py``; benchmarks pass it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .clusters import has_clusters
from .gpu_chunks import backward_chunks, can_chunk
from .gpu_split import backward_split, can_split, forward_split, widest_split
from .launching import has_ptx, launch, scratch
from .row_views import aligned, residual_rows, row_view
from .settings import (
    ChunkSettings,
    PersistentSettings,
    RowSettings,
    SplitSettings,
    apply_settings,
    backward_apply_settings,
    backward_chunk_settings,
    backward_settings,
    backward_split_settings,
    forward_settings,
    forward_split_settings,
    held_settings,
    statistic_settings,
    sum_settings,
)
from .triton_backward import (
    backward_apply_kernel,
    backward_kernel,
    backward_statistic_kernel,
    sum_partials_kernel,
)
from .triton_forward import apply_kernel, forward_kernel, forward_wide_kernel, statistic_kernel

# Rows of whose programs all are resident at once, at the most a multiprocessor has, wait for memory and little else.
RESIDENT_WARPS = 64
# dW's partial rows take at most this share of x's bytes (they are written and read once more) ...
PARTIALS_SHARE = 0.03
# ... unless that would leave more than a quarter of the multiprocessors without a program.
MACHINE_SHARE = 0.75
# Blocks from which the backward holds rows in their own dtype (see ``backward_kernel``). At 16384 it is what makes room
# (88% of copy bandwidth, 60% without); at 8192 there is room, and converting twice costs (67% at 5120 columns, 95%
# without).
LEAN_FROM = 16384


def forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor | None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    settings: RowSettings | None = None,
) -> None:
    """y and rstd, or y alone where rstd is None; with a residual of what is then residual_out.

    With a residual no row is split over programs: one wider than 131072 columns is read twice by one.
    """
    n, dtype = x.shape[2], x.dtype if residual is None else residual.dtype
    may_split = settings is None and residual is None and can_split(x.device, dtype)
    split = forward_split_settings(n, dtype) if may_split else None
    if split is not None and n <= widest_split(split, multiprocessors(x.device)):
        stages = _stages(split, x.element_size(), _shared_memory(x.device))
        if rstd is None:
            rstd = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
        forward_split(x, weight, eps, offset, mode, y, rstd, split, multiprocessors(x.device), stages)
        return
    view, (where, how) = row_view(x), residual_rows(residual)
    tile = settings or forward_settings(n, dtype, residual is not None)
    if settings is None and view.m * tile.warps <= RESIDENT_WARPS * multiprocessors(x.device):
        tile = held_settings(n, dtype, tile)
    whole = n <= tile.block
    shape = (tile.rows, tile.block) if whole else (tile.block, tile.held, tile.sum_again and residual is not None)
    _launch(
        forward_kernel if whole else forward_wide_kernel,
        (_ceil(view.m, tile.rows) if whole else view.m,),
        tile,
        (x, weight, y, rstd, residual, residual_out, view.m, view.b, view.stride_a, view.stride_b, n, *where),
        (*how, view.unit, view.flat, view.int64, n, eps, offset, mode, *shape, has_ptx(x.device)),
    )


def statistic(
    x: Tensor,
    total: Tensor,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    settings: RowSettings | None = None,
) -> None:
    """total = Σ x² over x's columns; with a residual Σ residual_out²."""
    n = x.shape[2]
    tile = settings or statistic_settings(n, x.dtype if residual is None else residual.dtype)
    x, residual = aligned(x), None if residual is None else aligned(residual)
    view, (where, how) = row_view(x), residual_rows(residual)
    _launch(
        statistic_kernel,
        (_ceil(view.m, tile.rows),),
        tile,
        (x, total, residual, residual_out, view.m, view.b, view.stride_a, view.stride_b, *where),
        (*how, view.unit, view.flat, view.int64, n, tile.rows, tile.block, has_ptx(x.device)),
    )


def apply(
    x: Tensor,
    weight: Tensor | None,
    total: Tensor,
    hidden_size: int,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor,
    *,
    settings: RowSettings | None = None,
) -> None:
    """y and rstd, given total = Σ x² over all ``hidden_size`` columns, of which x may hold a slice."""
    n = x.shape[2]
    tile = settings or apply_settings(n, x.dtype)
    view = row_view(x)
    _launch(
        apply_kernel,
        (_ceil(view.m, tile.rows), _ceil(n, tile.block)),
        tile,
        (x, weight, total, y, rstd, view.m, view.b, view.stride_a, view.stride_b, hidden_size),
        (view.unit, view.flat, view.int64, n, eps, offset, mode, tile.rows, tile.block, has_ptx(x.device)),
    )


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
    tile = settings or backward_settings(n, x.dtype)
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
    _launch(
        backward_statistic_kernel,
        (_ceil(xv.m, tile.rows),),
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
    tiles, chunks = _ceil(xv.m, tile.rows), _ceil(n, tile.block)
    allowed = _allowed_partials(x, rstd) if dw is not None else None
    programs = program_count(tiles, chunks, tile.per_sm, multiprocessors(x.device), allowed)
    partial = dw
    if dw is not None and programs > 1:
        partial = scratch((programs, n), rstd.dtype, x.device)
    ptx = has_ptx(x.device)
    lean = (tile.block >= LEAN_FROM and ptx, ptx) if kernel is backward_kernel else ()
    stages = _stages(tile, _loaded(x, dy, passed[0]), _shared_memory(x.device))
    _launch(
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
    allowed = _allowed_partials(x, rstd) if dw is not None else None
    rows = x.shape[0] * x.shape[1]
    stage = tile.chunk * tile.chunks * _loaded(x, dy, passed[0])
    done, partial = backward_chunks(
        *(dy, x, weight, rstd, offset, own, dw is not None, passed, tile),
        _fitting_stages(tile.stages, tile.per_sm, stage, _shared_memory(x.device)),
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
    stages = _stages(tile, x.element_size() + dy.element_size(), _shared_memory(x.device))
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
        (_ceil(n, tile.block),),
        (partial, dw, programs),
        (n, tile.rows, tile.block, bool(dependent)),
        num_warps=tile.warps,
        **dependent,
    )


def _allowed_partials(x: Tensor, rstd: Tensor) -> int:
    """How many partial rows of dW may be written."""
    return int(PARTIALS_SHARE * x.shape[0] * x.shape[1] * x.element_size() / rstd.element_size())


def program_count(tiles: int, chunks: int, per_sm: int, sms: int, allowed: int | None) -> int:
    """Programs that share the row tiles of each chunk of columns: enough to fill the device, no more than there are
    tiles, and no more than the ``allowed`` partial rows of dW (None: there are none) if these fill most of it."""
    full = _ceil(sms, chunks)
    programs = full * per_sm
    if allowed is not None:
        programs = min(programs, allowed if allowed >= MACHINE_SHARE * full else full)
    return max(1, min(programs, tiles))


def _loaded(*tensors: Tensor | None) -> int:
    """Bytes that are loaded of them for each element of a row."""
    return sum(tensor.element_size() for tensor in tensors if tensor is not None)


def _stages(tile: PersistentSettings, element_bytes: int, shared_memory: int) -> int:
    """As many stages as the tile asks for and shared memory holds (what is loaded in each stage but one lies there)."""
    return _fitting_stages(tile.stages, tile.per_sm, tile.rows * tile.block * element_bytes, shared_memory)


def _fitting_stages(stages: int, per_sm: int, stage_bytes: int, shared_memory: int) -> int:
    return max(1, min(stages, 1 + (shared_memory - 8192) // per_sm // stage_bytes))


def _launch(
    kernel: Any, grid: tuple[int, ...], tile: RowSettings | PersistentSettings, arguments: tuple, constants: tuple
) -> None:
    if torch.version.hip:
        # A wavefront is twice as wide as a warp, and a program has 1024 threads at most.
        launch(kernel, grid, arguments, constants, num_warps=min(tile.warps, 16))
    elif isinstance(tile, RowSettings) and tile.registers is not None:
        launch(kernel, grid, arguments, constants, num_warps=tile.warps, maxnreg=tile.registers)
    else:
        launch(kernel, grid, arguments, constants, num_warps=tile.warps)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """A few where there is no GPU: Triton's interpreter then goes through the same loops."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 228 * 1024
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) or 48 * 1024


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
