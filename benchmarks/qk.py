"""The norms of queries and keys: meshnorm's one call, two calls of its own norm, torch, torch.compile, and the fused
norms that are installed.

    PYTHONPATH=src python3 benchmarks/qk.py [--dtype float32] [--ways meshnorm,two,compile] [--csv FILE]
    PYTHONPATH=src python3 benchmarks/qk.py --device cpu --shapes 512:8:2:64,512:8:2:64:all

Microseconds, medians, with a cold L2, and the percentage of the copy bandwidth of the same run that moving each byte
once would take: q, k and both y forward; dY, q, k and both dX backward, which gives dW too, through autograd. q and k
are slices of a fused projection. Each way is held against float64 first.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import meshnorm
from meshnorm.benching.providers import in_one_line
from meshnorm.benching.timing import copy_bandwidth, device_time, host_time
from meshnorm.formula import reference_backward, reference_forward

EPS = 1e-6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Shape(NamedTuple):
    """``tokens`` with ``heads`` queries and ``keys`` keys of ``size`` numbers, normalized per head or over all."""

    tokens: int
    heads: int
    keys: int
    size: int
    over_all: bool

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads}:{self.keys}x{self.size} {'all heads' if self.over_all else 'per head'}"


# Qwen3-8B, Gemma3's 27B and 4B, Qwen3-8B decoding; OLMo2-7B, OLMoE, MiniMax-M2.
SHAPES = (
    Shape(16384, 32, 8, 128, False),
    Shape(16384, 32, 16, 128, False),
    Shape(16384, 8, 4, 256, False),
    Shape(64, 32, 8, 128, False),
    Shape(16384, 32, 32, 128, True),
    Shape(16384, 16, 16, 128, True),
    Shape(16384, 48, 8, 128, True),
)

Pair = tuple[Tensor, Tensor]
Norm = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]  # (q, k, weight of q, weight of k) -> both y
One = Callable[[Tensor, Tensor], Tensor]


def each(norm: One) -> Norm:
    return lambda q, k, q_weight, k_weight: (norm(q, q_weight), norm(k, k_weight))


def ours(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Pair:
    return meshnorm.qk_rms_norm(q, k, q_weight, k_weight, EPS)


def torch_s(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def compiled() -> Norm:
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False  # else a second backward of one y is refused
    torch.compiler.reset()
    return torch.compile(each(torch_s), dynamic=False)


def liger() -> Norm:
    apply = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
    return each(lambda x, weight: apply(x, weight, EPS, 0.0, "llama", False))


def quack() -> Norm:
    norm = importlib.import_module("quack").rmsnorm
    return each(lambda x, weight: norm(x.reshape(-1, x.shape[-1]), weight, eps=EPS).view(x.shape))


WAYS: dict[str, Callable[[], Norm]] = {
    "meshnorm": lambda: ours,
    "two": lambda: each(lambda x, weight: meshnorm.rms_norm(x, weight, EPS)),
    "eager": lambda: each(torch_s),
    "compile": compiled,
    "liger": liger,
    "quack": quack,
}


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    dq: Tensor
    dk: Tensor

    @staticmethod
    def drawn(shape: Shape, dtype: torch.dtype, device: str) -> Given:
        widths = [shape.heads * shape.size, shape.keys * shape.size, shape.keys * shape.size]
        fused = torch.randn(shape.tokens, sum(widths), dtype=dtype, device=device)
        q, k, _ = fused.split(widths, -1)
        if not shape.over_all:
            q, k = (x.unflatten(-1, (-1, shape.size)) for x in (q, k))
        weights = (torch.randn(x.shape[-1], dtype=dtype, device=device) for x in (q, k))
        return Given(q, k, *weights, *(torch.randn(x.shape, dtype=dtype, device=device) for x in (q, k)))

    def leaves(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in self[:4]]


def fault(norm: Norm, given: Given) -> str:
    """What is wrong with y or dX of some tokens, in words; empty where nothing is. (dW sums over all rows: its bound
    would need them all in float64.)"""
    leaves = given.leaves()
    ys = norm(*leaves)
    gradients = torch.autograd.grad(ys, leaves, given[4:])
    for place, name in enumerate("qk"):
        x = given[place]
        rows = torch.linspace(0, len(x) - 1, min(len(x), 64), device=x.device).long()
        wide = x[rows].double(), given[place + 2].double(), EPS
        exact = reference_forward(*wide), reference_backward(given[place + 4][rows].double(), *wide)[0]
        for what, got, true in zip(("y", "dX"), (ys[place], gradients[place]), exact, strict=True):
            error = (got[rows].double() - true).norm() / true.norm()
            if not error <= 4 * torch.finfo(x.dtype).eps:
                return f"{what} of {name} is off by {error:.2g}"
    return ""


def timed(norm: Norm, given: Given, device: str, rep_ms: float) -> tuple[float, float, float]:
    """µs of the forward, of the backward, and of the host for both."""
    with torch.no_grad():
        forward = device_time(lambda: norm(*given[:4]), device, rep_ms)
    leaves = given.leaves()
    ys, dys = norm(*leaves), given[4:]
    backward = device_time(lambda: torch.autograd.grad(ys, leaves, dys, retain_graph=True), device, rep_ms)
    host = 0.0
    if device == "cuda":
        host = host_time(lambda: torch.autograd.grad(norm(*leaves), leaves, dys))
    return forward, backward, host


def parsed(text: str) -> list[Shape]:
    """ "512:8:2:64" is 512 tokens with 8 queries and 2 keys of 64 numbers, per head; with ":all" over all heads."""
    found = []
    for part in text.split(","):
        tokens, heads, keys, size, *over_all = part.split(":")
        found.append(Shape(int(tokens), int(heads), int(keys), int(size), over_all == ["all"]))
    return found


def versions() -> str:
    found = []
    for name in ("triton", "liger-kernel", "quack-kernels"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([f"meshnorm {meshnorm.__version__}", f"torch {torch.__version__}", *found])


def main(arguments: list[str] | None = None) -> list[tuple[str, ...]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--shapes", help="TOKENS:HEADS:KEYS:SIZE (per head), or with :all (over all), between commas")
    parser.add_argument("--ways", default=",".join(WAYS), help=", ".join(WAYS))
    parser.add_argument("--rep-ms", type=float, default=100.0, help="how long each is timed")
    parser.add_argument("--csv", help="write the table here too")
    options = parser.parse_args(arguments)
    device, dtype = options.device, DTYPES[options.dtype]
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    bandwidth = copy_bandwidth(device, options.rep_ms)
    print(f"{name}, {versions()}, {options.dtype}, copy {bandwidth:.0f} GB/s, {datetime.date.today()}")
    print(f"{'':<30} {'':<9} {'forward':>15} {'backward':>15} {'host':>8} µs (% of copy)")
    table = []
    for shape in parsed(options.shapes) if options.shapes else SHAPES:
        given = Given.drawn(shape, dtype, device)
        floor = (given.q.numel() + given.k.numel()) * dtype.itemsize / bandwidth / 1e3  # µs of q and k moved once
        for way in options.ways.split(","):
            try:
                norm = WAYS[way]()
                wrong = fault(norm, given)
                if wrong:
                    raise ValueError(wrong)
                forward, backward, host = timed(norm, given, device, options.rep_ms)
            except Exception as error:  # whatever another library may raise
                print(f"{shape!s:<30} {way:<9} {in_one_line(error)}")
                continue
            share = f"({200 * floor / forward:.0f})", f"({300 * floor / backward:.0f})"
            row = f"{forward:9.1f} {share[0]:>5} {backward:9.1f} {share[1]:>5} {host:8.1f}"
            print(f"{shape!s:<30} {way:<9} {row}", flush=True)
            table.append((str(shape), options.dtype, way, f"{forward:.2f}", f"{backward:.2f}", f"{host:.1f}"))
        if device == "cuda":
            torch.cuda.empty_cache()
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([("shape", "dtype", "way", "forward_us", "backward_us", "host_us"), *table])
    return table


if __name__ == "__main__":
    main()
