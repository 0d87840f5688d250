"""The kernels of a gated norm: two modules, ``cpu_gated`` and ``gpu_gated``, offer the same six functions.

Tensors as the package says, but for these:

- ``gate``: a row view of M rows, as ``x``, of any float dtype; None for a norm in groups without a gate.
- ``rstd``, ``total``: (M, G), one number a row and group, G = N // ``how.group_size``; the last dim has stride 1.
- ``y``, ``dx``: (M, N) of x's dtype, ``d_gate``: (M, N) of the gate's; rows may have any stride, the last dim has
  stride 1.
- ``how``: a ``formula_gated.Gated``.

=============================================================================  ========================================
``forward(x, gate, weight, how, y, rstd)``                                     the norm
``statistic(x, gate, how, total)``                                             total = Σ v² of each row and group
``apply(x, gate, weight, total, size, how, y, rstd)``                          the norm, given total
``backward(dy, x, gate, weight, rstd, how, dx, d_gate, dw)``                   the gradients
``backward_statistic(dy, x, gate, weight, rstd, how, total)``                  total = Σ E·(w+offset)·x̂
``backward_apply(dy, x, gate, weight, rstd, total, size, how, dx, d_gate,      the gradients, given total
dw)``
=============================================================================  ========================================

With ``statistic`` and ``apply`` the tensors may hold a slice of each group, of ``how.group_size`` columns, and ``size``
is that of the whole group. A gradient that is not wanted is None and costs nothing.

A row's y, rstd, dX and dGate depend on this row, the sizes and the dtypes alone; every result is bitwise repeatable.
"""

from __future__ import annotations

from types import ModuleType

import torch

from . import cpu, cpu_gated, kernels_for


def gated_kernels_for(device: torch.device) -> ModuleType:
    """The module whose six functions run on ``device``, as ``kernels_for`` chooses."""
    if kernels_for(device) is cpu:
        return cpu_gated
    from . import gpu_gated

    return gpu_gated
