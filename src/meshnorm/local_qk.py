"""The norms of q and k on one device, with their gradients: q, k, the weights and one number a row are saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshnorm import ops_qk
from meshnorm.dispatch import transformed, unobserved
from meshnorm.formula import reference_forward
from meshnorm.local import once_differentiable, refuse_double_backward
from meshnorm.replayed_qk import Options, QKNorm


def local_qk_rms_norm(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Both y for plain tensors whose arguments are checked, where something traces or transforms the call.

    Under torch.func's transforms and in forward mode the formula itself is run, as in ``local``.
    """
    tensors = q, k, q_weight, k_weight
    if transformed(*tensors):
        eps, offset, mode, q_ndim, k_ndim = options
        y_of_q = reference_forward(q, q_weight, eps, offset, mode, q_ndim)
        return y_of_q, reference_forward(k, k_weight, eps, offset, mode, k_ndim)
    return ops_qk.qk_forward.op(*tensors, *options)[:2]  # type: ignore[attr-defined]


class LocalQKNorm(QKNorm):
    """Both y for plain tensors of one signature whose arguments are checked, where nothing observes the call. Rows are
    taken in the ``orders`` in which they lie in memory."""

    __slots__ = ("_order_of_k", "_order_of_q")

    def __init__(self, options: Options, *orders: tuple[int, ...] | None) -> None:
        super().__init__(options)
        self._order_of_q, self._order_of_k = orders

    def __call__(self, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        q_order, k_order = self._order_of_q, self._order_of_k
        tensors = permuted(q, q_order), permuted(k, k_order), q_weight, k_weight
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
            y_of_q, y_of_k = _apply(*tensors, self)
        else:
            y_of_q, y_of_k = self.ys(*tensors)
        return permuted(y_of_q, inverse(q_order)), permuted(y_of_k, inverse(k_order))


def permuted(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    return x if order is None else x.permute(order)


def inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(map(order.index, range(len(order))))


class _LocalQKRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, q_weight, k_weight, norm):
        outputs = norm.ys_and_rstds(q, k, q_weight, k_weight)
        _keep(ctx, (q, k, q_weight, k_weight), outputs, norm.options)
        ctx.norm = norm
        return outputs[:2]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return *once_differentiable(_local_backward, ctx, *dys), None
        return *_local_backward(ctx, *dys, *ctx.saved_tensors), None  # type: ignore[arg-type]


# As in ``local``: nothing observes these calls.
_apply: Any = super(torch.autograd.Function, _LocalQKRMSNorm).apply  # type: ignore[misc]


def _keep(ctx: Any, tensors: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], options: Options) -> None:
    """What the backward needs. A y that depends on nothing that has a gradient has none."""
    ctx.save_for_backward(*tensors, *outputs[2:])
    ctx.set_materialize_grads(False)  # no zeros for an output that is not used
    _, ctx.offset, _, *ctx.ndims = options
    ctx.mark_non_differentiable(*constant_outputs(tensors, outputs), *outputs[2:])


def constant_outputs(tensors: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Which y depend on nothing that needs a gradient, q, k and the weights being ``tensors``."""
    needed = [t is not None and t.requires_grad for t in tensors]
    return [outputs[place] for place in range(2) if not (needed[place] or needed[place + 2])]


def _local_backward(
    ctx: Any,
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and the weights: of one whose y has no gradient, none."""
    dys, weights = (dq_out, dk_out), (q_weight, k_weight)
    needs = [ctx.needs_input_grad[place] and dys[place % 2] is not None for place in range(4)]
    dw_dtypes = [w.dtype if w is not None and need else None for w, need in zip(weights, needs[2:], strict=True)]
    given = *dys, q, k, *weights, q_rstd, k_rstd
    if ctx.norm is not None and unobserved(*given):
        gradients = ctx.norm.gradients(given, *needs[:2], *dw_dtypes)
    else:
        gradients = ops_qk.qk_backward(*given, ctx.offset, *ctx.ndims, *needs[:2], *dw_dtypes)
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs[:4], output, inputs[4:])  # type: ignore[arg-type]
    ctx.norm = None


def _op_backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None, *_: Any):
    return *_local_backward(ctx, dq_out, dk_out, *ctx.saved_tensors), *(None,) * 5


torch.library.register_autograd("meshnorm::qk_forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::qk_backward", refuse_double_backward)
