"""Launches of the backward kernel for rows in chunks, with a row in one program or split over those of a cluster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .clusters import has_clusters
from .launching import has_ptx, launch, most_clusters, scratch
from .row_views import row_view
from .settings import ChunkSettings, parts_of
from .triton_chunks import backward_chunks_kernel

REGISTERS = 65536  # 32-bit registers of a multiprocessor, on every NVIDIA GPU since 2012


def can_chunk(device: torch.device, dtype: torch.dtype, n: int, settings: ChunkSettings) -> bool:
    """The exchange is one of float32 numbers, and written in PTX."""
    return dtype != torch.float64 and (has_clusters(device) if parts_of(n, settings) > 1 else has_ptx(device))


def backward_chunks(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor | None,
    needs_dw: bool,
    passed: tuple[Tensor | None, Tensor | None],
    settings: ChunkSettings,
    stages: int,
    multiprocessors: int,
    programs: Callable[[int, int], int],
) -> tuple[bool, Tensor | None]:
    """(True, the partial rows of dW or None), dX being written unless it is None; (False, None) and nothing done where
    the device has no clusters of this size. ``passed``: the gradient of a residual_out, and what takes dX once more.
    ``programs(n, per_sm)`` says how many programs, or clusters, are to be used of ``n · per_sm`` that run at once."""
    n = x.shape[2]
    dyv, xv = row_view(dy), row_view(x)
    parts = parts_of(n, settings)
    width = -(-n // parts // 8) * 8  # rows stay aligned to 16 bytes
    shape = (parts, width, settings.chunk, -(-width // settings.chunk), stages)
    constants = (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset, *shape)
    options = {
        "cluster": parts,
        "num_warps": settings.warps,
        "maxnreg": min(255, REGISTERS // (settings.warps * 32 * settings.per_sm) // 8 * 8),
    }

    def arguments(partial: Tensor | None) -> tuple:
        return (dy, x, weight, rstd, dx, partial, *passed, n, *xv[:4], *dyv[1:4])

    if parts == 1:
        groups = programs(multiprocessors, settings.per_sm)
    else:
        # How many clusters run at once depends on the kernel alone, for which one partial row is as good as many.
        one = torch.empty(1, n, dtype=rstd.dtype, device=x.device) if needs_dw else None
        resident = most_clusters(backward_chunks_kernel, arguments(one), constants, **options)
        if resident == 0:
            return False, None
        groups = programs(resident, 1)
    partial = scratch((groups, n), rstd.dtype, x.device) if needs_dw else None
    launch(backward_chunks_kernel, (groups,), arguments(partial), constants, **options)
    return True, partial
