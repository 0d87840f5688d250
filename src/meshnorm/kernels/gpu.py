"""The six functions on Triton kernels: settings, a grid, and a launch on x's device and its current stream. Here those
of the forward; ``gpu_backward`` has the others.

``y`` and ``dx`` are best aligned to 16 bytes, as torch allocates them: a ``dx`` that is not takes a copy. ``settings``
overrides the ladders of ``settings.py``; benchmarks pass it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gpu_backward import backward, backward_apply, backward_statistic, sum_partials
from .gpu_split import can_split, forward_split, widest_split
from .launching import has_ptx
from .row_views import aligned, residual_rows, row_view
from .settings import (
    RowSettings,
    apply_settings,
    forward_settings,
    forward_split_settings,
    held_settings,
    statistic_settings,
)
from .tiles import ceil_div, launch_tile, multiprocessors, shared_memory_of, stages_of
from .triton_forward import apply_kernel, forward_kernel, forward_wide_kernel, statistic_kernel

__all__ = [
    "apply",
    "backward",
    "backward_apply",
    "backward_statistic",
    "forward",
    "statistic",
    "sum_partials",
]

# Rows of whose programs all are resident at once, at the most a multiprocessor has, wait for memory and little else.
# Half of those that a multiprocessor has: with all of them, rows of 8192 columns were slower held (512 of them 8.3 µs
# instead of 7.7), and 2048 of 4096 columns in a CUDA graph (8.3 instead of 6.8).
RESIDENT_WARPS = 32


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
        stages = stages_of(split, x.element_size(), shared_memory_of(x.device))
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
    launch_tile(
        forward_kernel if whole else forward_wide_kernel,
        (ceil_div(view.m, tile.rows) if whole else view.m,),
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
    launch_tile(
        statistic_kernel,
        (ceil_div(view.m, tile.rows),),
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
    launch_tile(
        apply_kernel,
        (ceil_div(view.m, tile.rows), ceil_div(n, tile.block)),
        tile,
        (x, weight, total, y, rstd, view.m, view.b, view.stride_a, view.stride_b, hidden_size),
        (view.unit, view.flat, view.int64, n, eps, offset, mode, tile.rows, tile.block, has_ptx(x.device)),
    )
