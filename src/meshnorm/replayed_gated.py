"""The gated norm on plain tensors of one signature: as ``replayed``, with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshnorm import ops_gated
from meshnorm.formula_gated import Gated
from meshnorm.replayed import MISALIGNED, MOST_GRADIENTS, recorded, signature

Gradients = tuple[Tensor, Tensor, Tensor]


class GatedNorm:
    """y, rstd and gradients for tensors of one signature, of which the last ``ndim`` dims are normalized."""

    __slots__ = ("_gradients", "_with_rstd", "_without_rstd", "how", "ndim")

    def __init__(self, how: Gated, ndim: int) -> None:
        self.how, self.ndim = how, ndim
        # (replay, templates of the outputs); None before it is recorded, False where it cannot be.
        self._without_rstd: Any = None
        self._with_rstd: Any = None
        self._gradients: dict[tuple, Any] = {}

    def y(self, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> Tensor:
        """y alone, for a call that needs no gradient."""
        known = self._without_rstd
        if known is not False:
            inputs = x, gate, weight
            x_at, gate_at, weight_at = addresses = _addresses(*inputs)
            if not (x_at | gate_at | weight_at) & MISALIGNED:
                if known is None:
                    (y,), self._without_rstd = recorded(
                        lambda: (ops_gated.gated_without_rstd(*inputs, self.how, self.ndim),), *inputs
                    )
                    return y
                replay, (like_y,) = known
                y = torch.empty_like(like_y)
                if replay(*addresses, y.data_ptr()):
                    return y
        return ops_gated.gated_without_rstd(x, gate, weight, self.how, self.ndim)

    def y_and_rstd(self, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        forward = ops_gated.gated_forward.direct  # type: ignore[attr-defined]
        known = self._with_rstd
        if known is not False:
            inputs = x, gate, weight
            x_at, gate_at, weight_at = addresses = _addresses(*inputs)
            if not (x_at | gate_at | weight_at) & MISALIGNED:
                if known is None:
                    (y, rstd), self._with_rstd = recorded(lambda: forward(*inputs, *self.how, self.ndim), *inputs)
                    return y, rstd
                replay, (like_y, like_rstd) = known
                y, rstd = torch.empty_like(like_y), torch.empty_like(like_rstd)
                if replay(*addresses, y.data_ptr(), rstd.data_ptr()):
                    return y, rstd
        return forward(x, gate, weight, *self.how, self.ndim)

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor | None,
        rstd: Tensor,
        needs_dx: bool,
        needs_d_gate: bool,
        dw_dtype: torch.dtype | None,
    ) -> Gradients:
        """(dX, dGate, dW), as ``ops_gated.gated_backward`` returns them.

        Unlike those of the forward, the tensors may be of any signature: hooks on saved tensors may have changed them.
        """
        wanted, inputs = (needs_dx, needs_d_gate, dw_dtype), (dy, x, gate, weight, rstd)
        key = signature(dy), signature(x), signature(gate), signature(weight), signature(rstd), wanted
        known = self._gradients.get(key)
        if known is not False:
            addresses = _addresses(*inputs)
            dy_at, x_at, gate_at, weight_at, rstd_at = addresses
            if not (dy_at | x_at | gate_at | weight_at | rstd_at) & MISALIGNED:
                if known is None:
                    return self._record_gradients(key, inputs, wanted)
                replay, (like_dx, like_d_gate, like_dw) = known
                dx, d_gate, dw = torch.empty_like(like_dx), torch.empty_like(like_d_gate), torch.empty_like(like_dw)
                if replay(*addresses, dx.data_ptr(), d_gate.data_ptr(), dw.data_ptr()):
                    return dx, d_gate, dw
        return self._backward(inputs, wanted)

    def _backward(self, inputs: Any, wanted: Any) -> Gradients:
        how = self.how
        options = how.offset, how.norm_before_gate, how.activation, how.group_size, self.ndim
        return ops_gated.gated_backward.direct(*inputs, *options, *wanted)  # type: ignore[attr-defined]

    def _record_gradients(self, key: tuple, inputs: Any, wanted: Any) -> Gradients:
        found, known = recorded(lambda: self._backward(inputs, wanted), *inputs)
        if len(self._gradients) >= MOST_GRADIENTS:
            self._gradients.clear()
        self._gradients[key] = known
        return found  # type: ignore[return-value]


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
