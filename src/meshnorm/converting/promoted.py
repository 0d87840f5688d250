"""weight · x̂ in the dtype to which the two promote, with the weight's gradient as ``rms_norm`` would leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from meshnorm.checks import is_dtensor
from meshnorm.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def scaled(x_hat: Tensor, weight: Tensor, weight_grad: str) -> Tensor:
    """``weight · x̂``. Beside a DTensor x̂ the weight may be plain, or a DTensor on the same mesh.

    Raises OptionError for a plain weight whose gradient is to be deferred: DTensor's own product sums it.
    """
    if not is_dtensor(x_hat):
        return weight * x_hat
    placed: DTensor = x_hat  # type: ignore[assignment]
    y: DTensor = _beside(placed, weight, weight_grad) * placed  # type: ignore[assignment]
    # A replicated x̂ times a sharded weight is sharded.
    return y if y.placements == placed.placements else y.redistribute(placements=placed.placements)


def _beside(x_hat: DTensor, weight: Tensor, weight_grad: str) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x_hat.device_mesh
    if not isinstance(weight, DTensor):
        if weight_grad == "deferred":
            raise OptionError(
                f"weight_grad is 'deferred', but the weight is a plain {weight.dtype} tensor beside a {x_hat.dtype} "
                f"DTensor, whose product promotes: give both the same dtype, or make the weight a DTensor"
            )
        return DTensor.from_local(weight, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if weight_grad == "reduced":  # what is wrapped anew gets its gradient in the placements in which it was wrapped
        local, placements = weight.to_local(), weight.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
    return weight
