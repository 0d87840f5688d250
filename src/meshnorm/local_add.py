"""The norm behind an addition on one device, with its gradient.

x + residual has one gradient for both. Where both have the same dtype it can be one tensor, returned twice, as torch's
own addition returns its. But then a caller may come to hold one memory as two gradients: torch's own does so where two
leaves are added through views (``a.view(-1) + b.view(-1)`` leaves a.grad and b.grad in one memory, torch 2.13). So it
is one tensor only where what made x and what made the residual are known to read their gradients and no more, as around
any residual stream: linears, multiplications, embeddings, the addition before. Else the kernel writes two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshnorm import ops_add
from meshnorm.dispatch import transformed, unobserved
from meshnorm.formula import reference_add_forward
from meshnorm.local import once_differentiable, refuse_double_backward
from meshnorm.replayed_add import AddNorm

# Backward nodes, by the names that autograd gives them, that write what they compute into memory of their own.
READERS = {
    *("MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0", "MulBackward0"),
    *("EmbeddingBackward0", "NativeDropoutBackward0"),
    *("_LocalAddRMSNormBackward", "_ShardedAddRMSNormBackward"),
    *(
        "GeneratedBackwardFor_meshnorm_forward_defaultBackward",
        "GeneratedBackwardFor_meshnorm_add_forward_defaultBackward",
    ),
}
# Those that hand on a view of their gradient, to one other node.
VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "PermuteBackward0"}


def is_only_read(x: Tensor) -> bool:
    """Whether x's gradient is only read by what made x: never kept, handed on or overwritten."""
    node: Any = x.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in READERS


class Wanted(NamedTuple):
    """Which gradients a call wants, and in which dtypes: what ``ops_add`` is asked for and how it is handed out."""

    x: torch.dtype | None
    residual: torch.dtype | None
    separate: bool  # x's and the residual's must not share memory

    @classmethod
    def of(cls, x: Tensor, residual: Tensor) -> Wanted:
        return cls(
            x.dtype if x.requires_grad else None,
            residual.dtype if residual.requires_grad else None,
            not (is_only_read(x) and is_only_read(residual)),
        )

    @property
    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """(of dX, of dResidual where that is another tensor)."""
        if self.x is None or self.residual is None or (self.x == self.residual and not self.separate):
            return self.x or self.residual, None
        return self.x, self.residual

    def handed_out(self, dx: Tensor, d_residual: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(x's gradient, the residual's) of what ``ops_add`` returned."""
        if self.x is None or self.residual is None:
            return (dx if self.x is not None else None), (dx if self.residual is not None else None)
        return dx, dx if self.dtypes[1] is None else d_residual

    def passed_on(self, d_residual_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(x's gradient, the residual's) where nothing asked for y: copies, so that nodes of this kind only read."""
        dx = None if self.x is None else d_residual_out.to(self.x, copy=True)
        return dx, None if self.residual is None else d_residual_out.to(self.residual, copy=True)


def local_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int
) -> tuple[Tensor, Tensor]:
    """(y, residual_out) for plain tensors whose arguments are checked, where something traces or transforms the call.

    Under torch.func's transforms and in forward mode the formula itself is run, as in ``local``.
    """
    options = eps, offset, casting_mode, ndim
    if transformed(x, residual, weight):
        return reference_add_forward(x, residual, weight, *options)
    return ops_add.add_forward.op(x, residual, weight, *options)[:2]  # type: ignore[attr-defined]


class LocalAddNorm(AddNorm):
    """(y, residual_out) for plain tensors of one signature whose arguments are checked, where nothing observes the
    call."""

    __slots__ = ()

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, residual, weight)]):
            return _apply(x, residual, weight, self)
        return self.outputs(x, residual, weight)


class _LocalAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, residual, weight, norm):
        y, residual_out, rstd = norm.outputs_and_rstd(x, residual, weight)
        _keep(ctx, x, residual, weight, residual_out, rstd, norm.options)
        ctx.norm = norm
        return y, residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_residual_out: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return once_differentiable(_local_backward, ctx, dy, d_residual_out)
        return _local_backward(ctx, dy, d_residual_out, *ctx.saved_tensors)


# As in ``local``: nothing observes these calls.
_apply: Any = super(torch.autograd.Function, _LocalAddRMSNorm).apply  # type: ignore[misc]


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
    given, dtypes = (dy, residual_out, weight, rstd, d_residual_out), (*wanted.dtypes, dw_dtype)
    if ctx.norm is not None and unobserved(*given):
        dx, d_residual, dw = ctx.norm.gradients(*given, *dtypes)
    else:
        dx, d_residual, dw = ops_add.add_backward(*given, ctx.offset, ctx.ndim, *dtypes)
    return *wanted.handed_out(dx, d_residual), None if dw_dtype is None else dw, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _keep(ctx, *inputs[:3], *output[1:], options=inputs[3:])  # type: ignore[arg-type]
    ctx.norm = None


def _op_backward(ctx: Any, dy: Tensor | None, d_residual_out: Tensor | None, _: Any):
    gradients = _local_backward(ctx, dy, d_residual_out, *ctx.saved_tensors)
    return *gradients, None, None, None


torch.library.register_autograd("meshnorm::add_forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::add_backward", refuse_double_backward)
