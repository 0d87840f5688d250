"""The norm on one device, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshnorm import ops
from meshnorm.dispatch import is_batched, transformed, unobserved
from meshnorm.errors import DoubleBackwardError
from meshnorm.formula import reference_backward, reference_forward
from meshnorm.replayed import Norm


def local_rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int) -> Tensor:
    """y for plain tensors whose arguments are checked, where something traces or transforms the call.

    Under torch.func's transforms and in forward mode the formula itself is run: slower, and differentiable in any way.
    """
    if transformed(x, weight):
        return reference_forward(x, weight, eps, offset, casting_mode, ndim)
    return ops.forward.op(x, weight, eps, offset, casting_mode, ndim)[0]  # type: ignore[attr-defined]


class LocalNorm(Norm):
    """y for plain tensors of one signature whose arguments are checked, where nothing observes the call."""

    __slots__ = ("in_place",)

    def __init__(self, eps: float, offset: float, casting_mode: str, ndim: int, in_place: bool) -> None:
        super().__init__(eps, offset, casting_mode, ndim)
        self.in_place = in_place

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
            return _apply(x, weight, self)
        return self.y(x, weight)


class _LocalRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, norm):
        y, rstd = norm.y_and_rstd(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_local_backward, ctx, dy)
        return _local_backward(ctx, dy, *ctx.saved_tensors)


# Function.apply looks for functorch's transforms and wrappers, which takes as long as the rest of it; nothing observes
# these calls.
_apply: Any = super(torch.autograd.Function, _LocalRMSNorm).apply  # type: ignore[misc]


def _local_backward(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw, _ = ctx.needs_input_grad
    dw_dtype = weight.dtype if needs_dw and weight is not None else x.dtype
    norm = ctx.norm
    if is_batched(dy):
        dx, dw = reference_backward(dy, x, weight, norm.eps, norm.offset, norm.ndim)
    elif unobserved(dy, x, weight, rstd):
        dx, dw = norm.gradients(dy, x, weight, rstd, needs_dx, needs_dw, dw_dtype, norm.in_place)
    else:
        dx, dw = ops.backward.op(dy, x, weight, rstd, norm.offset, norm.ndim, needs_dx, needs_dw, dw_dtype)  # type: ignore[attr-defined]
    return dx if needs_dx else None, dw if needs_dw else None, None


def once_differentiable(backward: Callable[..., Any], ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``backward``, tied to what they depend on: differentiating them again raises an error."""
    saved = ctx.saved_tensors  # read once: what checkpointing recomputes is there for one reading
    with torch.no_grad():
        gradients = backward(ctx, *dys, *saved)
    return tuple(None if g is None else _Once.apply(g, *dys, *saved) for g in gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor | None) -> Tensor:  # type: ignore[override]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):  # type: ignore[override]
        refuse_double_backward()


def refuse_double_backward(*_: Any) -> None:
    raise DoubleBackwardError(
        "the gradient of an RMSNorm's gradient is not supported: leave create_graph=False in the first backward, or "
        "compute this norm with meshnorm.formula.reference_forward, or reference_add_forward, or "
        "meshnorm.formula_gated.reference_gated_forward, which torch differentiates any number of times"
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, _, ctx.ndim = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx: Any, dy: Tensor, _: Any):
    x, weight, rstd = ctx.saved_tensors
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    dw_dtype = weight.dtype if needs_dw else x.dtype
    dx, dw = ops.backward(dy, x, weight, rstd, ctx.offset, ctx.ndim, needs_dx, needs_dw, dw_dtype)
    return dx if needs_dx else None, dw if needs_dw else None, None, None, None, None


torch.library.register_autograd("meshnorm::forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::backward", refuse_double_backward)
