"""Tiny models of Transformers' families, and their training on real text: Apache's licence, a byte a token.

Training is the same lines for a model in one process and for one that is spread over ranks. Beside a model and the
converted one there is a third, the judge: in float64, its norms by the formula in plain torch operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshnorm

TEXT = (Path(__file__).parents[1] / "LICENSE").read_bytes()
BATCH, SEQUENCE, STEPS, LR = 4, 32, 20, 2e-3

SMALL: dict[str, Any] = {
    "vocab_size": 128,  # the text is ASCII
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """A family's classes in Transformers, what its tiny config has beside ``SMALL``, and the norms of the model."""

    name: str
    norms: int
    left: int = 0  # gated norms
    more: dict[str, Any] = field(default_factory=dict)
    heads: str = ""  # what its norms of queries and keys are over: "each" head, "all" heads, or there are none
    recurrent: bool = False  # a layer's state runs along the sequence, which then cannot be cut
    sharded: bool = True  # its own tensor-parallel plan shards more than the embedding

    def __str__(self) -> str:
        return self.name


FAMILIES = (
    Family("Llama", 5),
    Family("Qwen3", 9, more={"head_dim": 16}, heads="each"),
    Family(
        "Gemma3",
        13,
        more={"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        heads="each",
    ),
    Family("Olmo2", 9, heads="all"),
    Family("MiniMaxM2", 9, more={"head_dim": 16, **EXPERTS}, heads="all"),
    Family(
        "DeepseekV3",
        9,
        more={
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    Family(
        "Qwen3Next",
        7,
        left=1,
        more={
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
        },
        heads="each",
        recurrent=True,
    ),
    Family(
        "NemotronH",
        4,
        left=1,
        more={
            "hybrid_override_pattern": "M*-",
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
        recurrent=True,
        sharded=False,
    ),
    Family(
        "Bamba",
        5,
        left=1,
        more={
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "attn_layer_indices": [1],
        },
        recurrent=True,
        sharded=False,
    ),
    Family("GptOss", 5, more={"head_dim": 16, "sliding_window": 8, **EXPERTS}, sharded=False),
)


def model_of(family: Family, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same random parameters at each call; norm weights away from where they start, so that their order counts."""
    import transformers

    name = f"{family.name}TextConfig" if family.name == "Gemma3" else f"{family.name}Config"
    if not hasattr(transformers, name):
        pytest.skip(f"the installed Transformers has no {family.name}")
    options = {**SMALL, **family.more}
    if "hybrid_override_pattern" in options:  # says the number of layers
        del options["num_hidden_layers"]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.name}ForCausalLM")(getattr(transformers, name)(**options))
    for part, parameter in model.named_parameters():
        if "norm" in part:
            nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.2)
    return model.to(dtype).train()


def converted(model: nn.Module, family: Family) -> nn.Module:
    report = meshnorm.convert(model)
    assert (len(report.swapped), len(report.left)) == (family.norms, family.left), report
    return model


class _Formula(nn.Module):
    """x̂ · (weight + offset) in plain torch operations, in the dtype of its input."""

    def __init__(self, norm: nn.Module, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = norm.weight, eps, offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        rstd = torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)
        return hidden_states * rstd * (self.weight + self.offset)


def judge(model: nn.Module) -> nn.Module:
    """A float64 copy of the model; what else of it computes in float32 (a router, rotary angles) goes on doing so."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):  # grouped products take no float64
        model.set_experts_implementation("eager")
    for entry in meshnorm.convert(model, dry_run=True).swapped:
        assert entry.eps is not None
        model.set_submodule(entry.name, _Formula(model.get_submodule(entry.name), entry.eps, entry.offset))
    return model


def error_of(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """|found − exact| / |exact|, of all tensors together."""
    off = [(found[name].double() - tensor.double()).norm() for name, tensor in exact.items()]
    return (torch.stack(off).norm() / torch.stack([t.double().norm() for t in exact.values()]).norm()).item()


# --- training ---


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """(tokens, the tokens that follow), each (BATCH, SEQUENCE): pieces of the text, another for each row and step."""
    pieces = torch.tensor(list(TEXT[: steps * BATCH * (SEQUENCE + 1)])).view(steps, BATCH, SEQUENCE + 1)
    return [(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in pieces]


def loss_of(model: nn.Module, tokens: Tensor, following: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, loss) of tokens at these positions of the sequence."""
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logits, F.cross_entropy(wide.flatten(0, 1), following.flatten())


@dataclass
class Trained:
    """The first step's logits and gradients, and the loss of every step."""

    logits: Tensor
    gradients: dict[str, Tensor]
    losses: list[float]


def train(
    model: nn.Module,
    steps: int = STEPS,
    cut: Callable[[Tensor], Tensor] = lambda whole: whole,
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Trained:
    """AdamW on the text. On ranks: ``cut`` takes this rank's part of a batch, ``mean`` is over the ranks, ``whole``
    puts a gradient together."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    device = next(model.parameters()).device
    positions = cut(torch.arange(SEQUENCE).repeat(BATCH, 1)).to(device)
    logits, gradients, losses = torch.empty(0), {}, []
    for step, (tokens, following) in enumerate(batches(steps)):
        optimizer.zero_grad()
        found, loss = loss_of(model, cut(tokens).to(device), cut(following).to(device), positions)
        loss.backward()
        losses.append(mean(loss.detach()).item())
        if step == 0:
            logits = found.detach()
            gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Trained(logits, gradients, losses)
