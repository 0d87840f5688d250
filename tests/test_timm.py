"""timm's own norms, converted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import meshnorm

try:
    from timm.layers import norm as layers
except Exception as error:  # timm needs a torchvision built for this torch, and says so in several ways
    pytest.skip(f"timm cannot be imported: {type(error).__name__}", allow_module_level=True)


@pytest.mark.parametrize("name", ["RmsNorm", "RmsNormFp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_over_the_last_dim_give_what_they_gave(name, dtype) -> None:
    theirs = getattr(layers, name)(64).to(dtype)
    nn.init.normal_(theirs.weight)
    ours = copy.deepcopy(theirs)
    (found,) = meshnorm.convert(ours).swapped
    assert (found.casting_mode, found.eps) == ("gemma", 1e-6)
    x = torch.randn(3, 5, 64, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", ["RmsNorm2d", "RmsNorm2dFp32", "SimpleNorm", "SimpleNormFp32", "LayerNorm"])
def test_norms_over_channels_and_other_formulas_are_left(name) -> None:
    assert meshnorm.convert(getattr(layers, name)(64)).left
