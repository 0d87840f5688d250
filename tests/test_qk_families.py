"""The norms of queries and keys of model families as Transformers has them, beside ours with docs/qk.md's arguments.

y has the same bits where every step is rounded alike; gradients are no further from float64 than theirs.
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshnorm import QKRMSNorm
from meshnorm.formula import reference_backward, reference_forward

pytest.importorskip("transformers", reason="Transformers is not installed: pip install meshnorm[transformers]")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GEMMA: dict[str, Any] = {"casting_mode": "gemma"}
HEADS, KEY_HEADS, SIZE = 8, 2, 64
# (module, class): (whether the norm is over all heads, what ours takes, whether there is a weight)
FAMILIES: dict[tuple[str, str], tuple[bool, dict[str, Any], bool]] = {
    ("qwen3", "Qwen3RMSNorm"): (False, {}, True),
    ("qwen3_moe", "Qwen3MoeRMSNorm"): (False, {}, True),
    ("glm4_moe", "Glm4MoeRMSNorm"): (False, {}, True),
    ("exaone4", "Exaone4RMSNorm"): (False, {}, True),
    ("gemma3", "Gemma3RMSNorm"): (False, {**GEMMA, "offset": 1.0}, True),
    ("qwen3_next", "Qwen3NextRMSNorm"): (False, {**GEMMA, "offset": 1.0}, True),
    ("gemma4", "Gemma4RMSNorm"): (False, GEMMA, True),
    ("olmo2", "Olmo2RMSNorm"): (True, GEMMA, True),
    ("olmo3", "Olmo3RMSNorm"): (True, GEMMA, True),
    ("olmoe", "OlmoeRMSNorm"): (True, {}, True),
    ("minimax_m2", "MiniMaxM2RMSNorm"): (True, {}, True),
    ("llama4", "Llama4TextL2Norm"): (False, {}, False),
    ("nanochat", "NanoChatRMSNorm"): (False, {}, False),
}


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


class Theirs(nn.Module):
    """The two norms of an attention, under the names that it gives them."""

    def __init__(self, family: tuple[str, str], eps: float) -> None:
        super().__init__()
        module, name = family
        try:
            kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
        except (ImportError, AttributeError):
            pytest.skip(f"the installed Transformers has no {module}.{name}")
        over_all, _, weighted = FAMILIES[family]
        sizes = [heads * SIZE if over_all else SIZE for heads in (HEADS, KEY_HEADS)]
        self.q_norm, self.k_norm = (kind(size, eps=eps) if weighted else kind(eps=eps) for size in sizes)
        for weight in self.parameters():
            nn.init.normal_(weight, 1.0 - FAMILIES[family][1].get("offset", 0.0), 0.5)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)


def _pair(family: tuple[str, str], eps: float, dtype: torch.dtype, takes: dict[str, Any]) -> tuple[Theirs, QKRMSNorm]:
    """(theirs with random weights, ours with what theirs saved)."""
    over_all, _, weighted = FAMILIES[family]
    theirs = Theirs(family, eps).to(dtype)
    sizes = [heads * SIZE if over_all else SIZE for heads in (HEADS, KEY_HEADS)]
    ours = QKRMSNorm(*sizes, eps, **takes, elementwise_affine=weighted, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _inputs(family: tuple[str, str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Slices of a fused projection, as heads or as rows over all of them."""
    fused = (torch.randn(2, 48, (HEADS + 2 * KEY_HEADS) * SIZE) * 2).to(dtype)
    q, k, _ = fused.split([HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE], -1)
    if FAMILIES[family][0]:
        return q, k
    return q.unflatten(-1, (HEADS, SIZE)), k.unflatten(-1, (KEY_HEADS, SIZE))


def _run(norm: nn.Module, xs: tuple[Tensor, Tensor], dys: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
    """(y, dX, dW if there is a weight) of q and of k."""
    leaves = [x.clone().requires_grad_() for x in xs]
    norm.zero_grad()
    ys = norm(*leaves)
    torch.autograd.backward(ys, dys)
    weights = [getattr(each, "weight", None) for each in (norm.q_norm, norm.k_norm)]
    return [
        (y.detach(), leaf.grad, *(() if weight is None else (weight.grad,)))  # type: ignore[misc]
        for y, leaf, weight in zip(ys, leaves, weights, strict=True)
    ]


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=".".join)
def test_it_is_the_family_s_norm(family: tuple[str, str], dtype: torch.dtype, eps: float) -> None:
    theirs, ours = _pair(family, eps, dtype, FAMILIES[family][1])
    xs = _inputs(family, dtype)
    dys = tuple(torch.randn_like(x) for x in xs)
    offset = FAMILIES[family][1].get("offset", 0.0)
    unit = torch.finfo(dtype).eps
    for x, dy, norm, found, expected in zip(
        xs,
        dys,
        (theirs.q_norm, theirs.k_norm),
        _run(ours, xs, dys),
        _run(theirs, xs, dys),
        strict=True,  # type: ignore[arg-type]
    ):
        if dtype == F32:  # sums of squares in another order
            torch.testing.assert_close(found[0], expected[0], rtol=8 * unit, atol=unit**2)
        else:
            assert (found[0] == expected[0]).double().mean() > 0.999
            torch.testing.assert_close(found[0], expected[0], rtol=2 * unit, atol=0.0)  # a rounding, the other way
        weight = getattr(norm, "weight", None)
        wide = x.double(), None if weight is None else weight.detach().double()
        dx, dw = reference_backward(dy.double(), *wide, eps, offset)
        exact = (reference_forward(*wide, eps, offset), dx, *(() if dw is None else (dw,)))
        for name, a, b, true in zip(("y", "dX", "dW"), found, expected, exact, strict=False):
            assert a.dtype == b.dtype
            ours_off, theirs_off = ((t.double() - true).norm() for t in (a, b))
            # Of two rounded alike either may be nearer by chance: by a hundredth, or in float32 half a rounding.
            allowed = 1.01 * theirs_off + 0.25 * torch.finfo(F32).eps * true.norm()
            assert ours_off <= allowed, f"{name}: {ours_off:.3g} from float64, theirs {theirs_off:.3g}"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=".".join)
def test_where_sums_are_exact_y_has_their_bits(family: tuple[str, str], dtype: torch.dtype) -> None:
    """Multiples of 1/8, so that Σ x² is exact in whatever order it is summed."""
    theirs, ours = _pair(family, 1e-5, dtype, FAMILIES[family][1])
    q, k = (((x * 8).round().clamp(-31, 31) / 8).to(dtype) for x in _inputs(family, F32))
    for a, b in zip(ours(q, k), theirs(q, k), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_another_family_s_arguments_are_another_norm() -> None:
    """What the comparison above sees: every kind of arguments, tried on every other."""
    kinds = {str(takes): family for family, (_, takes, weighted) in FAMILIES.items() if weighted}
    for family in kinds.values():
        xs = _inputs(family, BF16)
        for other in kinds.values():
            theirs, ours = _pair(family, 1e-5, BF16, FAMILIES[other][1])
            same = [(a == b).double().mean() for a, b in zip(ours(*xs), theirs(*xs), strict=True)]
            assert all((share > 0.999) == (family == other) for share in same), f"{family} as {other}: {same} equal"


def test_an_attention_s_state_dict_holds_the_module_s() -> None:
    """The part of it that docs/qk.md names."""
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = qwen3.Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    saved = qwen3.Qwen3Attention(config, 0).state_dict()
    norm = QKRMSNorm(16, eps=config.rms_norm_eps)
    norm.load_state_dict({name: t for name, t in saved.items() if name.startswith(("q_norm.", "k_norm."))})
