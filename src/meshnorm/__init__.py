"""meshnorm: RMSNorm for every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshnorm.converting.convert import convert, revert
from meshnorm.functional import add_rms_norm, rms_norm
from meshnorm.functional_gated import gated_rms_norm
from meshnorm.functional_qk import qk_rms_norm
from meshnorm.module import AddRMSNorm, RMSNorm
from meshnorm.module_gated import GatedRMSNorm
from meshnorm.module_qk import QKRMSNorm

if TYPE_CHECKING:
    from meshnorm.planning import Collective, Plan, plan

__version__ = "0.1.0.dev0"
__all__ = [
    "AddRMSNorm",
    "Collective",
    "GatedRMSNorm",
    "Plan",
    "QKRMSNorm",
    "RMSNorm",
    "add_rms_norm",
    "convert",
    "gated_rms_norm",
    "plan",
    "qk_rms_norm",
    "revert",
    "rms_norm",
]
if not torch.distributed.is_available():
    # Plans speak of placements, which such a build of torch does not have.
    __all__ = ["AddRMSNorm", "GatedRMSNorm", "QKRMSNorm", "RMSNorm", "add_rms_norm", "convert", "gated_rms_norm"]
    __all__ += ["qk_rms_norm", "revert", "rms_norm"]


def __getattr__(name: str) -> Any:
    if name in ("Collective", "Plan", "plan") and torch.distributed.is_available():
        from meshnorm import planning as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
