"""The norm behind an addition beside its peers, in one run: time on the GPU, cold L2, percent of copy bandwidth.

Forward: x and the residual in, y and their sum out, 8·M·N bytes of bf16. Backward: dY, the gradient of the sum and the
saved sum in, one gradient out that serves x and the residual.

PYTHONPATH=src python3 benchmarks/add.py [--shapes 16384x8192,8192x16384] [--dtype bfloat16] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from meshnorm import add_rms_norm
from meshnorm.benching.providers import in_one_line
from meshnorm.benching.timing import copy_bandwidth, device_time
from meshnorm.cli.bench import DEFAULT_SHAPES, parse_shapes

EPS = 1e-6
REP_MS = 20.0
AddNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _compiled() -> AddNorm:
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False  # a y is differentiated more than once here
    torch.compiler.reset()

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        added = x + residual
        return F.rms_norm(added, weight.shape, weight, EPS), added

    return torch.compile(plain, dynamic=False)


def _quack() -> AddNorm:
    norm = importlib.import_module("quack.rmsnorm").rmsnorm
    return lambda x, residual, weight: norm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _liger() -> AddNorm:
    norm = importlib.import_module("liger_kernel.transformers.functional").liger_fused_add_rms_norm
    return lambda x, residual, weight: norm(x, residual, weight, EPS, 0.0, "llama", False)


PROVIDERS: dict[str, Callable[[], AddNorm]] = {
    "meshnorm": lambda: lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
    "compile": _compiled,
    "quack": _quack,
    "liger": _liger,
}


def fault(results: tuple[Tensor, ...], x: Tensor, residual: Tensor, weight: Tensor, dy: Tensor, dr: Tensor) -> str:
    """What is wrong with (y, sum, dX, dResidual, dW) in the first and the last rows, in words; empty where nothing is.

    Bounds are some roundings of the greatest magnitude of a row, since a peer may round the sum before it normalizes.
    """
    y, added, dx, d_residual, _ = results
    eps = torch.finfo(x.dtype).eps
    for rows in (slice(0, 64), slice(-64, None)):
        total = x[rows].double() + residual[rows].double()
        rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        x_hat, g = total * rstd, dy[rows].double() * weight.double()
        gradient = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) + dr[rows].double()
        expected = {"y": x_hat * weight.double(), "sum": total, "dX": gradient, "dResidual": gradient}
        for (name, right), got in zip(expected.items(), (y, added, dx, d_residual), strict=True):
            off = ((got[rows].double() - right).abs() / right.abs().amax(-1, keepdim=True)).max().item()
            if not off <= 4 * eps:
                return f"{name} is off by {off:.1e} of the row's greatest"
    return ""


def measure(name: str, m: int, n: int, dtype: torch.dtype) -> tuple[float, float] | str:
    """(µs forward, µs backward), or why there are none."""
    try:
        norm = PROVIDERS[name]()
        x, residual, dy, dr = (torch.randn(m, n, dtype=dtype, device="cuda") for _ in range(4))
        weight = torch.randn(n, dtype=dtype, device="cuda").requires_grad_()
        # Made by something, as in a block: both gradients may then be one tensor.
        leaves = (x.clone().requires_grad_(), residual.clone().requires_grad_())
        scaled = tuple(leaf * 1.0 for leaf in leaves)
        y, added = norm(*scaled, weight)
        inputs = (*scaled, weight)
        found = torch.autograd.grad((y, added), inputs, (dy, dr), retain_graph=True)
        reason = fault((y.detach(), added.detach(), *found), x, residual, weight.detach(), dy, dr)
        if reason:
            return reason
        del found
        with torch.no_grad():
            forward = device_time(lambda: norm(x, residual, weight), "cuda", REP_MS)
        backward = device_time(
            lambda: torch.autograd.grad((y, added), inputs, (dy, dr), retain_graph=True), "cuda", REP_MS
        )
        return forward, backward
    except Exception as error:  # whatever another library may raise on a shape that it does not take
        return in_one_line(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(DEFAULT_SHAPES["cuda"].split(",")[:12]))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--csv", type=argparse.FileType("w"))
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    copied = copy_bandwidth("cuda", 100)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{where}, {datetime.date.today()}. Copy bandwidth {copied:.0f} GB/s; µs (% of it for 4 tensors).")
    table = csv.writer(options.csv) if options.csv else None
    if table:
        table.writerow(("provider", "m", "n", "dtype", "forward_us", "backward_us", "copy_gb_s", "reason"))
    for m, n in parse_shapes(options.shapes):
        floor = 4 * m * n * dtype.itemsize / copied / 1e3
        for name in options.providers.split(","):
            found = measure(name, m, n, dtype)
            torch.cuda.empty_cache()
            times = (None, None) if isinstance(found, str) else found
            words = found if isinstance(found, str) else ", ".join(f"{t:.1f} ({100 * floor / t:.0f})" for t in found)
            print(f"{m}x{n} {name}: {words}", flush=True)
            if table:
                reason = found if isinstance(found, str) else ""
                table.writerow((name, m, n, options.dtype, *times, f"{copied:.0f}", reason))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
