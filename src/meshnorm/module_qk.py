"""The norms of queries and keys as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshnorm.functional_qk import qk_rms_norm
from meshnorm.module import RMSNorm

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


torch.fx.wrap("qk_rms_norm")  # as ``module`` does for rms_norm


class QKRMSNorm(torch.nn.Module):
    """The norms of queries and keys, as ``meshnorm.qk_rms_norm``; docs/qk.md says which arguments a model family has.

    Its parameters are ``q_norm.weight`` and ``k_norm.weight``, as in the attention of Qwen3, Gemma3, OLMo2, OLMoE and
    MiniMax-M2, whose checkpoints load: the part of an attention's state dict that begins with ``q_norm.`` and
    ``k_norm.`` is this module's.

    Args:
        q_size, k_size: the sizes of the last dims of q and of k, which are normalized; an int for one dim. ``k_size``
            defaults to ``q_size``: norms per head.
        eps: added to the mean of the squares.
        offset, casting_mode, weight_grad, q_output_placements, k_output_placements: as in ``meshnorm.qk_rms_norm``. The
            weights start at ``1 - offset``.
        elementwise_affine: whether there are weights.
        device, dtype: of the weights.

    Shape:
        q ``(*rows, *q_size)`` and k ``(*rows, *k_size)`` -> both normalized, each in its shape, dtype and layout.
    """

    def __init__(
        self,
        q_size: int | Sequence[int],
        k_size: int | Sequence[int] | None = None,
        eps: float | None = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
        weight_grad: str = "auto",
        q_output_placements: Sequence[Placement] | None = None,
        k_output_placements: Sequence[Placement] | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: Any = {"offset": offset, "casting_mode": casting_mode, "weight_grad": weight_grad}
        of_both = eps, elementwise_affine, device, dtype
        k_size = q_size if k_size is None else k_size
        self.q_norm = RMSNorm(q_size, *of_both, **options, output_placements=q_output_placements)
        self.k_norm = RMSNorm(k_size, *of_both, **options, output_placements=k_output_placements)

    def reset_parameters(self) -> None:
        """Sets the weights to ``1 - offset``."""
        self.q_norm.reset_parameters()
        self.k_norm.reset_parameters()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return qk_rms_norm(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            offset=self.q_norm.offset,
            casting_mode=self.q_norm.casting_mode,
            q_normalized_shape=self.q_norm.normalized_shape,
            k_normalized_shape=self.k_norm.normalized_shape,
            weight_grad=self.q_norm.weight_grad,
            q_output_placements=self.q_norm.output_placements,
            k_output_placements=self.k_norm.output_placements,
        )
