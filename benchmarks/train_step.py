"""Training steps of whole models with different norms: tokens per second, peak memory, and the share of the norms.

    PYTHONPATH=src python3 benchmarks/train_step.py --out benchmarks/results/FILE [--models llama-1b qwen3-1.7b]
        [--providers original compile liger meshnorm] [--steps 12] [--seconds 150]

A step is forward, backward and fused AdamW in bfloat16, on random weights and tokens, with SDPA attention, nothing else
compiled or fused. One model stands in memory and only its norms' forward changes from step to step, in turns, so that
all providers meet the same weights and the same machine; the median is given. ``nothing`` is the model with norms that
return their input: what a step would take if norms took no time, so that the difference is the norms' share, the
most that any norm could give back. Before that, each provider's loss and gradient norm on one batch are held against
the original's; one that is off is not timed.

Writes FILE.txt and FILE.csv. Needs Transformers. ``--tiny`` runs models of two layers, on a CPU too.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import importlib
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshnorm

BASE, FLOOR = "original", "nothing"
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-3, 2e-2  # of bfloat16's rounding, 2^-8, averaged over tokens and layers
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Size:
    """A model: the prefix of its classes in Transformers, its config, and the batch of a step."""

    kind: str
    config: dict[str, Any]
    batch: int
    sequence: int = 4096


SIZES = {
    "llama-1b": Size(  # Llama 3.2 1B
        "Llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        batch=4,
    ),
    "llama-3b": Size(  # Llama 3.2 3B
        "Llama",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        batch=2,
    ),
    "qwen3-1.7b": Size(
        "Qwen3",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        batch=2,
    ),
}
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
_SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def tiny(size: Size) -> Size:
    return replace(size, config={**size.config, **_SMALL, **_SMALL_HEADS}, batch=2, sequence=16)


# --- providers: each gives the norms of a model, which are the original ones, another forward ---


def _original(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    pass


def _compile(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    torch.compiler.reset()
    compiled = {kind: torch.compile(kind.forward, dynamic=False) for kind in {type(norm) for norm in norms}}
    for norm in norms:
        norm.forward = types.MethodType(compiled[type(norm)], norm)


def _liger(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    """What its apply_liger_kernel_to_llama(model=..., rms_norm=True) does to each norm, and nothing beside."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA GPU")
    kind = importlib.import_module("liger_kernel.transformers.rms_norm").LigerRMSNorm
    for norm in norms:
        vars(norm).update(offset=0.0, casting_mode="llama", in_place=True, row_mode=None)
        norm.forward = types.MethodType(kind.forward, norm)


def _meshnorm(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    report = meshnorm.convert(model)
    if len(report.swapped) != len(norms):
        raise RuntimeError(str(report))


def _nothing(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    for norm in norms:
        norm.forward = lambda hidden_states: hidden_states


PROVIDERS: dict[str, tuple[str, Callable[[nn.Module, Sequence[nn.Module]], None]]] = {
    BASE: ("transformers", _original),
    "compile": ("torch", _compile),
    "liger": ("liger-kernel", _liger),
    "meshnorm": ("meshnorm", _meshnorm),
    FLOOR: ("", _nothing),
}


class Norms:
    """The norms of a model, which can be those of one provider after another: their classes and attributes change,
    their parameters are the same objects throughout."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        self.states = {BASE: self._state()}

    def _state(self) -> list[tuple[type[nn.Module], dict[str, Any]]]:
        return [(type(module), dict(vars(module))) for module in self.modules]

    def add(self, name: str) -> None:
        """Raises whatever the provider raises; the norms are then the original ones."""
        self.use(BASE)
        try:
            PROVIDERS[name][1](self.model, self.modules)
            self.states[name] = self._state()
        finally:
            self.use(BASE)

    def use(self, name: str) -> None:
        for module, (kind, state) in zip(self.modules, self.states[name], strict=True):
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)


# --- a step ---


@dataclass
class Row:
    """What was found of one provider on one model; a ``reason`` where it was not timed."""

    model: str
    parameters: int
    norms: int
    batch: int
    sequence: int
    provider: str
    version: str
    loss: float | None = None
    gradient_norm: float | None = None
    step_ms: float | None = None
    quickest_ms: float | None = None
    slowest_ms: float | None = None
    steps: int = 0
    tokens_per_second: float | None = None
    peak_gib: float | None = None
    norms_ms: float | None = None
    norms_percent: float | None = None
    reason: str = ""


def build(size: Size, device: torch.device) -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{size.kind}Config")(
        **size.config, max_position_embeddings=size.sequence, use_cache=False
    )
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()


def forward_and_backward(model: nn.Module, tokens: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def checked(model: nn.Module, tokens: Tensor) -> tuple[float, float]:
    """(loss, norm of all gradients)"""
    loss = forward_and_backward(model, tokens).item()
    gradients = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return loss, torch.stack(gradients).norm().item()


def why_off(found: tuple[float, float], wanted: tuple[float, float]) -> str:
    """In words, what of (loss, gradient norm) is further from the original's than rounding explains; "" if nothing."""
    for what, value, original, tolerance in zip(
        ("loss", "gradient norm"), found, wanted, (LOSS_TOLERANCE, GRADIENT_TOLERANCE), strict=True
    ):
        if not abs(value - original) <= tolerance * abs(original):
            return f"{what} {value:.6g} where the original norms give {original:.6g}"
    return ""


def measure(
    name: str, size: Size, providers: Sequence[str], steps: int, device: torch.device, until: float
) -> list[Row]:
    """One row a provider. ``until``: when (``time.perf_counter``) to stop early, after at least three steps each."""
    model = build(size, device)
    norms = Norms(model)
    tokens = torch.randint(0, size.config["vocab_size"], (size.batch, size.sequence), device=device)
    facts = (name, sum(p.numel() for p in model.parameters()), len(norms.modules), size.batch, size.sequence)
    rows = {each: Row(*facts, each, _version(PROVIDERS[each][0])) for each in providers}
    wanted = checked(model, tokens)
    for each, row in rows.items():
        try:
            if each != BASE:
                norms.add(each)
            norms.use(each)
            row.loss, row.gradient_norm = checked(model, tokens)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever another library raises is its result
            row.reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        else:
            row.reason = "" if each == FLOOR else why_off((row.loss, row.gradient_norm), wanted)
    timed = {each: row for each, row in rows.items() if not row.reason}
    # A small rate: the weights stay what they are, so that the last step meets what the first one met.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    taken: dict[str, list[float]] = {each: [] for each in timed}
    peaks: dict[str, float] = dict.fromkeys(timed, 0.0)
    order = list(timed)
    for turn in range(-1, steps):  # the first turn warms up: it makes the optimizer's state
        if turn >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        for each in order:
            norms.use(each)
            milliseconds, peak = _step(model, optimizer, tokens)
            if turn >= 0:
                taken[each].append(milliseconds)
                peaks[each] = max(peaks[each], peak)
        order = order[1:] + order[:1]
    for each, row in timed.items():
        row.steps, row.step_ms = len(taken[each]), statistics.median(taken[each])
        row.quickest_ms, row.slowest_ms = min(taken[each]), max(taken[each])
        row.tokens_per_second = size.batch * size.sequence / row.step_ms * 1e3
        row.peak_gib = peaks[each] or None
    if FLOOR in timed:
        floor = timed[FLOOR].step_ms
        for row in timed.values():
            assert row.step_ms is not None and floor is not None
            row.norms_ms = row.step_ms - floor
            row.norms_percent = 100 * row.norms_ms / row.step_ms
    return list(rows.values())


def fitting(name: str, size: Size, *others: Any) -> list[Row]:
    """``measure`` with the batch halved until it fits."""
    while True:
        try:
            return measure(name, size, *others)
        except torch.OutOfMemoryError:
            if size.batch == 1:
                raise
            print(f"{name}: batch {size.batch} does not fit", flush=True)
        size = replace(size, batch=size.batch // 2)
        _emptied(others[2])


def _emptied(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> tuple[float, float]:
    """(milliseconds, peak memory in GiB, 0 on a CPU), between two synchronizations."""
    cuda = tokens.is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    forward_and_backward(model, tokens)
    optimizer.step()
    if cuda:
        torch.cuda.synchronize()
    took = (time.perf_counter() - began) * 1e3
    return took, torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0


# --- the report ---


def _version(package: str) -> str:
    if package == "meshnorm":
        return meshnorm.__version__
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        return "none"


def setting(device: torch.device, commit: str | None) -> str:
    if commit is None:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        try:
            commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "unknown"
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return (
        f"{machine}, torch {torch.__version__}, triton {_version('triton')}, transformers {_version('transformers')}, "
        f"meshnorm at {commit}, {datetime.date.today()}"
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: one table a model."""
    lines = []
    for name in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == name]
        first, base = of_model[0], next((row.step_ms for row in of_model if row.provider == BASE), None)
        lines += [
            "",
            f"{name}: {first.parameters / 1e9:.2f}B parameters, {first.norms} norms, batch {first.batch} × "
            f"{first.sequence}, median of {max(row.steps for row in of_model)} steps",
            "",
            "| norms | tokens/s | step, ms (quickest–slowest) | beside original | of it in norms | peak, GiB | loss |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in of_model:
            if row.step_ms is None:
                lines.append(f"| {row.provider} | not timed: {row.reason} | | | | | |")
                continue
            spread = f"{row.step_ms:.1f} ({row.quickest_ms:.1f}–{row.slowest_ms:.1f})"
            beside = f"{base / row.step_ms:.3f}×" if base else ""
            share = "" if row.norms_ms is None else f"{row.norms_ms:.1f} ms, {row.norms_percent:.1f}%"
            peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
            who = row.provider if row.version in ("", "none") else f"{row.provider} ({row.version})"
            lines.append(
                f"| {who} | {row.tokens_per_second:,.0f} | {spread} | {beside} | {share} | {peak} | {row.loss:.5f} |"
            )
    return lines


def write(rows: Sequence[Row], words: str, out: Path) -> None:
    """FILE.txt, the tables, and FILE.csv, every figure, each beside where and when it was taken."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".txt").write_text("\n".join([words, *table(rows)]) + "\n", encoding="utf-8")
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(rows[0]), "setting"])
        writer.writeheader()
        writer.writerows({**asdict(row), "setting": words} for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each provider")
    parser.add_argument("--seconds", type=float, default=150, help="the whole run's; later steps are left out")
    parser.add_argument("--tiny", action="store_true", help="models of two layers, to see that it runs")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--out", type=Path, help="without a suffix: FILE.txt and FILE.csv are written")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("needs a CUDA GPU; --tiny runs on a CPU")
    words, began = setting(device, options.commit), time.perf_counter()
    print(words)
    rows: list[Row] = []
    for index, name in enumerate(options.models):
        size = tiny(SIZES[name]) if options.tiny else SIZES[name]
        until = began + options.seconds * (index + 1) / len(options.models)
        rows += fitting(name, size, options.providers, options.steps, device, until)
        print("\n".join(table([row for row in rows if row.model == name])), flush=True)
        if options.out:
            write(rows, words, options.out)
        _emptied(device)
    return 1 if any(row.reason.startswith(("loss", "gradient")) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
