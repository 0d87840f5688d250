"""The gated norm as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshnorm.errors import GroupSizeError, OptionError
from meshnorm.formula_gated import ACTIVATIONS
from meshnorm.functional_gated import gated_rms_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


torch.fx.wrap("gated_rms_norm")  # as ``module`` does for rms_norm


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm beside a gate, as ``meshnorm.gated_rms_norm``; docs/gated.md says which arguments a model family has.

    Its one parameter is ``weight``, as in the norms of Mamba 2, Bamba, Zamba 2, Nemotron-H, Qwen3-Next and Kimi-Linear:
    their checkpoints load.

    Args:
        hidden_size: the sizes of the last dims of x, which are normalized; an int for one dim.
        eps: added to the mean of the squares.
        norm_before_gate, activation, group_size, offset, casting_mode, weight_grad, output_placements: as in
            ``meshnorm.gated_rms_norm``. The weight starts at ``1 - offset``.
        elementwise_affine: whether there is a weight of shape ``hidden_size``.
        device, dtype: of the weight.

    Shape:
        x and gate ``(*rows, *hidden_size)`` -> y of x's shape and dtype, in x's layout. Without a gate it is the norm
        alone, in groups.
    """

    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        norm_before_gate: bool = True,
        activation: str = "silu",
        group_size: int | None = None,
        offset: float = 0.0,
        casting_mode: str = "llama",
        weight_grad: str = "auto",
        output_placements: Sequence[Placement] | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = (hidden_size,) if isinstance(hidden_size, int) else tuple(hidden_size)
        columns = math.prod(self.hidden_size)
        if group_size is not None and (group_size < 1 or columns % group_size):
            raise GroupSizeError(
                f"group_size is {group_size}, which does not divide {columns}: give a divisor, or None"
            )
        if activation not in ACTIVATIONS:
            raise OptionError(f'activation is {activation!r}: choose "silu" or "sigmoid"')
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.activation = activation
        self.group_size = group_size
        self.offset = offset
        self.casting_mode = casting_mode
        self.weight_grad = weight_grad
        self.output_placements = output_placements
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.empty(self.hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ``1 - offset``."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            norm_before_gate=self.norm_before_gate,
            activation=self.activation,
            group_size=self.group_size,
            offset=self.offset,
            casting_mode=self.casting_mode,
            normalized_shape=self.hidden_size,
            weight_grad=self.weight_grad,
            output_placements=self.output_placements,
        )

    def extra_repr(self) -> str:
        text = f"{self.hidden_size}, eps={self.eps}, norm_before_gate={self.norm_before_gate}"
        text += f", activation={self.activation!r}"
        if self.group_size is not None:
            text += f", group_size={self.group_size}"
        if self.offset:
            text += f", offset={self.offset}"
        if self.weight is None:
            text += ", elementwise_affine=False"
        return f"{text}, casting_mode={self.casting_mode!r}"
