"""Axolotl: a plugin that converts the model as soon as it is built, before adapters and wrappers.

In the config::

    plugins:
      - meshnorm.integrations.axolotl.MeshnormPlugin

Leave ``liger_rms_norm`` unset: both would replace the same norms. Seen with Axolotl 0.19.0.
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found] # no dev dependency
from torch import nn

from meshnorm.converting.convert import convert
from meshnorm.errors import OptionError

__all__ = ["MeshnormPlugin"]

_LOG = logging.getLogger(__name__)


class MeshnormPlugin(BasePlugin):
    """Has meshnorm compute every RMSNorm of the model; what was swapped, and what was not, is logged."""

    def pre_model_load(self, cfg: Any) -> None:
        if cfg.get("liger_rms_norm"):
            raise OptionError("liger_rms_norm is set beside MeshnormPlugin: both replace the model's norms; unset one")

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        _LOG.info("%s", convert(model))
