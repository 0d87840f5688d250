"""The gated norm on one device, with its gradient: x, the gate, the weight and one number a row and group are saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshnorm import ops_gated
from meshnorm.dispatch import transformed, unobserved
from meshnorm.formula_gated import Gated, reference_gated_forward
from meshnorm.local import once_differentiable, refuse_double_backward


def local_gated_rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, ndim: int) -> Tensor:
    """y for plain tensors whose arguments are checked.

    Under torch.func's transforms and in forward mode the formula itself is run, as in ``local``.
    """
    if transformed(x, gate, weight):
        return reference_gated_forward(x, gate, weight, how, ndim)
    if not unobserved(x, gate, weight):
        return ops_gated.gated_forward.op(x, gate, weight, *how, ndim)[0]  # type: ignore[attr-defined]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, weight)):
        return _LocalGatedRMSNorm.apply(x, gate, weight, how, ndim)  # type: ignore[return-value]
    return ops_gated.gated_without_rstd(x, gate, weight, how, ndim)


class _LocalGatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate, weight, how, ndim):
        y, rstd = ops_gated.gated_forward.direct(x, gate, weight, *how, ndim)  # type: ignore[attr-defined]
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.how, ctx.ndim = how, ndim
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_local_backward, ctx, dy)
        return _local_backward(ctx, dy, *ctx.saved_tensors)


def _local_backward(
    ctx: Any, dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor | None, ...]:
    how: Gated = ctx.how
    needs_dx, needs_d_gate, needs_dw = ctx.needs_input_grad[:3]
    dw_dtype = weight.dtype if needs_dw and weight is not None else None
    dx, d_gate, dw = ops_gated.gated_backward(
        dy,
        *(x, gate, weight, rstd, how.offset, how.norm_before_gate, how.activation, how.group_size),
        *(ctx.ndim, needs_dx, needs_d_gate, dw_dtype),
    )
    return dx if needs_dx else None, d_gate if needs_d_gate else None, dw if needs_dw else None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, *how, ctx.ndim = inputs
    ctx.how = Gated(*how)
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx: Any, dy: Tensor, _: Any):
    return *_local_backward(ctx, dy, *ctx.saved_tensors)[:3], *(None,) * 7


torch.library.register_autograd("meshnorm::gated_forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::gated_backward", refuse_double_backward)
