"""torchtitan: an override that builds our norm wherever a model's config says ``RMSNorm.Config``.

On the command line ``--override.imports meshnorm.integrations.torchtitan.rms_norm``; ``fqns`` of torchtitan's own
overrides has no use here, since both norms are one function. A model that is built already is converted by
``meshnorm.convert(model)``, before ``parallelize``.

Seen with torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchtitan.config.override import derive, override  # type: ignore[import-not-found] # no dev dependency
from torchtitan.models.common.nn_modules import RMSNorm  # type: ignore[import-not-found]

import meshnorm.functional

__all__ = ["MeshnormRMSNorm", "rms_norm"]


class MeshnormRMSNorm(RMSNorm):
    """torchtitan's RMSNorm, computed by meshnorm: rounded where ``torch.nn.RMSNorm`` rounds, once, at the end.

    x ``(*rows, normalized_shape)``, plain or a DTensor in any layout -> y of the same shape, dtype and layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:  # the name that torchtitan's shardings use
        return meshnorm.functional.rms_norm(
            input, self.weight, self.eps, casting_mode="gemma", normalized_shape=self.normalized_shape
        )


@override(target=RMSNorm.Config, description="RMSNorm by meshnorm")
def rms_norm(config: RMSNorm.Config) -> MeshnormRMSNorm.Config:
    """Ours in the place of one norm's config."""
    return derive(config, MeshnormRMSNorm.Config)
