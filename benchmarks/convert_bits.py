"""What a converted norm gives beside its own forward, for docs/models.md: y's bits, and the errors of the gradients.

    python benchmarks/convert_bits.py

Needs Transformers. 4096 rows of 1024, x, dY and weights standard normal, on this machine's device. The errors are those
of bfloat16 gradients beside the same norm in float64, |found − exact| / |exact|.
"""

from __future__ import annotations

import copy
import importlib

import torch
import transformers
from torch import Tensor, nn

import meshnorm

FAMILIES = {
    "torch.nn.RMSNorm": None,
    "Llama, Mistral, Mixtral, Qwen2/3, Phi-3, Granite, SmolLM3, GLM-4, DeepSeek-V3": ("llama", "LlamaRMSNorm"),
    "Llama-4": ("llama4", "Llama4TextRMSNorm"),
    "T5": ("t5", "T5LayerNorm"),
    "OLMo2, OLMo3": ("olmo2", "Olmo2RMSNorm"),
    "GPT-OSS": ("gpt_oss", "GptOssRMSNorm"),
    "Nemotron-H": ("nemotron_h", "NemotronHRMSNorm"),
    "Gemma 1–3, Qwen3-Next": ("gemma3", "Gemma3RMSNorm"),
    "Gemma 3n": ("gemma3n", "Gemma3nRMSNorm"),
    "Llama-4 L2, NanoChat (no weight)": ("llama4", "Llama4TextL2Norm"),
}


def norm_of(where: tuple[str, str] | None) -> nn.Module:
    if where is None:
        return nn.RMSNorm(1024, eps=1e-6)
    module, name = where
    kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    return kind(eps=1e-6) if name.endswith("L2Norm") else kind(1024, eps=1e-6)


def gradients(norm: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    return list(torch.autograd.grad(norm(leaf), [leaf, *norm.parameters()], dy))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}, Transformers {transformers.__version__}\n")
    print(
        "| family | casting_mode, offset | y: same bits, bfloat16 | float32 | dX: own error | ours | dW: own | ours |"
    )
    print("|---|---|---|---|---|---|---|---|")
    torch.manual_seed(0)
    for family, where in FAMILIES.items():
        cells, words, errors = [], "", []
        for dtype in (torch.bfloat16, torch.float32):
            own = norm_of(where).to(device, dtype)
            for parameter in own.parameters():
                nn.init.normal_(parameter)
            ours, exact = copy.deepcopy(own), copy.deepcopy(own).double()
            (entry,) = meshnorm.convert(ours).swapped
            words = f"{entry.casting_mode}, {entry.offset:g}"
            x, dy = (torch.randn(4096, 1024, device=device, dtype=dtype) for _ in range(2))
            cells.append(f"{(ours(x) == own(x)).double().mean().item():.4%}")
            if dtype is torch.bfloat16:
                meshnorm.convert(exact)
                best = gradients(exact, x.double(), dy.double())
                for found, other, e in zip(gradients(ours, x, dy), gradients(own, x, dy), best, strict=True):
                    errors += [f"{((g.double() - e).norm() / e.norm()).item():.1e}" for g in (other, found)]
        errors += ["", ""] * (len(errors) == 2)
        print(f"| {family} | {words} | {' | '.join(cells + errors)} |")


if __name__ == "__main__":
    main()
