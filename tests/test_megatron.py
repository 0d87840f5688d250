"""Megatron Core's specs with our norm."""

from __future__ import annotations

import pytest
import torch

import meshnorm
from meshnorm.errors import OptionError

transformer = pytest.importorskip("megatron.core.transformer", reason="megatron-core is not installed")
specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs", reason="this megatron-core has no GPT specs")
norms = pytest.importorskip("megatron.core.transformer.torch_norm", reason="this megatron-core has no torch norm")

from meshnorm.integrations.megatron import MeshnormNorm, with_meshnorm  # noqa: E402


def _config(**more: object):
    options = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "normalization": "RMSNorm"}
    return transformer.TransformerConfig(**{**options, **more})


def test_a_spec_has_our_norm_wherever_it_had_one() -> None:
    before = specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    parts = with_meshnorm(before).submodules
    found = (
        parts.input_layernorm,
        parts.pre_mlp_layernorm,
        parts.self_attention.submodules.q_layernorm,
        parts.self_attention.submodules.k_layernorm,
    )
    assert found == (MeshnormNorm,) * 4
    attention = before.submodules.self_attention
    assert before.submodules.input_layernorm is norms.WrappedTorchNorm  # the spec given is left as it was
    assert parts.self_attention.submodules.linear_qkv is attention.submodules.linear_qkv
    assert parts.self_attention.params == attention.params and parts.mlp == before.submodules.mlp


def test_it_gives_what_megatrons_torch_norm_gives() -> None:
    ours, theirs = MeshnormNorm(_config(), 64, 1e-6), norms.WrappedTorchNorm(_config(), 64, 1e-6)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 2, 64, dtype=dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.to(dtype)(x), theirs.to(dtype)(x), rtol=4 * eps, atol=1e-6)


def test_the_config_decides() -> None:
    norm = MeshnormNorm(_config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), 64)
    assert norm.weight.dtype == torch.bfloat16 and not norm.weight.any() and norm.eps == 1e-5
    x = torch.randn(6, 2, 64).bfloat16()
    assert torch.equal(norm(x), meshnorm.rms_norm(x, eps=1e-5))
    assert not norm.weight.sequence_parallel
    parallel = _config(tensor_model_parallel_size=2, sequence_parallel=True)
    assert MeshnormNorm(parallel, 64).bfloat16().weight.sequence_parallel
    with pytest.raises(OptionError, match=r"config.normalization is 'LayerNorm'"):
        MeshnormNorm(_config(normalization="LayerNorm"), 64)
