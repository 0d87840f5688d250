"""The norm behind an addition on one device, with its gradient.

x + residual has one gradient for both, and that is one tensor where both have the same dtype: returned twice, as the
gradient of torch's own addition is, which autograd knows how to hold (it copies what two leaves would share). But where
x or the residual is a leaf of the graph, whose gradient the caller gets to see and may change, each has memory of its
own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshnorm import ops_add
from meshnorm.dispatch import transformed, unobserved
from meshnorm.formula import reference_add_forward
from meshnorm.local import once_differentiable, refuse_double_backward


class Wanted(NamedTuple):
    """Which gradients a call wants, and in which dtypes: what ``ops_add`` is asked for and how it is handed out."""

    x: torch.dtype | None
    residual: torch.dtype | None
    separate: bool  # x's and the residual's must not share memory

    @classmethod
    def of(cls, x: Tensor, residual: Tensor) -> Wanted:
        compiled = torch.compiler.is_compiling()
        return cls(
            x.dtype if x.requires_grad else None,
            residual.dtype if residual.requires_grad else None,
            not compiled and (x.is_leaf or residual.is_leaf),
        )

    @property
    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """(of dX, of dResidual where that is another tensor)."""
        if self.x is None or self.residual is None or self.x == self.residual:
            return self.x or self.residual, None
        return self.x, self.residual

    def handed_out(self, dx: Tensor, d_residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(x's gradient, the residual's) of what ``ops_add`` returned."""
        if self.x is None or self.residual is None:
            return (dx if self.x is not None else None), (dx if self.residual is not None else None)
        if self.x != self.residual:
            return dx, d_residual
        return dx, dx.clone() if self.separate else dx

    def passed_on(self, d_residual_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(x's gradient, the residual's) where nothing asked for y."""
        dx = None if self.x is None else d_residual_out.to(self.x, copy=self.separate)
        return dx, None if self.residual is None else d_residual_out.to(self.residual, copy=self.separate)


def local_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int
) -> tuple[Tensor, Tensor]:
    """(y, residual_out) for plain tensors whose arguments are checked.

    Under torch.func's transforms and in forward mode the formula itself is run, as in ``local``.
    """
    options = eps, offset, casting_mode, ndim
    if transformed(x, residual, weight):
        return reference_add_forward(x, residual, weight, *options)
    if not unobserved(x, residual, weight):
        return ops_add.add_forward.op(x, residual, weight, *options)[:2]  # type: ignore[attr-defined]
    tensors = (x, residual) if weight is None else (x, residual, weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _LocalAddRMSNorm.apply(x, residual, weight, options)  # type: ignore[return-value]
    return ops_add.add_without_rstd(x, residual, weight, *options)


class _LocalAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, residual, weight, options):
        y, residual_out, rstd = ops_add.add_forward.direct(x, residual, weight, *options)  # type: ignore[attr-defined]
        _keep(ctx, x, residual, weight, residual_out, rstd, options)
        return y, residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_residual_out: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_local_backward, ctx, dy, d_residual_out)
        return _local_backward(ctx, dy, d_residual_out, *ctx.saved_tensors)


def _keep(
    ctx: Any,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    residual_out: Tensor,
    rstd: Tensor,
    options: tuple[float, float, str, int],
) -> None:
    """What the backward needs: residual_out, which autograd would notice to be changed, and neither x nor residual."""
    ctx.save_for_backward(residual_out, weight, rstd)
    ctx.set_materialize_grads(False)  # no zeros for an output that is not used
    ctx.wanted, (_, ctx.offset, _, ctx.ndim) = Wanted.of(x, residual), options
    frozen = () if x.requires_grad or residual.requires_grad else (residual_out,)
    ctx.mark_non_differentiable(rstd, *frozen)


def _local_backward(
    ctx: Any,
    dy: Tensor | None,
    d_residual_out: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
) -> tuple[Tensor | None, ...]:
    wanted: Wanted = ctx.wanted
    if dy is None:
        passed = (None, None) if d_residual_out is None else wanted.passed_on(d_residual_out)
        return *passed, None, None
    dw_dtype = weight.dtype if weight is not None and ctx.needs_input_grad[2] else None
    dx, d_residual, dw = ops_add.add_backward(
        dy, residual_out, weight, rstd, d_residual_out, ctx.offset, ctx.ndim, *wanted.dtypes, dw_dtype
    )
    return *wanted.handed_out(dx, d_residual), None if dw_dtype is None else dw, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _keep(ctx, *inputs[:3], *output[1:], options=inputs[3:])  # type: ignore[arg-type]


def _op_backward(ctx: Any, dy: Tensor | None, d_residual_out: Tensor | None, _: Any):
    gradients = _local_backward(ctx, dy, d_residual_out, *ctx.saved_tensors)
    return *gradients, None, None, None


torch.library.register_autograd("meshnorm::add_forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::add_backward", refuse_double_backward)
