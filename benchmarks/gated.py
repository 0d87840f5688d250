"""The gated norm: meshnorm's, torch's own composition, torch.compile of that, and the fused ones that are installed.

    PYTHONPATH=src python3 benchmarks/gated.py [--dtype float32] [--ways meshnorm,compile] [--csv FILE]
    PYTHONPATH=src python3 benchmarks/gated.py --device cpu --shapes 4096x512:128

Microseconds, medians, with a cold L2, and the percentage of the copy bandwidth of the same run that moving each byte
once would take: x, gate and y forward; dY, x, gate, dX and dGate backward, which gives dW too, through autograd. Each
way is held against float64 first.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import meshnorm
from meshnorm.benching.providers import in_one_line
from meshnorm.benching.timing import copy_bandwidth, device_time, host_time
from meshnorm.formula_gated import Gated, reference_gated_backward, reference_gated_forward

EPS = 1e-6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Shape(NamedTuple):
    """M rows of N numbers in groups of ``group``."""

    m: int
    n: int
    group: int
    norm_before_gate: bool

    def __str__(self) -> str:
        order = "norm, gate" if self.norm_before_gate else "gate, norm"
        return f"{self.m}x{self.n}:{self.group} {order}"


# Qwen3-Next's 32 heads of 128 over 16384 tokens; Mamba 2's 8192 channels in 8 groups; whole rows of Nemotron-H's width.
SHAPES = (
    Shape(16384 * 32, 128, 128, True),
    Shape(16384, 8192, 1024, False),
    Shape(16384, 8192, 8192, False),
    Shape(8192, 12288, 12288, False),
    Shape(8192, 12288, 12288, True),
)

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, gate, weight) -> y


def composition(shape: Shape) -> Norm:
    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        act = F.silu(gate.float())
        wide = x.float() if shape.norm_before_gate else x.float() * act
        groups = wide.unflatten(-1, (-1, shape.group))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPS)
        y = weight * groups.flatten(-2).to(x.dtype)
        return (y * act).to(x.dtype) if shape.norm_before_gate else y

    return norm


def compiled(shape: Shape) -> Norm:
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False  # else a second backward of one y is refused
    torch.compiler.reset()
    return torch.compile(composition(shape), dynamic=False)


def ours(shape: Shape) -> Norm:
    options = {"norm_before_gate": shape.norm_before_gate, "group_size": shape.group}
    return lambda x, gate, weight: meshnorm.gated_rms_norm(x, gate, weight, EPS, **options)


def fla(shape: Shape) -> Norm:
    if not shape.norm_before_gate or shape.group != shape.n:
        raise NotImplementedError("normalizes before the gate, and whole rows")
    norm = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated
    return lambda x, gate, weight: norm(x, gate, weight, None, activation="swish", eps=EPS)


def mamba(module: str) -> Callable[[Shape], Norm]:
    """The function that Mamba 2 came with, and copies of it."""

    def way(shape: Shape) -> Norm:
        norm = importlib.import_module(module).rmsnorm_fn
        options = {"eps": EPS, "group_size": shape.group, "norm_before_gate": shape.norm_before_gate}
        return lambda x, gate, weight: norm(x, weight, None, z=gate, **options)

    return way


WAYS: dict[str, Callable[[Shape], Norm]] = {
    "meshnorm": ours,
    "eager": composition,
    "compile": compiled,
    "fla": fla,
    "fla (mamba)": mamba("fla.modules.layernorm_gated"),
    "mamba_ssm": mamba("mamba_ssm.ops.triton.layernorm_gated"),
}


class Given(NamedTuple):
    x: Tensor
    gate: Tensor
    weight: Tensor
    dy: Tensor

    @staticmethod
    def drawn(shape: Shape, dtype: torch.dtype, device: str) -> Given:
        sizes = ((shape.m, shape.n), (shape.m, shape.n), (shape.n,), (shape.m, shape.n))
        return Given(*(torch.randn(*size, dtype=dtype, device=device) for size in sizes))

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, weight = (t.detach().requires_grad_() for t in self[:3])
        return x, gate, weight


def fault(shape: Shape, norm: Norm, given: Given) -> str:
    """What is wrong with y, dX or dGate of some rows, in words; empty where nothing is. (dW sums over all rows: its
    bound would need them all in float64.)"""
    leaves = given.leaves()
    y = norm(*leaves)
    gradients = torch.autograd.grad(y, leaves, given.dy)
    rows = torch.linspace(0, shape.m - 1, min(shape.m, 256), device=y.device).long()
    wide = given.x[rows].double(), given.gate[rows].double(), given.weight.double()
    how = Gated(EPS, 0.0, "gemma", shape.norm_before_gate, "silu", shape.group)
    exact = reference_gated_forward(*wide, how), *reference_gated_backward(given.dy[rows].double(), *wide, how)[:2]
    for name, got, true in zip(("y", "dX", "dGate"), (y, *gradients[:2]), exact, strict=True):
        assert true is not None
        error = (got[rows].double() - true).norm() / true.norm()
        if not error <= 4 * torch.finfo(given.x.dtype).eps:
            return f"{name} is off by {error:.2g}"
    return ""


def timed(shape: Shape, norm: Norm, given: Given, device: str, rep_ms: float) -> tuple[float, float, float]:
    """µs of the forward, of the backward, and of the host for both."""
    with torch.no_grad():
        forward = device_time(lambda: norm(*given[:3]), device, rep_ms)
    leaves = given.leaves()
    y = norm(*leaves)
    backward = device_time(lambda: torch.autograd.grad(y, leaves, given.dy, retain_graph=True), device, rep_ms)
    host = 0.0
    if device == "cuda":
        host = host_time(lambda: torch.autograd.grad(norm(*leaves), leaves, given.dy))
    return forward, backward, host


def parsed(text: str) -> list[Shape]:
    """ "4096x512:128" is gate first in groups of 128, "4096x512" norm first over whole rows."""
    found = []
    for part in text.split(","):
        sizes, _, group = part.partition(":")
        m, n = map(int, sizes.split("x"))
        found.append(Shape(m, n, int(group or n), not group))
    return found


def main(arguments: list[str] | None = None) -> list[tuple[str, ...]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--shapes", help="MxN:GROUP (gate first) or MxN (norm first), separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS), help=", ".join(WAYS))
    parser.add_argument("--rep-ms", type=float, default=100.0, help="how long each is timed")
    parser.add_argument("--csv", help="write the table here too")
    options = parser.parse_args(arguments)
    device, dtype = options.device, DTYPES[options.dtype]
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    bandwidth = copy_bandwidth(device, options.rep_ms)
    print(f"{name}, torch {torch.__version__}, {options.dtype}, copy {bandwidth:.0f} GB/s, {datetime.date.today()}")
    print(f"{'':<28} {'':<12} {'forward':>15} {'backward':>15} {'host':>8} µs (% of copy)")
    table = []
    for shape in parsed(options.shapes) if options.shapes else SHAPES:
        given = Given.drawn(shape, dtype, device)
        floor = shape.m * shape.n * dtype.itemsize / bandwidth / 1e3  # µs of one tensor moved once
        for way in options.ways.split(","):
            try:
                norm = WAYS[way](shape)
                wrong = fault(shape, norm, given)
                if wrong:
                    raise ValueError(wrong)
                forward, backward, host = timed(shape, norm, given, device, options.rep_ms)
            except Exception as error:  # whatever another library may raise
                print(f"{shape!s:<28} {way:<12} {in_one_line(error)}")
                continue
            share = f"({300 * floor / forward:.0f})", f"({500 * floor / backward:.0f})"
            row = f"{forward:9.1f} {share[0]:>5} {backward:9.1f} {share[1]:>5} {host:8.1f}"
            print(f"{shape!s:<28} {way:<12} {row}", flush=True)
            table.append((str(shape), options.dtype, way, f"{forward:.2f}", f"{backward:.2f}", f"{host:.1f}"))
        if device == "cuda":
            torch.cuda.empty_cache()
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([("shape", "dtype", "way", "forward_us", "backward_us", "host_us"), *table])
    return table


if __name__ == "__main__":
    main()
