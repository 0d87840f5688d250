"""The kernels of two tensors at once, q and k, each with a norm of its own.

They take a list of *halves*, the tensors of one norm each, in the order and of the kinds that the functions of one norm
take (see the package), and what both share. A list may hold one half alone: of the other nothing is wanted, or it has
no rows. Both have the same dtype and device.

==================================================================================  ==========================
``forward([(x, weight, y, rstd), …], eps, offset, mode)``                           the norms
``statistic([(x, total), …])``                                                      total = Σ x² of each row
``apply([(x, weight, total, hidden_size, y, rstd), …], eps, offset, mode)``         the norms, given total
``backward([(dy, x, weight, rstd, dx, dw), …], offset)``                            the gradients
``backward_statistic([(dy, x, weight, rstd, total), …], offset)``                   total = Σ dY·(w+offset)·x̂
``backward_apply([(dy, x, weight, rstd, total, hidden_size, dx, dw), …], offset)``  the gradients, given total
==================================================================================  ==========================

Every result has the bits of the norm alone. dx is aligned to 16 bytes and shares no memory with dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from . import cpu, kernels_for

Halves = Sequence[tuple[Any, ...]]


def qk_kernels_for(device: torch.device) -> Any:
    """What has the six functions on ``device``: on CUDA launches for both halves at once, else one after the other."""
    kernels = kernels_for(device)
    if kernels is cpu:
        return OneByOne(cpu)
    from . import gpu_qk

    return gpu_qk


class OneByOne:
    """The six functions by those of one norm."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels

    def forward(self, halves: Halves, eps: float, offset: float, mode: str) -> None:
        for x, weight, y, rstd in halves:
            self.kernels.forward(x, weight, eps, offset, mode, y, rstd)

    def statistic(self, halves: Halves) -> None:
        for x, total in halves:
            self.kernels.statistic(x, total)

    def apply(self, halves: Halves, eps: float, offset: float, mode: str) -> None:
        for x, weight, total, hidden_size, y, rstd in halves:
            self.kernels.apply(x, weight, total, hidden_size, eps, offset, mode, y, rstd)

    def backward(self, halves: Halves, offset: float) -> None:
        for dy, x, weight, rstd, dx, dw in halves:
            self.kernels.backward(dy, x, weight, rstd, offset, dx, dw)

    def backward_statistic(self, halves: Halves, offset: float) -> None:
        for dy, x, weight, rstd, total in halves:
            self.kernels.backward_statistic(dy, x, weight, rstd, offset, total)

    def backward_apply(self, halves: Halves, offset: float) -> None:
        for dy, x, weight, rstd, total, hidden_size, dx, dw in halves:
            self.kernels.backward_apply(dy, x, weight, rstd, total, hidden_size, offset, dx, dw)
