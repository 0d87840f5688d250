"""Launches of the cluster kernels: rows too wide for one program, on GPUs that have thread-block clusters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .clusters import has_clusters
from .launching import launch, most_clusters, scratch
from .row_views import row_view
from .settings import ClusterSettings
from .triton_cluster import backward_cluster_kernel, forward_cluster_kernel

REGISTERS = 65536  # 32-bit registers of a multiprocessor, on every NVIDIA GPU since 2012


def can_cluster(device: torch.device, dtype: torch.dtype) -> bool:
    """The exchange is one of float32 numbers."""
    return dtype != torch.float64 and has_clusters(device)


def forward_cluster(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor | None,
    settings: ClusterSettings,
) -> None:
    """y, and rstd unless it is None."""
    n, view = x.shape[2], row_view(x)
    parts, *shape = _shape(n, settings)
    launch(
        forward_cluster_kernel,
        (view.m,),
        (x, weight, y, rstd, n, view.m, view.b, view.stride_a, view.stride_b),
        (view.unit, view.flat, view.int64, n, eps, offset, mode, parts, *shape),
        cluster=parts,
        num_warps=settings.warps,
    )


def backward_cluster(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor,
    needs_dw: bool,
    settings: ClusterSettings,
    stages: int,
    programs: Callable[[int], int],
) -> Tensor | None:
    """dX, and the partial rows of dW where it is needed. ``programs`` says how many of the clusters that the device
    runs at once are to be used."""
    n = x.shape[2]
    dyv, xv = row_view(dy), row_view(x)
    parts, *shape = _shape(n, settings)
    constants = (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset, parts, *shape, stages)
    options = {
        "cluster": parts,
        "num_warps": settings.warps,
        "maxnreg": min(255, REGISTERS // (settings.warps * 32 * settings.per_sm) // 8 * 8),
    }

    def arguments(partial: Tensor | None) -> tuple:
        return (dy, x, weight, rstd, dx, partial, n, *xv[:4], *dyv[1:4])

    # How many clusters run at once depends on the kernel alone, for which one partial row is as good as many.
    one = torch.empty(1, n, dtype=rstd.dtype, device=x.device) if needs_dw else None
    clusters = programs(most_clusters(backward_cluster_kernel, arguments(one), constants, **options))
    partial = scratch((clusters, n), rstd.dtype, x.device) if needs_dw else None
    launch(backward_cluster_kernel, (clusters,), arguments(partial), constants, **options)
    return partial


def _shape(n: int, settings: ClusterSettings) -> tuple[int, int, int, int]:
    """(programs of a cluster, columns of a program, columns of a chunk, chunks)"""
    parts = -(-n // (settings.chunk * settings.chunks))
    width = -(-n // parts // 8) * 8
    return parts, width, settings.chunk, -(-width // settings.chunk)
