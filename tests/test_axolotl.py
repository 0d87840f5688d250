"""Our plugin in Axolotl's plugin manager."""

from __future__ import annotations

import logging

import pytest
from norms import LlamaNorm
from torch import nn

import meshnorm
from meshnorm.errors import OptionError

base = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")


def test_the_plugin_converts_the_model_when_it_is_built(caplog) -> None:
    from axolotl.utils.dict import DictDefault

    manager = base.PluginManager.get_instance()
    manager.register("meshnorm.integrations.axolotl.MeshnormPlugin")
    assert list(manager.plugins) == ["meshnorm.integrations.axolotl.MeshnormPlugin"]
    cfg, model = DictDefault({"liger_rms_norm": None}), nn.Sequential(LlamaNorm(8), nn.Linear(8, 8))
    manager.pre_model_load(cfg)
    with caplog.at_level(logging.INFO, logger="meshnorm.integrations.axolotl"):
        manager.post_model_build(cfg, model)
    assert meshnorm.revert(model) == ("0",)
    assert "1 norm swapped, 0 left" in caplog.text
    with pytest.raises(OptionError, match="liger_rms_norm is set beside MeshnormPlugin"):
        manager.pre_model_load(DictDefault({"liger_rms_norm": True}))
