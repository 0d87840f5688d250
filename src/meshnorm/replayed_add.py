"""The norm behind an addition on plain tensors of one signature: as ``replayed``, with a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshnorm import ops_add
from meshnorm.replayed import Launches, signature

Options = tuple[float, float, str, int]  # eps, offset, casting mode, how many dims are normalized


class AddNorm:
    """y, residual_out, rstd and gradients for tensors of one signature."""

    __slots__ = ("_gradients", "_with_rstd", "_without_rstd", "options")

    def __init__(self, options: Options) -> None:
        self.options = options
        self._without_rstd = Launches(lambda *given: ops_add.add_without_rstd(*given, *options))  # type: ignore[arg-type]
        forward = ops_add.add_forward.direct  # type: ignore[attr-defined]
        self._with_rstd = Launches(lambda *given: forward(*given, *options))
        self._gradients: dict[tuple, Launches] = {}

    def outputs(self, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """(y, residual_out), for a call that needs no gradient."""
        return self._without_rstd(x, residual, weight)  # type: ignore[return-value]

    def outputs_and_rstd(self, x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._with_rstd(x, residual, weight)  # type: ignore[return-value]

    def gradients(
        self,
        dy: Tensor,
        residual_out: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        d_residual_out: Tensor | None,
        *dtypes: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dX, dResidual, dW), as ``ops_add.add_backward`` returns them.

        Unlike those of the forward, the tensors may be of any signature: hooks on saved tensors may have changed them.
        """
        given: Any = dy, residual_out, weight, rstd, d_residual_out
        _, offset, _, ndim = self.options
        backward = ops_add.add_backward.direct  # type: ignore[attr-defined]
        launches = Launches.of(
            self._gradients,
            (*map(signature, given), dtypes),
            lambda *tensors: backward(*tensors, offset, ndim, *dtypes),
        )
        return launches(*given)  # type: ignore[return-value]
