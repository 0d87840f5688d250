"""The collectives of a route on local tensors, padded where shards are uneven.

They are the functional collectives that DTensor itself issues (``torch.ops._c10d_functional``; torch 2.11, 2.13, 2.14):
they can be traced by torch.compile, counted by ``CommDebugMode``, and take a group by its name. Private to torch, and
used here alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshnorm.geometry import Interval

_functional = torch.ops._c10d_functional


def all_reduce(local: Tensor, op: str, group: str, parts: int) -> Tensor:
    """The reduction of ``local`` over the group of ``parts`` ranks; "avg" as a sum divided, which every backend has."""
    summed = _functional.all_reduce(local.contiguous(), "sum" if op == "avg" else op, group)
    summed = _functional.wait_tensor(summed)
    return summed / parts if op == "avg" else summed


def reduce_scatter(local: Tensor, op: str, group: str, sizes: Sequence[int], index: int, dim: int) -> Tensor:
    """The reduction of ``local``, of which this rank keeps the ``index``-th part of ``dim``, cut into ``sizes``."""
    longest = max(sizes)
    parts = [_padded(part, dim, longest) for part in local.split(list(sizes), dim)]
    stacked = torch.stack(parts)
    mine = _functional.reduce_scatter_tensor(stacked, "sum" if op == "avg" else op, len(sizes), group)
    mine = _functional.wait_tensor(mine).squeeze(0).narrow(dim, 0, sizes[index])
    return (mine / len(sizes) if op == "avg" else mine).contiguous()


def all_gather(local: Tensor, group: str, pieces: Sequence[Sequence[Interval]], dim: int) -> Tensor:
    """The whole of ``dim``, of which the i-th rank of the group holds the ranges ``pieces[i]``, one after the other."""
    sizes = [sum(stop - start for start, stop in piece) for piece in pieces]
    padded = _padded(local, dim, max(sizes)).contiguous()
    gathered = _functional.all_gather_into_tensor(padded.unsqueeze(0), len(pieces), group)
    gathered = _functional.wait_tensor(gathered)
    found = []
    for rank, piece in enumerate(pieces):
        at = 0
        for start, stop in piece:
            found.append((start, gathered[rank].narrow(dim, at, stop - start)))
            at += stop - start
    if not found:  # a dim of size 0
        return local
    return torch.cat([part for _, part in sorted(found, key=lambda entry: entry[0])], dim)


def _padded(local: Tensor, dim: int, size: int) -> Tensor:
    missing = size - local.size(dim)
    if missing == 0:
        return local
    shape = list(local.shape)
    shape[dim] = missing
    return torch.cat([local, local.new_zeros(shape)], dim)
