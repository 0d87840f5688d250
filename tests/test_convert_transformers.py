"""Transformers' and PEFT's own norms: each family's class, small models whole, adapters that hold a norm."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

import meshnorm

pytest.importorskip("transformers", reason="Transformers is not installed: pip install meshnorm[transformers]")

# module, class, casting mode, offset; the class takes (width, eps).
FAMILIES = [
    ("llama", "LlamaRMSNorm", "llama", 0.0),
    ("mistral", "MistralRMSNorm", "llama", 0.0),
    ("mixtral", "MixtralRMSNorm", "llama", 0.0),
    ("qwen2", "Qwen2RMSNorm", "llama", 0.0),
    ("qwen3", "Qwen3RMSNorm", "llama", 0.0),
    ("phi3", "Phi3RMSNorm", "llama", 0.0),
    ("granite", "GraniteRMSNorm", "llama", 0.0),
    ("smollm3", "SmolLM3RMSNorm", "llama", 0.0),
    ("glm4", "Glm4RMSNorm", "llama", 0.0),
    ("llama4", "Llama4TextRMSNorm", "llama", 0.0),
    ("deepseek_v3", "DeepseekV3RMSNorm", "llama", 0.0),
    ("minimax_m2", "MiniMaxM2RMSNorm", "llama", 0.0),
    ("olmoe", "OlmoeRMSNorm", "llama", 0.0),
    ("bamba", "BambaRMSNorm", "llama", 0.0),
    ("mamba2", "Mamba2RMSNorm", "llama", 0.0),
    ("t5", "T5LayerNorm", "llama", 0.0),
    ("olmo2", "Olmo2RMSNorm", "gemma", 0.0),
    ("olmo3", "Olmo3RMSNorm", "gemma", 0.0),
    ("gpt_oss", "GptOssRMSNorm", "gemma", 0.0),
    ("nemotron_h", "NemotronHRMSNorm", "gemma", 0.0),
    ("gemma3n", "Gemma3nRMSNorm", "gemma", 0.0),
    ("gemma", "GemmaRMSNorm", "gemma", 1.0),
    ("gemma2", "Gemma2RMSNorm", "gemma", 1.0),
    ("gemma3", "Gemma3RMSNorm", "gemma", 1.0),
    ("qwen3_next", "Qwen3NextRMSNorm", "gemma", 1.0),
]
WEIGHTLESS = [("llama4", "Llama4TextL2Norm"), ("nanochat", "NanoChatRMSNorm")]
GATED = [
    ("mamba2", "MambaRMSNormGated"),
    ("bamba", "BambaRMSNormGated"),
    ("nemotron_h", "NemotronHRMSNormGated"),
    ("qwen3_next", "Qwen3NextRMSNormGated"),
]


def _class(module: str, name: str) -> type[nn.Module]:
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"the installed Transformers has no {module}.{name}")


def _gradients(norm: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    norm.zero_grad()
    norm(leaf).backward(dy)
    return [leaf.grad, *(parameter.grad for parameter in norm.parameters())]  # type: ignore[list-item]


def _held_against(norm: nn.Module, width: int, dtype: torch.dtype) -> None:
    """The norm converted beside itself: y's bits, and gradients held against float64."""
    theirs, exact = norm, copy.deepcopy(norm).double()
    ours = copy.deepcopy(norm)
    assert meshnorm.convert(ours).swapped and meshnorm.convert(exact).swapped
    x, dy = torch.randn(64, width).to(dtype), torch.randn(64, width).to(dtype)
    y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype == dtype
    assert torch.equal(y, expected)  # on CPUs squares are added in the order in which torch's mean adds them
    best = _gradients(exact, x.double(), dy.double())
    for found, other, g in zip(_gradients(ours, x, dy), _gradients(theirs, x, dy), best, strict=True):
        rounding = torch.finfo(dtype).eps * g.norm()
        assert (found.double() - g).norm() <= (other.double() - g).norm() + rounding


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_a_familys_norm_gives_what_it_gave(family) -> None:
    module, name, mode, offset = family
    kind = _class(module, name)
    for dtype, eps in ((torch.float32, 1e-5), (torch.bfloat16, 1.5625e-7)):
        norm = kind(128, eps=eps).to(dtype)
        nn.init.normal_(norm.weight)
        (found,) = meshnorm.convert(norm, dry_run=True).swapped
        assert (found.casting_mode, found.offset, found.eps) == (mode, offset, eps)
        _held_against(norm, 128, dtype)
        (default,) = meshnorm.convert(kind(128), dry_run=True).swapped
        assert 0 < default.eps < 1e-4


@pytest.mark.parametrize("family", WEIGHTLESS, ids=lambda family: family[0])
def test_a_norm_without_weight_gives_what_it_gave(family) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _held_against(_class(*family)(eps=1e-5), 64, dtype)


@pytest.mark.parametrize("family", GATED, ids=lambda family: family[0])
def test_gated_norms_are_left(family) -> None:
    kind = _class(*family)
    norm = kind(32, group_size=16) if "group_size" in inspect.signature(kind).parameters else kind(32)
    (left,) = meshnorm.convert(norm).left
    assert left.reason.startswith("its forward takes (hidden_states, gate)")


# --- whole models ---

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def _model(name: str, **more: object) -> nn.Module:
    import transformers

    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    if not hasattr(transformers, config_name):
        pytest.skip(f"the installed Transformers has no {name}")
    config = getattr(transformers, config_name)(**SMALL, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for part, parameter in model.named_parameters():
        if "norm" in part:
            nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
    return model


@pytest.mark.parametrize(
    ("name", "more", "norms"),
    [
        ("Llama", {}, 5),
        ("Qwen3", {"head_dim": 16}, 9),
        ("Gemma3", {"head_dim": 16, "sliding_window": 8}, 13),
        ("Olmo2", {}, 9),
    ],
    ids=["Llama", "Qwen3", "Gemma3", "Olmo2"],
)
def test_a_whole_model_has_the_logits_and_gradients_it_had(name, more, norms) -> None:
    model = _model(name, **more).eval()
    tokens = torch.randint(1, 64, (2, 12))
    found = []
    for _ in range(2):
        model.zero_grad()
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        found.append((out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
        report = meshnorm.convert(model)
    assert len(report.left) == norms, report  # by the second conversion all of them are converted already
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    for part, gradient in found[1][1].items():
        torch.testing.assert_close(gradient, found[0][1][part], rtol=1e-3, atol=1e-5)


def test_a_converted_model_is_saved_and_loaded_as_before(tmp_path) -> None:
    import transformers

    model = _model("Llama").eval()
    tokens = torch.randint(1, 64, (2, 12))
    meshnorm.convert(model)
    expected = model(input_ids=tokens).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(meshnorm.convert(loaded).swapped) == 5
    assert torch.equal(loaded(input_ids=tokens).logits, expected)
    twin = pickle.loads(pickle.dumps(model.model.norm))
    assert isinstance(twin, transformers.models.llama.modeling_llama.LlamaRMSNorm) and meshnorm.revert(twin)


def test_a_converted_model_generates() -> None:
    model = _model("Qwen3", head_dim=16).eval()
    tokens = torch.randint(1, 64, (2, 5))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    meshnorm.convert(model)
    assert torch.equal(model.generate(tokens, attention_mask=torch.ones_like(tokens), **options), expected)


def test_trainer_trains_a_converted_model_as_it_trains_the_model(tmp_path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    import transformers

    tokens = torch.randint(3, 64, (16, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    losses = []
    for converts in (False, True):
        model = _model("Qwen3", head_dim=16)
        if converts:
            meshnorm.convert(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 6 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# --- PEFT ---


def test_norms_inside_pefts_wrappers_are_converted_and_the_wrapper_is_not() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["model.norm"])
    model = peft.get_peft_model(_model("Llama"), config).eval()
    wrapper = model.base_model.model.model.norm
    kind, trained = type(wrapper), wrapper.modules_to_save["default"]
    nn.init.normal_(trained.weight)
    tokens = torch.randint(1, 64, (2, 12))
    expected = {n: p.detach() for n, p in model.named_parameters()}
    logits = model(input_ids=tokens).logits.detach()
    keys = list(peft.get_peft_model_state_dict(model))
    report = meshnorm.convert(model)
    names = [entry.name for entry in report.swapped]
    assert "base_model.model.model.norm.modules_to_save.default" in names
    assert "base_model.model.model.norm.original_module" in names and len(names) == 6 and not report.left
    assert type(wrapper) is kind and wrapper.modules_to_save["default"] is trained
    assert list(peft.get_peft_model_state_dict(model)) == keys
    assert all(p is not None and torch.equal(p, expected[n]) for n, p in model.named_parameters())
    out = model(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-5)
    out.loss.backward()
    assert trained.weight.grad is not None and wrapper.original_module.weight.grad is None
    with model.disable_adapter():
        assert not torch.equal(model(input_ids=tokens).logits, out.logits)


def test_adapters_can_be_added_after_the_conversion() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = _model("Llama")
    meshnorm.convert(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["model.norm"])
    model = peft.get_peft_model(model, config)
    assert len(meshnorm.revert(model)) == 6  # the copy that PEFT made is converted too
