"""The norm on plain tensors of one signature: shapes, strides, dtypes, device. Its first call is recorded, if the
device's kernels can be, and later ones replay the launches (see ``kernels.replay``): that makes a small norm cheap.

What is replayed reads and writes by address, so a ``Norm`` must be called with tensors of its signature only; that
nothing observes the call (see ``dispatch``) is up to its callers too. What may differ from call to call, the addresses'
alignment and the current device, is looked at here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from meshnorm import ops
from meshnorm.kernels import recording
from meshnorm.kernels.templates import template

# A norm's signatures of gradients: dY's strides, and which gradients are asked for. Full, it is emptied.
MOST_GRADIENTS = 16
MISALIGNED = 15  # bits of an address that are zero where it is a multiple of 16 bytes, as recorded kernels take it


def signature(x: Tensor | None) -> tuple | None:
    """All that decides how a kernel is called with x, but for the address. Raises where x has no strides."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout, x.is_neg())


class Norm:
    """y, rstd and gradients for tensors of one signature, of which the last ``ndim`` dims are normalized."""

    __slots__ = ("_gradients", "_options", "_with_rstd", "_without_rstd", "eps", "ndim", "offset")

    def __init__(self, eps: float, offset: float, casting_mode: str, ndim: int) -> None:
        self._options = eps, offset, casting_mode, ndim
        self.eps, self.offset, self.ndim = eps, offset, ndim
        # (replay, templates of the outputs); None before it is recorded, False where it cannot be.
        self._without_rstd: Any = None
        self._with_rstd: Any = None
        self._gradients: dict[tuple, Any] = {}

    def y(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """y alone, for a call that needs no gradient."""
        known = self._without_rstd
        if known is not False:
            x_at, weight_at = x.data_ptr(), 0 if weight is None else weight.data_ptr()
            if not (x_at | weight_at) & MISALIGNED:
                if known is None:
                    (y,), self._without_rstd = recorded(lambda: (ops.only_y(x, weight, *self._options),), x, weight)
                    return y
                replay, (like_y,) = known
                y = torch.empty_like(like_y)
                if replay(x_at, weight_at, y.data_ptr()):
                    return y
        return ops.only_y(x, weight, *self._options)

    def y_and_rstd(self, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        forward = ops.forward.direct  # type: ignore[attr-defined]
        known = self._with_rstd
        if known is not False:
            x_at, weight_at = x.data_ptr(), 0 if weight is None else weight.data_ptr()
            if not (x_at | weight_at) & MISALIGNED:
                if known is None:
                    (y, rstd), self._with_rstd = recorded(lambda: forward(x, weight, *self._options), x, weight)
                    return y, rstd
                replay, (like_y, like_rstd) = known
                y, rstd = torch.empty_like(like_y), torch.empty_like(like_rstd)
                if replay(x_at, weight_at, y.data_ptr(), rstd.data_ptr()):
                    return y, rstd
        return forward(x, weight, *self._options)

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        needs_dx: bool,
        needs_dw: bool,
        dw_dtype: torch.dtype,
        into_dy: bool,
    ) -> tuple[Tensor, Tensor]:
        """(dX, dW), as ``ops.backward_into`` returns them.

        Unlike those of the forward, the tensors may be of any signature: hooks on saved tensors may have changed them.
        """
        wanted = needs_dx, needs_dw, dw_dtype, into_dy and not dy.is_inference()
        key = signature(dy), signature(x), signature(weight), signature(rstd), wanted
        known = self._gradients.get(key)
        if known is not False:
            addresses = dy.data_ptr(), x.data_ptr(), 0 if weight is None else weight.data_ptr(), rstd.data_ptr()
            dy_at, x_at, weight_at, rstd_at = addresses
            if not (dy_at | x_at | weight_at | rstd_at) & MISALIGNED:
                if known is None:
                    return self._record_gradients(key, dy, x, weight, rstd, wanted)
                replay, (like_dx, like_dw) = known
                dx = dy if like_dx is None else torch.empty_like(like_dx)
                dw = torch.empty_like(like_dw)
                if replay(dy_at, x_at, weight_at, rstd_at, dx.data_ptr(), dw.data_ptr()):
                    if dx is dy:
                        increment_version(dy)
                    return dx, dw
        return self._backward(dy, x, weight, rstd, wanted)

    def _backward(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, wanted: Any
    ) -> tuple[Tensor, Tensor]:
        return ops.backward_into(dy, x, weight, rstd, self.offset, self.ndim, *wanted)

    def _record_gradients(
        self, key: tuple, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, wanted: Any
    ) -> tuple[Tensor, Tensor]:
        def backward() -> tuple[Tensor | None, Tensor]:
            nonlocal dx
            dx, dw = self._backward(dy, x, weight, rstd, wanted)
            return None if dx is dy else dx, dw  # where dX is dY, dY's address is all there is

        dx = dy
        (_, dw), known = recorded(backward, dy, x, weight, rstd)
        if len(self._gradients) >= MOST_GRADIENTS:
            self._gradients.clear()
        self._gradients[key] = known
        return dx, dw


def recorded(call: Callable[[], tuple[Tensor | None, ...]], *inputs: Tensor | None) -> tuple[tuple[Any, ...], Any]:
    """What ``call`` returns, and what replays it on other inputs of the same signature: (replay, templates of what it
    returned), or False."""
    device = next(tensor for tensor in inputs if tensor is not None).device
    recorder = recording(device)
    if recorder is None:
        return call(), False
    with recorder:
        outputs = call()
    replay = recorder.replay(*inputs, *outputs)
    if replay is None:
        return outputs, False
    return outputs, (replay, tuple(None if out is None else template(out) for out in outputs))


class Launches:
    """A function of tensors of one signature, whose launches are recorded in its first call and replayed in others."""

    __slots__ = ("_call", "_known")

    def __init__(self, call: Callable[..., tuple[Tensor, ...]]) -> None:
        self._call = call
        self._known: Any = None  # as a Norm's

    @classmethod
    def of(cls, known: dict[tuple, Launches], key: tuple, call: Callable[..., tuple[Tensor, ...]]) -> Launches:
        """Those of a signature of gradients."""
        launches = known.get(key)
        if launches is None:
            if len(known) >= MOST_GRADIENTS:
                known.clear()
            launches = known[key] = cls(call)
        return launches

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        known = self._known
        if known is not False:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]
            if not functools.reduce(operator.or_, addresses) & MISALIGNED:
                if known is None:
                    outputs, self._known = recorded(lambda: self._call(*inputs), *inputs)
                    return outputs
                replay, likes = known
                outputs = tuple([torch.empty_like(like) for like in likes])
                if replay(*addresses, *[tensor.data_ptr() for tensor in outputs]):
                    return outputs
        return self._call(*inputs)
