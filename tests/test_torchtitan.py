"""torchtitan's own norms, converted and overridden."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import meshnorm

modules = pytest.importorskip("torchtitan.models.common.nn_modules", reason="torchtitan is not installed")
llama3 = pytest.importorskip("torchtitan.models.llama3", reason="this torchtitan has no llama3")
override = pytest.importorskip("torchtitan.config.override", reason="this torchtitan has no overrides")


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for norm in (ours.to(dtype), theirs.to(dtype)):
            torch.manual_seed(0)
            x = torch.randn(3, 5, theirs.weight.shape[0], dtype=dtype, requires_grad=True)
            norm.zero_grad()
            y = norm(x)
            y.square().sum().backward()
            results.append((y, x.grad, norm.weight.grad))
        for found, expected in zip(*results, strict=True):
            close = 2 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(found, expected, rtol=close, atol=1e-2 if dtype is torch.bfloat16 else 1e-4)


def test_a_norm_that_torchtitan_built_is_converted() -> None:
    theirs = modules.RMSNorm.Config(normalized_shape=64).build()
    ours = copy.deepcopy(theirs)
    (found,) = meshnorm.convert(ours).swapped
    assert (found.casting_mode, found.eps) == ("gemma", 1e-5)
    for norm in (ours, theirs):
        norm._cache_pos_arg_names()
    assert ours._pos_arg_list == theirs._pos_arg_list  # what its shardings are keyed by
    _assert_same(ours, theirs)


def test_the_override_builds_ours_for_every_norm_of_a_model(monkeypatch) -> None:
    before = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    config = copy.deepcopy(before)
    imports = ["meshnorm.integrations.torchtitan.rms_norm"]
    lines = override.apply_overrides(override.OverrideConfig(imports=imports), config)
    from meshnorm.integrations.torchtitan import MeshnormRMSNorm

    assert len(lines) == 2 * len(config.layers) + 1
    norms = [config.norm, *(layer.attention_norm for layer in config.layers), *(x.ffn_norm for x in config.layers)]
    assert all(type(norm) is MeshnormRMSNorm.Config for norm in norms)
    assert config.norm.param_init == before.norm.param_init
    ours = config.norm.build()
    assert isinstance(ours, modules.RMSNorm) and not hasattr(ours, "_meshnorm_recipe")
    ours._cache_pos_arg_names()
    assert ours._pos_arg_list == ["input"]  # what torchtitan's shardings are keyed by, in every release of torch
    calls, real = [], meshnorm.functional.rms_norm
    monkeypatch.setattr(meshnorm.functional, "rms_norm", lambda *a, **k: calls.append(k) or real(*a, **k))
    _assert_same(ours, before.norm.build())
    assert len(calls) == 2
