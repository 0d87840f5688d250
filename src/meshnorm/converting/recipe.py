"""What a converted module computes, as plain data: no tensors, no modules, so that it pickles and compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# (device type that autocast is on for, or None; x's dtype; the weight's dtype, or None without a weight)
Situation = tuple[str | None, torch.dtype, torch.dtype | None]

# How the module's y comes about in one situation.
FUSED = "fused"  # rms_norm(x, weight): y has x's dtype
RAISED = (
    "raised"  # rms_norm(x in the dtype that y has, weight): T5 beside a float32 weight, torch's norm under autocast
)
APART = "apart"  # weight · rms_norm(x): y has the dtype to which the two promote, as Llama's beside a float32 weight


@dataclass(frozen=True)
class Recipe:
    """How ``meshnorm.rms_norm`` is to be called in place of a module's own forward.

    ``weight`` and ``eps_name`` name attributes of the module that are read at each call, as its own forward does; an
    eps that no attribute holds stands in ``eps``. ``fixed`` has the other attributes on which y depends, with the
    values they had in the probe. ``ways`` maps each situation that was probed to one of the ways above and the dtype
    of y. In any other situation, and with other values, the module's own forward runs.
    """

    argument: str
    weight: str | None
    eps_name: str | None
    eps: float | None
    offset: float
    casting_mode: str
    normalized_shape: tuple[int, ...] | None
    ways: dict[Situation, tuple[str, torch.dtype]] = field(compare=False, repr=False)
    fixed: tuple[tuple[str, Any], ...] = ()
    hidden: str = "stats"
    weight_grad: str = "auto"

    def way(self, x: Tensor, weight: Tensor | None) -> tuple[str, torch.dtype] | None:
        device = x.device.type
        autocast = device if device != "meta" and torch.is_autocast_enabled(device) else None
        return self.ways.get((autocast, x.dtype, None if weight is None else weight.dtype))
