"""A ``ParallelStyle`` for norms whose x is sharded along the dims that they normalize."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from meshnorm.checks import check_untransformed
from meshnorm.converting.converted import is_converted
from meshnorm.errors import OptionError, PlacementError
from meshnorm.module import RMSNorm

__all__ = ["HiddenParallel"]


class HiddenParallel(ParallelStyle):
    """Keeps x sharded along its last dim through the norm, between a ``ColwiseParallel`` and a ``RowwiseParallel``.

    For ``meshnorm.RMSNorm`` and converted norms. The weight is sharded along, each rank owning the part that scales its
    columns; each pass exchanges one number a row. A plain input is taken as this rank's part of the last dim (cut as
    ``torch.chunk`` cuts it, uneven too); a DTensor in another layout is redistributed first. The output stays sharded.

    Keyword Args:
        use_local_output: return the local part as a plain tensor instead of the DTensor.

    Raises:
        OptionError: the module is not one that can norm a sharded row.
        PlacementError: a plain input is not as wide as this rank's part.

    Example:
        >>> parallelize_module(block, mesh["tp"], {  # doctest: +SKIP
        ...     "up": ColwiseParallel(use_local_output=False),  # -> (batch, sequence, hidden), Shard(2)
        ...     "norm": HiddenParallel(),  # -> Shard(2)
        ...     "down": RowwiseParallel(),
        ... })
    """

    def __init__(self, *, use_local_output: bool = False) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not (isinstance(module, RMSNorm) or is_converted(module)):
            raise OptionError(
                f"HiddenParallel is for meshnorm.RMSNorm and converted norms, and this is a {type(module).__name__}: "
                f"call meshnorm.convert on it first"
            )
        return distribute_module(
            module,
            device_mesh,
            self._shard_weight,
            _sharded_input,  # type: ignore[arg-type]
            partial(_output, self.use_local_output),  # type: ignore[arg-type]
        )

    def _shard_weight(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(
                weight.detach(), device_mesh, [Shard(weight.ndim - 1)], src_data_rank=self.src_data_rank
            )
            module.register_parameter(key, nn.Parameter(sharded, requires_grad=weight.requires_grad))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(use_local_output={self.use_local_output})"


def _sharded_input(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> Any:
    if not inputs:
        raise OptionError(
            f"the {type(module).__name__} was called with named arguments alone: HiddenParallel shards the first "
            f"positional one; pass x by its position"
        )
    x, *others = inputs
    return (hidden_sharded(x, device_mesh, _width(module)), *others)


def _output(use_local_output: bool, module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Any:
    return output.to_local() if use_local_output else output


def _width(module: nn.Module) -> int | None:
    """The whole size of the last dim; None for a norm that takes any."""
    for weight in module.parameters(recurse=False):
        return weight.shape[-1]
    shape = getattr(module, "normalized_shape", None)
    return shape[-1] if shape else None


def hidden_sharded(x: Tensor, device_mesh: DeviceMesh, width: int | None) -> DTensor:
    """x as a DTensor sharded along its last dim, whose whole size is ``width`` (None: the same on every rank)."""
    wanted = (Shard(x.ndim - 1),)
    if isinstance(x, DTensor):
        return x if x.placements in (wanted, (Shard(-1),)) else x.redistribute(device_mesh, wanted)
    check_untransformed(x)
    parts = device_mesh.size()
    width = x.shape[-1] * parts if width is None else width
    each = -(-width // parts)
    rank = device_mesh.get_local_rank()
    part = max(0, min(width, (rank + 1) * each) - rank * each)
    if x.shape[-1] != part:
        raise PlacementError(
            f"x is a plain tensor whose last dim has size {x.shape[-1]}, but rank {rank} of {parts} holds {part} of "
            f"{width} columns: pass this rank's columns, or a DTensor"
        )
    shape = torch.Size((*x.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, device_mesh, wanted, run_check=False, shape=shape, stride=stride)
