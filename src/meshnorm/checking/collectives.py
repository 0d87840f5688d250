"""Counting the collectives that really run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # what CommDebugMode is made of; it tells no bytes and no dims

from meshnorm.meshes import describe, group_name
from meshnorm.planning import Collective

_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
    "gather_": "gather",
}


class Recorder(TorchDispatchMode):
    """Records the collectives that run while it is entered: ``.seen`` lists them in order, in the terms of a Plan.

    A group that is not one of the mesh's dims is called by its own name.
    """

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.seen: list[Collective] = []
        facts = describe(mesh)
        dims = [(dim,) for dim, size in enumerate(facts.sizes) if size > 1] + sorted(facts.joint)
        self._names = {group_name(mesh, d): "_".join(facts.names[dim] for dim in d) for d in dims}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become local ops first
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("_c10d_functional", "c10d", "_c10d_functional_autograd") and name in _KINDS:
            self.seen.append(Collective(_KINDS[name], self._mesh_dim(args), _bytes(args[0])))
        return func(*args, **(kwargs or {}))

    def _mesh_dim(self, args: tuple) -> str:
        for arg in args:
            name = arg if isinstance(arg, str) else getattr(arg, "group_name", None)
            if name in self._names:
                return self._names[name]
        return next((arg for arg in reversed(args) if isinstance(arg, str)), "unknown")


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)
