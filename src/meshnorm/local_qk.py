"""The norms of q and k on one device, with their gradients: q, k, the weights and one number a row are saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshnorm import ops_qk
from meshnorm.dispatch import transformed, unobserved
from meshnorm.formula import reference_forward
from meshnorm.local import once_differentiable, refuse_double_backward

Options = tuple[float, float, str, int, int]  # eps, offset, casting mode, how many dims of q and of k are normalized


def local_qk_rms_norm(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Both y for plain tensors whose arguments are checked.

    Under torch.func's transforms and in forward mode the formula itself is run, as in ``local``.
    """
    tensors = q, k, q_weight, k_weight
    if transformed(*tensors):
        eps, offset, mode, q_ndim, k_ndim = options
        y_of_q = reference_forward(q, q_weight, eps, offset, mode, q_ndim)
        return y_of_q, reference_forward(k, k_weight, eps, offset, mode, k_ndim)
    if not unobserved(*tensors):
        return ops_qk.qk_forward.op(*tensors, *options)[:2]  # type: ignore[attr-defined]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _LocalQKRMSNorm.apply(*tensors, options)  # type: ignore[return-value]
    return ops_qk.qk_without_rstd(*tensors, *options)


class _LocalQKRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, q_weight, k_weight, options):
        outputs = ops_qk.qk_forward.direct(q, k, q_weight, k_weight, *options)  # type: ignore[attr-defined]
        _keep(ctx, (q, k, q_weight, k_weight), outputs, options)
        return outputs[:2]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            return *once_differentiable(_local_backward, ctx, *dys), None
        return *_local_backward(ctx, *dys, *ctx.saved_tensors), None  # type: ignore[arg-type]


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
    gradients = ops_qk.qk_backward(*dys, q, k, *weights, q_rstd, k_rstd, ctx.offset, *ctx.ndims, *needs[:2], *dw_dtypes)
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs[:4], output, inputs[4:])  # type: ignore[arg-type]


def _op_backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None, *_: Any):
    return *_local_backward(ctx, dq_out, dk_out, *ctx.saved_tensors), *(None,) * 5


torch.library.register_autograd("meshnorm::qk_forward", _op_backward, setup_context=_save)
torch.library.register_autograd("meshnorm::qk_backward", refuse_double_backward)
