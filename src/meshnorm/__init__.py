"""meshnorm: RMSNorm for every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshnorm.functional import rms_norm
from meshnorm.module import RMSNorm

if TYPE_CHECKING:
    from meshnorm.planning import Collective, Plan, plan

__version__ = "0.1.0.dev0"
__all__ = ["Collective", "Plan", "RMSNorm", "plan", "rms_norm"]


def __getattr__(name: str) -> Any:
    # Plans speak of placements, which a torch built without distributed does not have.
    if name in ("Collective", "Plan", "plan"):
        from meshnorm import planning as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
