"""The gated norm on one device, with its gradient: x, the gate, the weight and one number a row and group are saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshnorm import ops_gated
from meshnorm.dispatch import transformed, unobserved
from meshnorm.formula_gated import Gated, reference_gated_forward
from meshnorm.local import once_differentiable, refuse_double_backward
from meshnorm.replayed_gated import GatedNorm


def local_gated_rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, ndim: int) -> Tensor:
    """y for plain tensors whose arguments are checked, where something traces or transforms the call.

    Under torch.func's transforms and in forward mode the formula itself is run, as in ``local``.
    """
    if transformed(x, gate, weight):
        return reference_gated_forward(x, gate, weight, how, ndim)
    return ops_gated.gated_forward.op(x, gate, weight, *how, ndim)[0]  # type: ignore[attr-defined]


class LocalGatedNorm(GatedNorm):
    """y for plain tensors of one signature whose arguments are checked, where nothing observes the call."""

    __slots__ = ()

    def __call__(self, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, gate, weight)]):
            return _apply(x, gate, weight, self)
        return self.y(x, gate, weight)


class _LocalGatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate, weight, norm):
        y, rstd = norm.y_and_rstd(x, gate, weight)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_local_backward, ctx, dy)
        return _local_backward(ctx, dy, *ctx.saved_tensors)


# As in ``local``: nothing observes these calls.
_apply: Any = super(torch.autograd.Function, _LocalGatedRMSNorm).apply  # type: ignore[misc]


def _local_backward(
    ctx: Any, dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor | None, ...]:
    needs_dx, needs_d_gate, needs_dw = ctx.needs_input_grad[:3]
    dw_dtype = weight.dtype if needs_dw and weight is not None else None
    given = dy, x, gate, weight, rstd
    if unobserved(*given):
        dx, d_gate, dw = ctx.norm.gradients(*given, needs_dx, needs_d_gate, dw_dtype)
    else:
        dx, d_gate, dw = _gradients(given, ctx.norm.how, ctx.norm.ndim, needs_dx, needs_d_gate, dw_dtype)
    return dx if needs_dx else None, d_gate if needs_d_gate else None, dw if needs_dw else None, None


def _gradients(given: Any, how: Gated, ndim: int, *wanted: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = how.offset, how.norm_before_gate, how.activation, how.group_size
    return ops_gated.gated_backward(*given, *options, ndim, *wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, *how, ctx.ndim = inputs
    ctx.how = Gated(*how)
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx: Any, dy: Tensor, _: Any):
    given = dy, *ctx.saved_tensors
    needs_dx, needs_d_gate, needs_dw = ctx.needs_input_grad[:3]
    dw_dtype = given[3].dtype if needs_dw else None
    dx, d_gate, dw = _gradients(given, ctx.how, ctx.ndim, needs_dx, needs_d_gate, dw_dtype)
    found = dx if needs_dx else None, d_gate if needs_d_gate else None, dw if needs_dw else None
    return *found, *(None,) * 7


torch.library.register_autograd("meshnorm::gated_forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::gated_backward", refuse_double_backward)
