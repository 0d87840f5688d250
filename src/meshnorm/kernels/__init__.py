"""Kernels: pointers, shapes and arithmetic. No autograd, no DTensor, no argument checks.

Two modules offer the same six functions: ``cpu`` (plain torch, any device) and ``gpu`` (Triton). All write into
preallocated outputs and return None. Tensors:

- ``x``, ``dy``: (A, B, N) **row views**. Row a·B + b of M = A·B rows is ``x[a, b]``. The last dim has stride 1 (or
  N = 1); A and B have any non-negative strides, 0 included. x and dy may factor M differently.
- ``weight``: contiguous (N,), of any float dtype, or None.
- ``y``, ``dx``: contiguous (M, N) of x's dtype. ``dx`` may be dy's own memory: a row is read before it is written.
- ``rstd``, ``total``: contiguous (M,) of the accumulation dtype (float64 for a float64 x, else float32). ``forward``
  takes None for an rstd that nobody needs.
- ``dw``: contiguous (N,), of any float dtype: summed in the accumulation dtype, rounded once.

===================================================================================  ==================================
``forward(x, weight, eps, offset, mode, y, rstd)``                                   the norm
``statistic(x, total)``                                                              total = Σ x² of each row
``apply(x, weight, total, hidden_size, eps, offset, mode, y, rstd)``                 the norm, given total
``backward(dy, x, weight, rstd, offset, dx, dw)``                                    the gradients
``backward_statistic(dy, x, weight, rstd, offset, total)``                           total = Σ dY·(w+offset)·x̂
``backward_apply(dy, x, weight, rstd, total, hidden_size, offset, dx, dw)``          the gradients, given total
===================================================================================  ==================================

With ``statistic`` and ``apply`` x may be a slice of the hidden dim: the caller adds the totals of the slices, and
``hidden_size`` is the length of the whole row. A gradient that is not wanted is None and costs nothing.

A norm of a sum, x + residual: ``forward`` and ``statistic`` also take

- ``residual``: a row view of M rows, of any float dtype (float64 beside a float64 x, and only there), and
- ``residual_out``: contiguous (M, N) of the residual's dtype. x + residual is rounded into it, and it is what is
  normalized.

``residual_out`` then stands for x in all other functions, and y keeps x's dtype. ``backward`` and ``backward_apply``
also take

- ``d_residual_out``: contiguous (M, N), of the dtype of ``residual_out``: added to dX before it is rounded.
- ``d_residual``: contiguous (M, N): dX once more, in a dtype of its own; that of ``dx`` may be any here.

A row's y, rstd and dX depend on this row, N and the dtypes alone; every result is bitwise repeatable.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from . import cpu

if TYPE_CHECKING:
    from .replay import Recording

__all__ = ["kernels_for", "recording"]


def kernels_for(device: torch.device) -> ModuleType:
    """The module whose six functions run on ``device``: Triton's for CUDA where Triton is installed, else torch's."""
    return _triton_module() if device.type == "cuda" else cpu


def recording(device: torch.device) -> Recording | None:
    """What records the launches of a call, so that calls of the same signature can replay them; None where ``device``
    has kernels that are no launches."""
    if kernels_for(device) is cpu:
        return None
    from .replay import Recording

    return Recording()


@functools.cache
def _triton_module() -> ModuleType:
    if importlib.util.find_spec("triton") is None:
        return cpu
    from . import gpu

    return gpu
