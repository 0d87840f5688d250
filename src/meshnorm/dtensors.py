"""DTensors taken apart and put together by their parts, through private APIs of theirs.

The public ways are ``DTensor.from_local``, which takes 40 to 56 µs on the host of an H200, and ``to_local``, 4 to 8, as
both are differentiable. Inside an autograd.Function, or where no gradient is wanted, nothing of that is used: torch's
own ops then make their results as ``made`` does, from a local tensor and a DTensorSpec which they keep for as long as
calls look the same. Here the spec is that of a DTensor that ``from_local`` once made.

Seen on torch 2.11 and 2.13. A release without these attributes is served by the public ways alone: ``is_open``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_open(x: Any) -> bool:
    """Whether the parts of the DTensor x, no subclass's, are where they are looked for."""
    spec = getattr(x, "_spec", None)
    return (
        type(x).__base__ is Tensor
        and isinstance(getattr(x, "_local_tensor", None), Tensor)
        and all(hasattr(spec, name) for name in ("mesh", "placements", "tensor_meta"))
    )


def local(x: Any) -> Tensor:
    """The local tensor, which a pending collective may still have to deliver."""
    return x._local_tensor


def layout(x: Any) -> tuple:
    """What distinguishes DTensors of one local tensor. Meshes by identity: of two equal ones one may be flattened."""
    spec = x._spec
    return id(spec.mesh), spec.placements, spec.tensor_meta.shape, getattr(spec, "shard_order", None)


def shards_in_order(x: Any) -> bool:
    """Whether mesh dims that shard the same dim of x do so in their own order, as ``placements`` says it. A spec may
    have another ``shard_order`` (torch 2.13; no public function makes one)."""
    order = getattr(getattr(x, "_spec", None), "shard_order", None) or ()
    return all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order)


def reusable_spec(x: Any) -> Any:
    """What makes DTensors like x, with ``made``; None where this release's cannot be made so."""
    try:
        made(x, x._local_tensor, x._spec)
    except (AttributeError, TypeError):
        return None
    return x._spec


def made(like: Any, local: Tensor, spec: Any) -> Any:
    """A DTensor, of ``like``'s class, of a local tensor that nothing else holds.

    Without ``DTensor.__init__``, which does nothing but is wrapped for torch.compile.
    """
    kind: Any = type(like)
    return kind.__new__(kind, local, spec, requires_grad=False)
