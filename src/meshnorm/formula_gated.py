"""What is computed with a gate: the norm of ``formula`` in groups, beside an activation, in plain torch.

The normalized dims, flattened, are cut into groups of ``group_size`` numbers; each has a statistic of its own. With
act the sigmoid σ, or silu, act(g) = g · σ(g), and the means over a group::

    v    = x · act(gate)            the gate before the norm, else v = x
    rstd = rsqrt(mean(v²) + eps)    one number a row and group
    x̂    = v · rstd
    y    = x̂ · (w + offset)         · act(gate), the norm before the gate

and, for a gradient dY of y, with E = dY · act(gate) where the norm comes before the gate, else E = dY::

    c     = mean(E · (w + offset) · x̂)
    dV    = (E · (w + offset) − x̂ · c) · rstd
    dX    = dV · act(gate)                      dGate = dV · x · act'(gate)                  the gate before the norm
    dX    = dV                                  dGate = dY · x̂ · (w + offset) · act'(gate)   the norm before the gate
    dW    = Σ over the rows of E · x̂

Without a gate act is 1: the norm in groups. (Mamba 2's gated norm, Dao & Gu, 2024; both orders and the groups as in
mamba_ssm's ``RMSNormGated``. Qwen3-Next and Kimi-Linear normalize before the gate.)

Where results are rounded to x's dtype, the gate and all statistics being in the accumulation dtype:

=========  ==============================================================================================
casting    y, the norm before the gate
=========  ==============================================================================================
"llama"    cast(p · act(gate)), p = cast(x̂) · (w + offset), rounded where the weight has x's dtype, as
           torch rounds the product of two such tensors
"gemma"    cast(x̂ · (w + offset) · act(gate)): one rounding, at the end
"none"     cast(cast(cast(x̂) · cast(w + offset)) · cast(act(gate)))
=========  ==============================================================================================

With the gate before the norm y is rounded as ``formula`` says; x · act(gate) is rounded in no mode.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshnorm.formula import accumulation_dtype

ACTIVATIONS = ("silu", "sigmoid")


class Gated(NamedTuple):
    """How a gated norm is computed: all but its tensors."""

    eps: float
    offset: float
    casting_mode: str
    norm_before_gate: bool
    activation: str
    group_size: int


def rounds_product(casting_mode: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether x̂ · (w + offset) is rounded to x's dtype before it is multiplied by the gate."""
    return casting_mode == "none" or (casting_mode == "llama" and weight_dtype == dtype)


def activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def reference_gated_forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, normalized_ndim: int = 1
) -> Tensor:
    """y of x's shape and dtype. ``weight`` has the last ``normalized_ndim`` dims of x as its shape."""
    acc, dtype = accumulation_dtype(x.dtype), x.dtype
    act = None if gate is None else activated(gate.to(acc), how.activation)
    v, last = x.to(acc), None
    if how.norm_before_gate:
        last = act
    elif act is not None:
        v = v * act
    x_hat = v * reference_gated_rstd(v, how, normalized_ndim)
    if how.casting_mode != "gemma":
        x_hat = x_hat.to(dtype).to(acc)
    if weight is None:
        product = x_hat
    else:
        scale = weight.to(acc) + how.offset
        product = x_hat * (scale.to(dtype).to(acc) if how.casting_mode == "none" else scale)
        if last is not None and rounds_product(how.casting_mode, dtype, weight.dtype):
            product = product.to(dtype).to(acc)
    if last is not None:
        product = product * (last.to(dtype).to(acc) if how.casting_mode == "none" else last)
    return product.to(dtype)


def reference_gated_rstd(v: Tensor, how: Gated, normalized_ndim: int = 1) -> Tensor:
    """rsqrt(mean(v²) + eps) of each group, at each of the group's numbers."""
    groups = _in_groups(v, how, normalized_ndim)
    mean = groups.square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + how.eps).expand_as(groups).reshape(v.shape)


def reference_gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, normalized_ndim: int = 1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dX, dGate, dW), each of the dtype and shape of what it is the gradient of; None for what is None."""
    acc = accumulation_dtype(x.dtype)
    act = slope = torch.ones((), dtype=acc, device=x.device)
    if gate is not None:
        g = gate.to(acc)
        act, sigmoid = activated(g, how.activation), torch.sigmoid(g)
        slope = sigmoid * torch.sigmoid(-g)
        if how.activation == "silu":
            slope = sigmoid + g * slope
    before, after = (torch.ones_like(act), act) if how.norm_before_gate else (act, torch.ones_like(act))
    wide, grad = x.to(acc), dy.to(acc)
    v = wide * before
    rstd = reference_gated_rstd(v, how, normalized_ndim)
    x_hat, e = v * rstd, grad * after
    scale = 1.0 if weight is None else weight.to(acc) + how.offset
    groups = _in_groups(e * scale * x_hat, how, normalized_ndim)
    c = groups.mean(-1, keepdim=True).expand_as(groups).reshape(x.shape)
    dv = (e * scale - x_hat * c) * rstd
    d_gate = None
    if gate is not None:
        d_gate = (grad * x_hat * scale if how.norm_before_gate else dv * wide) * slope
        d_gate = d_gate.to(gate.dtype)
    dw = None
    if weight is not None:
        rows = tuple(range(x.ndim - normalized_ndim))
        dw = (e * x_hat).sum(rows) if rows else e * x_hat
        dw = dw.to(weight.dtype)
    return (dv * before).to(x.dtype), d_gate, dw


def _in_groups(v: Tensor, how: Gated, normalized_ndim: int) -> Tensor:
    """(*rows, groups, group_size)."""
    rows = v.shape[: v.ndim - normalized_ndim]
    groups = math.prod(v.shape[v.ndim - normalized_ndim :]) // how.group_size
    return v.reshape(*rows, groups, how.group_size)
