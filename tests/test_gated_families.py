"""The gated norms of model families as Transformers has them, beside ours with the arguments that docs/gated.md gives.

In float64 both are one function. Where theirs are rounded ours is, in the same order; what differs is torch's own
sigmoid, which takes another exponential than ours where it is vectorised: 1 in 25 of its float32 results differs in
the last bit, and with it, where that decides how a 16-bit number is rounded, a few of y's.
"""

from __future__ import annotations

import importlib
import inspect
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshnorm import GatedRMSNorm
from meshnorm.formula_gated import Gated, reference_gated_backward, reference_gated_forward

pytest.importorskip("transformers", reason="Transformers is not installed: pip install meshnorm[transformers]")

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
WIDTH, GROUPS = 96, 4
MAMBA = {"norm_before_gate": False, "group_size": WIDTH // GROUPS}
KIMI = {"activation": "sigmoid", "casting_mode": "gemma"}
# (module, class): (what theirs takes beside the width, what ours does)
FAMILIES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("mamba2", "MambaRMSNormGated"): ({"group_size": WIDTH // GROUPS}, MAMBA),
    ("bamba", "BambaRMSNormGated"): ({"group_size": WIDTH // GROUPS}, MAMBA),
    ("zamba2", "Zamba2RMSNormGated"): ({"group_size": WIDTH // GROUPS}, MAMBA),
    ("nemotron_h", "NemotronHRMSNormGated"): ({"group_size": WIDTH // GROUPS}, MAMBA),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"): ({"group_size": WIDTH // GROUPS}, MAMBA),
    ("falcon_h1", "FalconH1RMSNormGated"): (
        {"n_groups": GROUPS, "norm_before_gate": False},
        {**MAMBA, "casting_mode": "gemma"},
    ),
    ("falcon_h1", "FalconH1RMSNormGated of a norm before the gate"): (
        {"n_groups": GROUPS, "norm_before_gate": True},
        {"group_size": WIDTH // GROUPS, "casting_mode": "gemma"},
    ),
    ("qwen3_next", "Qwen3NextRMSNormGated"): ({}, {}),
    ("qwen3_5", "Qwen3_5RMSNormGated"): ({}, {}),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated"): ({}, {}),
    ("olmo_hybrid", "OlmoHybridRMSNormGated"): ({}, {}),
    ("kimi_linear", "KimiLinearRMSNormGated"): ({}, KIMI),
    ("glm5_next", "Glm5NextTextRMSNormGated"): ({}, KIMI),
    ("bailing_hybrid", "BailingHybridRMSNormGated"): ({}, KIMI),
    ("lara_mini", "LaraMiniRMSNormGated"): ({}, {"casting_mode": "gemma"}),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated"): ({}, {}),
}
# Of x, the gate and the weight. A weight in float32 beside a narrow x: under autocast, and as Kimi-Linear keeps it. An
# x in float32: a scan that does not round what it returns.
MIXES = [(F32, F32, F32), (BF16, BF16, BF16), (BF16, BF16, F32), (F32, BF16, BF16), (BF16, F32, BF16)]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def _kind(family: tuple[str, str]) -> Any:
    """The family's class, None where the installed Transformers has none."""
    module, name = family[0], family[1].split()[0]
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    except (ImportError, AttributeError):
        return None


def _arguments(family: tuple[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the family's class takes, and what ours does. Some of them have no groups in Transformers 5.22."""
    theirs_takes, ours_takes = FAMILIES[family]
    kind = _kind(family)
    if kind is None or "group_size" not in theirs_takes or "group_size" in inspect.signature(kind).parameters:
        return theirs_takes, ours_takes
    return {}, {**ours_takes, "group_size": None}


def _pair(family: tuple[str, str], eps: float, dtype: torch.dtype) -> tuple[nn.Module, GatedRMSNorm]:
    """(theirs with a random weight, ours with what theirs saved)."""
    kind = _kind(family)
    if kind is None:
        pytest.skip(f"the installed Transformers has no {'.'.join(family)}")
    theirs_takes, ours_takes = _arguments(family)
    theirs = kind(WIDTH, eps=eps, **theirs_takes).to(dtype)
    nn.init.normal_(theirs.weight, 1.0, 0.5)
    ours = GatedRMSNorm(WIDTH, eps, **ours_takes, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _run(norm: nn.Module, x: Tensor, gate: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """(y in x's dtype, dX, dGate, dW)."""
    leaves = [t.clone().requires_grad_() for t in (x, gate)]
    norm.zero_grad()
    y = norm(*leaves).to(x.dtype)
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves), norm.weight.grad  # type: ignore[return-value]


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(str(dtype).removeprefix("torch.") for dtype in mix))
@pytest.mark.parametrize("family", FAMILIES, ids=".".join)
def test_it_is_the_family_s_norm(family: tuple[str, str], mix: tuple[torch.dtype, ...], eps: float) -> None:
    theirs, ours = _pair(family, eps, mix[2])
    x, dy = (torch.randn(4, 64, WIDTH).to(mix[0]) for _ in range(2))
    gate = (torch.randn(4, 64, WIDTH) * 2).to(mix[1])
    found, expected = _run(ours, x, gate, dy), _run(theirs, x, gate, dy)

    unit = torch.finfo(mix[0]).eps
    if mix[0] == BF16:
        assert (found[0] == expected[0]).double().mean() > 0.999
        torch.testing.assert_close(found[0], expected[0], rtol=unit, atol=0.0)  # one rounding, the other way
    else:
        torch.testing.assert_close(found[0], expected[0], rtol=8 * unit, atol=unit**2)

    how = Gated(eps, 0.0, "gemma", ours.norm_before_gate, ours.activation, ours.group_size or WIDTH)
    wide = x.double(), gate.double(), theirs.weight.detach().double()
    exact = reference_gated_forward(*wide, how), *reference_gated_backward(dy.double(), *wide, how)
    for name, a, b, true in zip(("y", "dX", "dGate", "dW"), found, expected, exact, strict=True):
        assert true is not None and a.dtype == b.dtype
        ours_off, theirs_off = ((t.double() - true).norm() for t in (a, b))
        # Of two that are rounded alike either may be nearer by chance: by a hundredth, or in float32 half a rounding.
        allowed = 1.01 * theirs_off + (0.25 * torch.finfo(F32).eps) * true.norm()
        assert ours_off <= allowed, f"{name}: {ours_off:.3g} from float64, theirs {theirs_off:.3g}"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f[0] in ("mamba2", "falcon_h1")], ids=".".join)
def test_without_a_gate_it_is_the_family_s_norm_too(family: tuple[str, str]) -> None:
    theirs, ours = _pair(family, 1e-5, BF16)
    x = torch.randn(4, 64, WIDTH).bfloat16()
    assert torch.equal(ours(x), theirs(x).to(BF16))


def test_another_family_s_arguments_are_another_norm() -> None:
    """What the comparison above sees: every family's arguments, tried on every other."""
    x, gate, dy = (torch.randn(4, 64, WIDTH).bfloat16() for _ in range(3))
    kinds = {str(_arguments(family)[1]): family for family in FAMILIES if _kind(family) is not None}
    for family in kinds.values():
        theirs, _ = _pair(family, 1e-5, BF16)
        for other in kinds.values():
            ours = GatedRMSNorm(WIDTH, 1e-5, **_arguments(other)[1], dtype=BF16)
            ours.load_state_dict(theirs.state_dict())
            same = (_run(ours, x, gate, dy)[0] == _run(theirs, x, gate, dy)[0]).double().mean()
            assert (same > 0.999) == (family == other), f"{family} as {other}: {same:.2%} equal"
