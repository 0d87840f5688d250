"""Liger's names: its arguments in its order, and results that are right on plain tensors and DTensors."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshnorm
from meshnorm import liger, rms_norm
from meshnorm.checking.case import mesh_for
from meshnorm.errors import CastingModeError, OptionError

# name: (parameters in order, defaults of the last ones), as in liger-kernel 0.8.5.
NORM = ["hidden_size", "eps", "offset", "casting_mode", "init_fn", "in_place", "row_mode"]
SCALED = ["dim", "eps", "offset", "casting_mode", "init_fn", "in_place", "with_scale"]
SIGNATURES = {
    "LigerRMSNorm": ([*NORM, "elementwise_affine"], (1e-6, 0.0, "llama", "ones", True, None, True)),
    "LigerRMSNormForGemma": (NORM, (1e-6, 1.0, "gemma", "zeros", True, None)),
    "LigerRMSNormForGemma2": (NORM, (1e-6, 1.0, "gemma", "zeros", False, None)),
    "LigerRMSNormForGemma3": (["dim", *NORM[1:-1]], (1e-6, 1.0, "gemma", "zeros", False)),
    "LigerRMSNormForGemma4": (SCALED, (1e-6, 0.0, "gemma", "ones", False, True)),
    "LigerRMSNormForMuseGlimmer": (SCALED, (None, 1e-6, 0.0, "gemma", "ones", False, True)),
    "LigerRMSNormForMuseGlimmerTextCentered": (NORM, (1e-6, 1.0, "gemma", "zeros", False, None)),
    "LigerRMSNormForOlmo2": (NORM, (1e-6, 0.0, "llama", "ones", False, None)),
    "LigerRMSNormForGlm4": (NORM, (1e-6, 0.0, "llama", "ones", False, None)),
    "LigerRMSNormForQwen3Next": (NORM, (1e-6, 1.0, "gemma", "zeros", False, None)),
    "LigerFusedAddRMSNorm": (NORM[:-1], (1e-6, 0.0, "llama", "ones", False)),
    "liger_rms_norm": (["X", "W", "eps", "offset", "casting_mode", "in_place"], (0.0, "llama", True)),
    "liger_fused_add_rms_norm": (
        ["X", "R", "W", "eps", "offset", "casting_mode", "in_place"],
        (0.0, "llama", True),
    ),
}
APPLIED = {
    "LigerRMSNormFunction": (
        ["X", "W", "eps", "offset", "casting_mode", "in_place", "row_mode"],
        (0.0, "llama", True, None),
    ),
    "LigerFusedAddRMSNormFunction": (
        ["X", "R", "W", "eps", "offset", "casting_mode", "in_place"],
        (0.0, "llama", False),
    ),
}


def _positional(function) -> tuple[list[str], tuple]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in parameters], tuple(p.default for p in parameters if p.default is not p.empty)


def test_names_arguments_order_and_defaults_are_ligers() -> None:
    for name, expected in SIGNATURES.items():
        assert _positional(getattr(liger, name)) == expected, name
    for name, (names, defaults) in APPLIED.items():
        found = _positional(getattr(liger, name).apply)
        assert found == ([*names, "gather"], (*defaults, False)), name
    assert sorted(liger.__all__) == sorted({**SIGNATURES, **APPLIED})


def test_the_installed_liger_has_these_arguments() -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    functional = importlib.import_module("liger_kernel.transformers.functional")
    modules = importlib.import_module("liger_kernel.transformers.rms_norm")
    fused = importlib.import_module("liger_kernel.transformers.fused_add_rms_norm")
    for name, expected in SIGNATURES.items():
        theirs = next(getattr(m, name) for m in (functional, modules, fused) if hasattr(m, name))
        assert _positional(theirs) == expected, name
    ops = importlib.import_module("liger_kernel.ops")
    for name, expected in APPLIED.items():
        names, defaults = _positional(getattr(ops, name).forward)
        assert (names[1:], defaults) == expected, name


@pytest.mark.parametrize("mode", ["llama", "gemma", "none", 0, 1, -1])
@pytest.mark.parametrize("affine", [True, False])
def test_every_form_gives_the_norm(mode, affine) -> None:
    x, w = torch.randn(3, 5, 24).bfloat16(), torch.randn(24).bfloat16() if affine else None
    name = {0: "llama", 1: "gemma", -1: "none"}.get(mode, mode)
    expected = rms_norm(x, w, 1e-5, offset=0.5, casting_mode=name)
    assert torch.equal(liger.LigerRMSNormFunction.apply(x, w, 1e-5, 0.5, mode, False, True), expected)
    assert torch.equal(liger.liger_rms_norm(x, w, 1e-5, 0.5, mode), expected)
    module = liger.LigerRMSNorm(24, 1e-5, 0.5, mode, "zeros", elementwise_affine=affine).bfloat16()
    assert list(module.state_dict()) == (["weight"] if affine else [])
    if w is not None:
        module.load_state_dict({"weight": w})
    assert torch.equal(module(hidden_states=x), expected)
    y, total = liger.liger_fused_add_rms_norm(x, 2 * x, w, 1e-5, 0.5, mode)
    assert torch.equal(total, x + 2 * x)
    assert torch.equal(y, rms_norm(x + 2 * x, w, 1e-5, offset=0.5, casting_mode=name))


def test_a_gradient_that_a_residual_branch_reads_too_stays_right() -> None:
    """Liger's default, in_place=True, would write dX over the dY that the residual branch still needs."""
    for make in (liger.LigerRMSNorm, lambda n: liger.LigerRMSNorm(n, in_place=True), liger.LigerFusedAddRMSNorm):
        norm = make(24)
        x = torch.randn(5, 24, requires_grad=True)
        residual = torch.randn(5, 24, requires_grad=True)
        y = norm(x) if isinstance(norm, liger.LigerRMSNorm) else norm(x, torch.zeros(5, 24))[0]
        (y + residual).square().sum().backward()
        exact = x.detach().double().requires_grad_()
        other = residual.detach().double().requires_grad_()
        (rms_norm(exact, norm.weight.detach().double(), 1e-6) + other).square().sum().backward()
        torch.testing.assert_close(x.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(residual.grad, other.grad.float(), rtol=1e-5, atol=1e-6)


def test_the_fused_addition_has_the_gradients_of_its_two_steps() -> None:
    x, r, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 24), (5, 24), (24,)))
    dy, ds = torch.randn(5, 24, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)
    y, total = liger.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 1.0, "gemma")
    found = torch.autograd.grad((y, total), (x, r, w), (dy, ds))
    h = (x + r).detach().requires_grad_()
    dx, dw = torch.autograd.grad(rms_norm(h, w, 1e-6, offset=1.0), (h, w), dy)
    for gradient, expected in zip(found, (dx + ds, dx + ds, dw), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_presets_start_at_a_scale_of_one_and_drop_the_weight_where_asked() -> None:
    x = torch.randn(5, 24)
    for name in SIGNATURES:
        if "For" in name:
            norm = getattr(liger, name)(24)
            torch.testing.assert_close(norm(x), rms_norm(x), rtol=1e-6, atol=1e-6)
    norm = liger.LigerRMSNormForMuseGlimmer(with_scale=False)
    assert norm.weight is None and torch.equal(norm(x), rms_norm(x))
    with pytest.raises(OptionError, match="dim is None"):
        liger.LigerRMSNormForMuseGlimmer()


def test_wrong_options_are_named() -> None:
    with pytest.raises(OptionError, match="init_fn is 'randn'"):
        liger.LigerRMSNorm(24, init_fn="randn")
    for mode in ("mistral", 7):
        with pytest.raises(CastingModeError, match="casting_mode is"):
            liger.liger_rms_norm(torch.ones(2, 24), None, 1e-6, 0.0, mode)


@pytest.mark.parametrize("name", ["LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma4"])
def test_copies_are_the_same_norm(name) -> None:
    norm, x = getattr(liger, name)(24), torch.randn(5, 24)
    nn.init.normal_(norm.weight)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(twin) is type(norm) and repr(twin) == repr(norm) and torch.equal(twin(x), norm(x))
    assert meshnorm.convert(norm).left[0].reason == "it is meshnorm's already"


def _on_ranks(placement: str, gather: bool) -> None:
    """x is no leaf, as behind a column-parallel linear; the weight is plain, or a DTensor."""
    mesh = mesh_for((("tp", 2),))
    torch.manual_seed(0)
    whole, weight = torch.randn(4, 6, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    dy = torch.randn(4, 6, 8, dtype=torch.float64)
    leaf, w = whole.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = rms_norm(2 * leaf, w, 1e-6)
    expected.backward(dy)
    where = {"hidden": Shard(2), "sequence": Shard(1), "replicated": Replicate()}[placement]
    for plain in (True, False):
        x = distribute_tensor(whole, mesh, [where]).requires_grad_()
        held: Tensor = weight.clone() if plain else distribute_tensor(weight, mesh, [Replicate()])
        held = held.detach().requires_grad_()
        y = liger.LigerRMSNormFunction.apply(2 * x, held, 1e-6, 0.0, "llama", True, None, gather)
        if gather:
            assert not isinstance(y, DTensor)
            torch.testing.assert_close(y, expected)
            y.backward(dy)
        else:
            assert isinstance(y, DTensor) and y.placements == (where,)
            torch.testing.assert_close(y.full_tensor(), expected)
            y.backward(distribute_tensor(dy, mesh, [where]))
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)
        assert isinstance(held.grad, DTensor) is not plain
        torch.testing.assert_close(held.grad if plain else held.grad.full_tensor(), w.grad)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("placement", ["hidden", "sequence", "replicated"])
def test_on_dtensors_y_and_all_gradients_are_right(pool2, placement, gather) -> None:
    pool2.run(_on_ranks, placement, gather)
