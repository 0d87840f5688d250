"""Launches of the split kernels: rows too wide for one program.

All programs of such a launch wait for one another, so all must be resident at once. The settings see to it: registers a
thread (``maxnreg``), shared memory (the number of stages) and threads are bounded so that ``per_sm`` programs fit a
multiprocessor; and the launch is cooperative, which the driver refuses where they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .exchange import RING, workspace
from .launching import has_ptx, launch
from .row_views import row_view
from .settings import SplitSettings
from .triton_split import backward_split_kernel, forward_split_kernel

REGISTERS = 65536  # 32-bit registers of a multiprocessor, on every NVIDIA GPU since 2012


def can_split(device: torch.device, dtype: torch.dtype) -> bool:
    """Slots hold 32-bit values, and waiting is written in PTX."""
    return dtype != torch.float64 and has_ptx(device)


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
    _launch(
        forward_split_kernel,
        groups * parts,
        settings,
        (x, weight, y, rstd, space.state, space.slots, space.slots.numel(), n, *view[:4]),
        (view.unit, view.flat, view.int64, n, eps, offset, mode),
        (parts, _power_of_2(parts), settings.block, RING, settings.lookahead, stages),
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
    _launch(
        backward_split_kernel,
        groups * parts,
        settings,
        (dy, x, weight, rstd, dx, partial, space.state, space.slots, space.slots.numel(), n, *xv[:4], *dyv[1:4]),
        (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n, offset),
        (parts, _power_of_2(parts), settings.block, RING, settings.lookahead, stages),
    )
    return partial


def _launch(kernel: Any, programs: int, settings: SplitSettings, arguments: tuple, given: tuple, chosen: tuple) -> None:
    """A cooperative launch, with no more registers a thread than let ``per_sm`` programs be resident."""
    registers = min(255, REGISTERS // (settings.warps * 32 * settings.per_sm) // 8 * 8)
    launch(
        kernel,
        (programs,),
        arguments,
        given + chosen,
        num_warps=settings.warps,
        maxnreg=registers,
        launch_cooperative_grid=True,
    )


def widest_split(settings: SplitSettings, multiprocessors: int) -> int:
    """The widest row that all resident programs together can hold."""
    return settings.block * settings.per_sm * multiprocessors


def _programs(n: int, m: int, settings: SplitSettings, multiprocessors: int) -> tuple[int, int]:
    """(programs that share a row, groups of them)."""
    parts = -(-n // settings.block)
    return parts, min(m, multiprocessors * settings.per_sm // parts)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
