"""Launches of the split kernels: rows too wide for one program.

All programs of such a launch wait for one another, so all must be resident at once. The settings see to it: registers a
thread (``maxnreg``), shared memory (the number of stages) and threads are bounded so that ``per_sm`` programs fit a
multiprocessor; and the launch is cooperative, which the driver refuses where they do not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .exchange import RING, workspace
from .row_views import row_view
from .settings import SplitSettings
from .triton_split import backward_split_kernel, forward_split_kernel

REGISTERS = 65536  # 32-bit registers of a multiprocessor, on every NVIDIA GPU since 2012


@functools.cache
def can_split(device: torch.device, dtype: torch.dtype) -> bool:
    """Slots hold 32-bit values, and waiting is written in PTX."""
    return device.type == "cuda" and torch.version.hip is None and dtype != torch.float64


def forward_split(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor,
    settings: SplitSettings,
    multiprocessors: int,
    stages: int,
) -> None:
    """y and rstd."""
    n, view, space = x.shape[2], row_view(x), workspace(x.device)
    parts, groups = _programs(n, view.m, settings, multiprocessors)
    kernel: Any = forward_split_kernel
    kernel[(groups * parts,)](
        *(x, weight, y, rstd, space.state, space.slots, space.slots.numel(), n),
        *(view.m, view.b, view.stride_a, view.stride_b),
        *(view.unit, view.flat, view.int64, n, eps, offset, mode),
        *(parts, _power_of_2(parts), settings.block, RING, settings.lookahead, stages),
        num_warps=settings.warps,
        maxnreg=_registers(settings),
        enable_fp_fusion=False,
        launch_cooperative_grid=True,
    )


def backward_split(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor,
    needs_dw: bool,
    settings: SplitSettings,
    multiprocessors: int,
    stages: int,
) -> Tensor | None:
    """dX, and the partial rows of dW where it is needed."""
    n, space = x.shape[2], workspace(x.device)
    dyv, xv = row_view(dy), row_view(x)
    parts, groups = _programs(n, xv.m, settings, multiprocessors)
    partial = torch.empty(groups, n, dtype=rstd.dtype, device=x.device) if needs_dw else None
    kernel: Any = backward_split_kernel
    kernel[(groups * parts,)](
        *(dy, x, weight, rstd, dx, partial, space.state, space.slots, space.slots.numel(), n),
        *(xv.m, xv.b, xv.stride_a, xv.stride_b, dyv.b, dyv.stride_a, dyv.stride_b),
        *(xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset),
        *(parts, _power_of_2(parts), settings.block, RING, settings.lookahead, stages),
        num_warps=settings.warps,
        maxnreg=_registers(settings),
        enable_fp_fusion=False,
        launch_cooperative_grid=True,
    )
    return partial


def widest_split(settings: SplitSettings, multiprocessors: int) -> int:
    """The widest row that all resident programs together can hold."""
    return settings.block * settings.per_sm * multiprocessors


def _programs(n: int, m: int, settings: SplitSettings, multiprocessors: int) -> tuple[int, int]:
    """(programs that share a row, groups of them)."""
    parts = -(-n // settings.block)
    return parts, min(m, multiprocessors * settings.per_sm // parts)


def _registers(settings: SplitSettings) -> int:
    return min(255, REGISTERS // (settings.warps * 32 * settings.per_sm) // 8 * 8)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
