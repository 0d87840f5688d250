"""RMSNorm, and the norm behind an addition, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshnorm.functional import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


torch.fx.wrap("rms_norm")  # torch.fx.symbolic_trace takes it as one call; it does not look into torch.nn.RMSNorm either


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dims of a plain tensor or of a DTensor in any layout.

    A ``torch.nn.RMSNorm``: same arguments, parameter, state dict and defaults, so that one class name is all that
    changes. That includes ``eps=None``, which is float32's machine epsilon (float64's for a float64 x); most models
    want 1e-5 or 1e-6, and ``rms_norm`` defaults to 1e-6.

    Args:
        normalized_shape: the sizes of the last dims of x, an int for one dim.
        eps: added to the mean of the squares.
        elementwise_affine: whether there is a weight of shape ``normalized_shape``.
        device, dtype: of the weight.
        offset: added to the weight; the weight starts at ``1 - offset``, so that the norm starts at a scale of 1.
        casting_mode, hidden, weight_grad, output_placements, in_place: as in ``meshnorm.rms_norm``.

    Shape:
        x ``(*rows, *normalized_shape)`` -> y of the same shape and dtype, in x's layout.
    """

    # Class attributes, so that an instance of torch.nn.RMSNorm whose class was swapped has them too.
    offset: float = 0.0
    casting_mode: str = "llama"
    hidden: str = "stats"
    weight_grad: str = "auto"
    output_placements: Sequence[Placement] | None = None
    in_place: bool = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
        hidden: str = "stats",
        weight_grad: str = "auto",
        output_placements: Sequence[Placement] | None = None,
        in_place: bool = False,
    ) -> None:
        self.__dict__["offset"] = offset  # reset_parameters, called by the parent's __init__, reads it
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self.offset = offset
        self.casting_mode = casting_mode
        self.hidden = hidden
        self.weight_grad = weight_grad
        self.output_placements = output_placements
        self.in_place = in_place

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - offset``."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(
            x,
            self.weight,
            self.eps,
            offset=self.offset,
            casting_mode=self.casting_mode,
            normalized_shape=self.normalized_shape,
            hidden=self.hidden,
            weight_grad=self.weight_grad,
            output_placements=self.output_placements,
            in_place=self.in_place,
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.offset:
            text += f", offset={self.offset}"
        return f"{text}, casting_mode={self.casting_mode!r}"


class AddRMSNorm(RMSNorm):
    """``residual_out = x + residual`` and its RMSNorm, as ``meshnorm.add_rms_norm``: a ``RMSNorm`` whose ``forward``
    takes the residual too, with the same parameter and state dict.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype, offset: as of ``RMSNorm``.
        casting_mode, weight_grad, output_placements: as in ``meshnorm.add_rms_norm``.

    Shape:
        x and residual ``(*rows, *normalized_shape)`` -> y of x's dtype, residual_out of the residual's
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
        weight_grad: str = "auto",
        output_placements: Sequence[Placement] | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            offset=offset,
            casting_mode=casting_mode,
            weight_grad=weight_grad,
            output_placements=output_placements,
        )

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(
            x,
            residual,
            self.weight,
            self.eps,
            offset=self.offset,
            casting_mode=self.casting_mode,
            normalized_shape=self.normalized_shape,
            weight_grad=self.weight_grad,
            output_placements=self.output_placements,
        )
