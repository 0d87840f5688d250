"""Allocating a contiguous tensor at the least cost: ``torch.empty_like`` of a template.

On a CPU that takes 0.7 µs, where ``torch.empty`` with a dtype and a device takes 2.3 and ``new_empty`` 1.0 to 1.4.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def template(tensor: Tensor) -> Tensor:
    """What ``torch.empty_like`` makes contiguous tensors of, of the shape, dtype and device of ``tensor``: one number,
    expanded, which takes no memory. (Of one number itself a real one: ``empty_like`` would keep strides of 0.)"""
    if tensor.numel() == 1:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _number(tensor.dtype, tensor.device).expand(tensor.shape)


@functools.cache
def _number(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)
