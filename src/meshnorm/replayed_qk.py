"""The norms of q and k on plain tensors of one signature: as ``replayed``, two at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshnorm import ops_qk
from meshnorm.ops_qk import Four
from meshnorm.replayed import Launches, signature

Options = tuple[float, float, str, int, int]  # eps, offset, casting mode, how many dims of q and of k are normalized


class QKNorm:
    """Both y, rstds and gradients for tensors of one signature."""

    __slots__ = ("_gradients", "_with_rstd", "_without_rstd", "options")

    def __init__(self, options: Options) -> None:
        self.options = options
        self._without_rstd = Launches(lambda *given: ops_qk.qk_without_rstd(*given, *options))  # type: ignore[arg-type]
        forward = ops_qk.qk_forward.direct  # type: ignore[attr-defined]
        self._with_rstd = Launches(lambda *given: forward(*given, *options))
        self._gradients: dict[tuple, Launches] = {}

    def ys(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both y of (q, k, weight of q, weight of k), for a call that needs no gradient."""
        return self._without_rstd(*tensors)  # type: ignore[return-value]

    def ys_and_rstds(self, *tensors: Tensor | None) -> Four:
        return self._with_rstd(*tensors)  # type: ignore[return-value]

    def gradients(self, given: tuple[Tensor | None, ...], *needs: Any) -> Four:
        """(dQ, dK, dW of q, dW of k), as ``ops_qk.qk_backward`` returns them.

        Unlike those of the forward, the tensors may be of any signature: hooks on saved tensors may have changed them.
        """
        _, offset, _, *ndims = self.options
        backward = ops_qk.qk_backward.direct  # type: ignore[attr-defined]
        launches = Launches.of(
            self._gradients,
            (*map(signature, given), needs),
            lambda *tensors: backward(*tensors, offset, *ndims, *needs),
        )
        return launches(*given)  # type: ignore[return-value]
