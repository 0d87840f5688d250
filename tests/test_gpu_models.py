"""Converted norms and models on a GPU: recognised there, as right as before, the loss curve they had; Liger's beside.

A GPU's kernels add the squares of a row in their own order, so that y differs from the norm's own in the last bit of
the float32 statistic, and in bfloat16 in the rounding of a few elements.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
from norms import GemmaStyleNorm, LlamaNorm, NoneStyleNorm, RootAndDivisionNorm, T5StyleNorm, WeightlessNorm
from tiny_models import FAMILIES, Family, converted, error_of, judge, model_of, train
from torch import Tensor, nn

import meshnorm
from meshnorm import liger

pytestmark = pytest.mark.gpu

ULP = 2.0**-23
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
KINDS = {
    "torch": lambda: nn.RMSNorm(1024, eps=1e-6),
    "llama": lambda: LlamaNorm(1024),
    "gemma": lambda: RootAndDivisionNorm(1024),
    "gemma, offset": lambda: GemmaStyleNorm(1024),
    "none": lambda: NoneStyleNorm(1024),
    "t5": lambda: T5StyleNorm(1024),
    "without weight": lambda: WeightlessNorm(),
}


def _gradients(norm: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    found = torch.autograd.grad(norm(leaf), [leaf, *norm.parameters()], dy)
    return {str(place): gradient for place, gradient in enumerate(found)}


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["cuda", "cpu, then moved"])
def test_a_norm_converted_on_the_gpu_gives_what_it_gave(kind, dtype, where) -> None:
    torch.manual_seed(0)
    own = KINDS[kind]().to(dtype)
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    found = copy.deepcopy(own)
    if where == "cuda":
        found = found.cuda()
        assert meshnorm.convert(found).swapped
    else:
        assert meshnorm.convert(found).swapped
        found = found.cuda()
    own = own.cuda()
    x, dy = (torch.randn(512, 1024, device="cuda", dtype=dtype) for _ in range(2))
    y, expected = found(x), own(x)
    assert y.dtype == expected.dtype
    rtol = 8 * ULP if dtype is torch.float32 else 2.0**-6  # a rounding of x̂, and that of y
    torch.testing.assert_close(y, expected, rtol=rtol, atol=1e-6)
    assert dtype is torch.float32 or (y != expected).double().mean() < 0.01
    exact = copy.deepcopy(own).double()
    assert meshnorm.convert(exact).swapped
    best = _gradients(exact, x.double(), dy.double())
    ours, theirs = (error_of(_gradients(norm, x, dy), best) for norm in (found, own))
    assert ours <= 1.1 * theirs + torch.finfo(dtype).eps / 2
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = found(x), own(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2.0**-6, atol=1e-3)


@DTYPES
@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.recurrent], ids=str)
def test_a_converted_model_has_the_loss_curve_it_had(family: Family, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed")
    model = model_of(family, dtype).cuda()
    own, exact = train(copy.deepcopy(model), 10), train(judge(model), 10)
    found = train(converted(model, family), 10)
    apart = max(abs(a - b) for a, b in zip(found.losses, own.losses, strict=True))
    noise = max(abs(a - b) for a, b in zip(own.losses, exact.losses, strict=True))
    assert own.losses[0] - own.losses[-1] > 0.5
    # Some norms' rounding, and the order in which experts' results are added, which no two runs share.
    assert apart <= (64 * ULP * own.losses[0] if dtype is torch.float32 else 2 * noise + 5e-3)
    ours, theirs = (error_of(each.gradients, exact.gradients) for each in (found, own))
    assert ours <= 1.25 * theirs + torch.finfo(dtype).eps


@DTYPES
@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_ligers_own_norm_gives_what_ours_gives_under_its_name(mode, dtype) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    theirs = importlib.import_module("liger_kernel.ops").LigerRMSNormFunction
    torch.manual_seed(0)
    x = torch.randn(3, 64, 1024, device="cuda", dtype=dtype)
    weight, dy = torch.randn(1024, device="cuda", dtype=dtype), torch.randn_like(x)
    results = []
    for function in (liger.LigerRMSNormFunction, theirs):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function.apply(*leaves, 1e-6, 0.0, mode, False, None)
        results.append([y, *torch.autograd.grad(y, leaves, dy.clone())])
    for ours, other in zip(*results, strict=True):
        assert (ours.double() - other.double()).norm() <= 4 * torch.finfo(dtype).eps * other.double().norm()


def test_training_steps_are_timed_with_every_provider(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    bench = importlib.import_module("train_step")
    out = tmp_path / "found"
    assert bench.main(["--tiny", "--steps", "3", "--models", "qwen3-1.7b", "--out", str(out)]) == 0
    words = out.with_suffix(".txt").read_text()
    assert all(f"| {name}" in words for name in ("original", "compile", "meshnorm", "nothing"))
    assert "meshnorm | not timed" not in words
