"""Our norm as a kernel layer of Transformers and kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshnorm.converting import converted

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("kernels", reason="kernels is not installed")
if not transformers.utils.is_kernels_available():
    pytest.skip("this Transformers asks for another release of kernels", allow_module_level=True)

from meshnorm.integrations.transformers import MeshnormRMSNorm, kernel_config, kernel_mapping  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# class, config, cast order, norms a forward runs
MODELS = [
    ("LlamaForCausalLM", "LlamaConfig", "llama", 5),
    ("Qwen3ForCausalLM", "Qwen3Config", "llama", 9),
    ("Olmo2ForCausalLM", "Olmo2Config", "gemma", 9),  # the same name for kernels, another cast order
    ("Gemma3ForCausalLM", "Gemma3TextConfig", "gemma", 13),  # offered to no kernel: converted
]


def _saved(model: str, config: str, path) -> nn.Module:
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SMALL))
    for part, parameter in made.named_parameters():
        if "norm" in part:
            nn.init.normal_(parameter, 0.0, 0.3)
    made.save_pretrained(path)
    return made


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The cast order of each rms_norm that runs."""
    found: list[str] = []
    real = converted.rms_norm
    monkeypatch.setattr(converted, "rms_norm", lambda *a, **k: found.append(k["casting_mode"]) or real(*a, **k))
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_from_pretrained_with_our_kernel_config(model, tmp_path, calls) -> None:
    name, config, mode, norms = model
    plain = _saved(name, config, tmp_path).eval()
    loaded = getattr(transformers, name).from_pretrained(
        tmp_path, dtype=torch.float32, use_kernels=True, kernel_config=kernel_config()
    )
    tokens = torch.randint(3, 64, (2, 12))
    for training in (False, True):
        plain.train(training)
        loaded.train(training)  # Transformers binds its kernels anew
        calls.clear()
        gradients = []
        for each in (plain, loaded):
            each.zero_grad()
            out = each(input_ids=tokens, labels=tokens)
            out.loss.backward()
            gradients.append((out.logits.detach(), [p.grad for p in each.parameters()]))
        assert calls == [mode] * norms
        torch.testing.assert_close(gradients[1][0], gradients[0][0], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(gradients[1][1], gradients[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_loaded_model_compiles_whole(tmp_path, calls) -> None:
    _saved("LlamaForCausalLM", "LlamaConfig", tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, use_kernels=True, kernel_config=kernel_config()
    )
    norm, x = loaded.model.norm, torch.randn(2, 5, 32)
    calls.clear()
    expected = norm(x)
    assert len(calls) == 1
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_kernelize_with_our_mapping(calls) -> None:
    from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

    class OwnNorm(nn.RMSNorm):
        """Not decorated: offered to kernels afterwards."""

    class OtherNorm(nn.LayerNorm):
        """Under the same name, and no RMSNorm."""

        def forward(self, hidden_states):
            return super().forward(hidden_states)

    for kind in (OwnNorm, OtherNorm):
        replace_kernel_forward_from_hub(kind, "RMSNorm")
    model, x = nn.Sequential(OwnNorm(32), OtherNorm(32)), torch.randn(5, 32)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    expected = model(x)
    with use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
    for norm in model:
        assert norm.forward.__func__ is MeshnormRMSNorm.forward
    torch.testing.assert_close(model(x), expected)
    assert calls == ["gemma"]
