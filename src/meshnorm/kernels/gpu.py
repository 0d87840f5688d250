"""The six functions on Triton kernels: choose settings, a grid, and launch on x's device and its current stream.

``settings`` overrides the ladder of ``settings.py``; only benchmarks pass it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .settings import (
    SUM_PARTIALS,
    PersistentSettings,
    RowSettings,
    apply_settings,
    backward_apply_settings,
    backward_settings,
    forward_settings,
    statistic_settings,
)
from .triton_backward import (
    backward_apply_kernel,
    backward_kernel,
    backward_statistic_kernel,
    sum_partials_kernel,
)
from .triton_forward import apply_kernel, forward_kernel, forward_wide_kernel, statistic_kernel

# Stated, because Triton releases differ in the default, and with it a result's last bit. Nothing here is bound by
# arithmetic.
NO_FUSION = {"enable_fp_fusion": False}
# dW's partial rows take at most this share of x's bytes (they are written and read once more) ...
PARTIALS_SHARE = 0.03
# ... unless that would leave more than a quarter of the multiprocessors without a program.
MACHINE_SHARE = 0.75


def forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor,
    *,
    settings: RowSettings | None = None,
) -> None:
    """y and rstd."""
    n = x.shape[2]
    tile = settings or forward_settings(n, x.dtype)
    view = _row_view(x)
    kernel = forward_kernel if n <= tile.block else forward_wide_kernel
    with _device_of(x):
        kernel[(_tiles(view.m, tile),)](
            x, weight, y, rstd, view.m, view.b, view.stride_a, view.stride_b, n, view.unit, view.flat, view.int64,
            n, eps, offset, mode, tile.rows, tile.block, num_warps=_warps(tile), **NO_FUSION,
        )  # fmt: skip


def statistic(x: Tensor, total: Tensor, *, settings: RowSettings | None = None) -> None:
    """total = Σ x² over x's columns."""
    n = x.shape[2]
    tile = settings or statistic_settings(n, x.dtype)
    view = _row_view(x)
    with _device_of(x):
        statistic_kernel[(_tiles(view.m, tile),)](
            x, total, view.m, view.b, view.stride_a, view.stride_b, view.unit, view.flat, view.int64,
            n, tile.rows, tile.block, num_warps=_warps(tile), **NO_FUSION,
        )  # fmt: skip


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
    view = _row_view(x)
    with _device_of(x):
        apply_kernel[(_tiles(view.m, tile), _chunks(n, tile))](
            x, weight, total, y, rstd, view.m, view.b, view.stride_a, view.stride_b, hidden_size,
            view.unit, view.flat, view.int64, n, eps, offset, mode, tile.rows, tile.block,
            num_warps=_warps(tile), **NO_FUSION,
        )  # fmt: skip


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    *,
    settings: PersistentSettings | None = None,
) -> None:
    """dX and dW, or the one of them that is not None. One pass, or for wide rows the statistic and then the rest."""
    n = x.shape[2]
    tile = settings or backward_settings(n, rstd.dtype)
    if tile is not None:
        _launch_gradients(backward_kernel, dy, x, weight, rstd, None, n, offset, dx, dw, tile)
        return
    total = torch.empty_like(rstd)
    if dx is not None:
        backward_statistic(dy, x, weight, rstd, offset, total)
    backward_apply(dy, x, weight, rstd, total, n, offset, dx, dw)


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
    tile = settings or statistic_settings(n, rstd.dtype)
    xv, dyv = _row_view(x), _row_view(dy)
    with _device_of(x):
        backward_statistic_kernel[(_tiles(xv.m, tile),)](
            dy, x, weight, rstd, total, xv.m, xv.b, xv.stride_a, xv.stride_b, dyv.b, dyv.stride_a, dyv.stride_b,
            xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset, tile.rows, tile.block,
            num_warps=_warps(tile), **NO_FUSION,
        )  # fmt: skip


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
    *,
    settings: PersistentSettings | None = None,
) -> None:
    """dX and dW, given total = Σ dY·(w+offset)·x̂ over all ``hidden_size`` columns, of which x may hold a slice."""
    tile = settings or backward_apply_settings(x.shape[2], rstd.dtype)
    _launch_gradients(backward_apply_kernel, dy, x, weight, rstd, total, hidden_size, offset, dx, dw, tile)


def _launch_gradients(
    kernel,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor | None,
    hidden_size: int,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    tile: PersistentSettings,
) -> None:
    if dx is None and dw is None:
        return
    n = x.shape[2]
    xv, dyv = _row_view(x), _row_view(dy)
    tiles, chunks = _tiles(xv.m, tile), _chunks(n, tile)
    # Without dW there are no partial rows to bound.
    share = xv.m * n * x.element_size() if dw is not None else None
    programs = partial_rows(tiles, chunks, tile.per_sm, _multiprocessors(x.device), n * rstd.element_size(), share)
    partial = dw
    if dw is not None and programs > 1:
        partial = torch.empty(programs, n, dtype=rstd.dtype, device=x.device)
    totals = () if total is None else (total,)
    stages = _stages(tile, x.element_size() + dy.element_size(), _shared_memory(x.device))
    with _device_of(x):
        kernel[(programs, chunks)](
            dy, x, weight, rstd, *totals, dx, partial, xv.m, tiles,
            xv.b, xv.stride_a, xv.stride_b, dyv.b, dyv.stride_a, dyv.stride_b, hidden_size,
            xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset, tile.rows, tile.block, stages,
            num_warps=_warps(tile), **NO_FUSION,
        )  # fmt: skip
        if partial is not dw:
            sum_partials_kernel[(_chunks(n, SUM_PARTIALS),)](
                partial, dw, programs, n, SUM_PARTIALS.rows, SUM_PARTIALS.block, num_warps=_warps(SUM_PARTIALS),
                **NO_FUSION,
            )  # fmt: skip


def partial_rows(
    tiles: int, chunks: int, per_sm: int, multiprocessors: int, partial_bytes: int, x_bytes: int | None
) -> int:
    """P, the programs that share the row tiles: enough to fill the device, and no more than there are tiles, nor than
    ``PARTIALS_SHARE`` allows for P partial rows of ``partial_bytes`` beside ``x_bytes`` (None: no partial rows)."""
    full = -(-multiprocessors // chunks)
    programs = full * per_sm
    if x_bytes is not None:
        allowed = int(PARTIALS_SHARE * x_bytes / partial_bytes)
        programs = min(programs, allowed if allowed >= MACHINE_SHARE * full else full)
    return max(1, min(programs, tiles))


class _RowView(NamedTuple):
    """A row view as the kernels take it: strides in units of 16 bytes where both are multiples of that."""

    m: int
    b: int
    stride_a: int
    stride_b: int
    unit: int
    flat: bool
    int64: bool


def _row_view(x: Tensor) -> _RowView:
    a, b, _ = x.shape
    stride_a, stride_b, _ = x.stride()
    flat = b == 1 or a == 1 or stride_a == b * stride_b
    if flat:
        stride_a, stride_b = 0, stride_a if b == 1 else stride_b
    unit = 16 // x.element_size()
    if stride_a % unit or stride_b % unit:
        unit = 1
    m = a * b
    return _RowView(m, b, stride_a // unit, stride_b // unit, unit, flat, m > 2**31 - 2**16)


def _tiles(m: int, tile: RowSettings) -> int:
    return -(-m // tile.rows)


def _chunks(n: int, tile: RowSettings) -> int:
    return -(-n // tile.block)


def _stages(tile: PersistentSettings, element_bytes: int, shared_memory: int) -> int:
    """As many stages as the tile asks for and shared memory holds (x and dY of every stage lie there)."""
    stage = tile.rows * tile.block * element_bytes
    room = (shared_memory - 8192) // tile.per_sm
    return max(1, min(tile.stages, room // stage))


def _warps(tile: RowSettings) -> int:
    """An AMD wavefront is twice as wide as a warp, and a program has 1024 threads at most."""
    return min(tile.warps, 16) if torch.version.hip else tile.warps


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """A few where there is no GPU: Triton's interpreter then goes through the same loops."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 228 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or 48 * 1024


def _device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device. Switching to x's takes microseconds, so only where it is another one."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
