"""Sweep of the split kernels' settings on a GPU: what is right, and how fast. For SPLIT settings in settings.py.

PYTHONPATH=src python3 benchmarks/split_sweep.py [--shapes 8192x16384,...] [--passes backward,forward]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch
import triton
from triton.testing import do_bench

from meshnorm.formula import reference_backward, reference_forward
from meshnorm.kernels.gpu import multiprocessors, sum_partials
from meshnorm.kernels.gpu_split import backward_split, forward_split
from meshnorm.kernels.settings import SplitSettings

SHAPES = "4096x32768,2048x65536,1024x131072"
BYTES = {"backward": 6, "forward": 4}


class Data:
    def __init__(self, m: int, n: int, dtype: torch.dtype = torch.bfloat16):
        self.x = torch.randn(1, m, n, device="cuda", dtype=dtype)
        self.dy = torch.randn_like(self.x)
        self.weight = torch.randn(n, device="cuda", dtype=dtype)
        self.rstd = torch.ones(m, device="cuda")
        self.y, self.dx = torch.empty_like(self.x[0]), torch.empty_like(self.x[0])
        self.dw = torch.empty_like(self.weight)
        self.sms = multiprocessors(self.x.device)

    def run(self, name: str, settings: SplitSettings) -> None:
        given = (settings, self.sms, settings.stages)
        if name == "forward":
            forward_split(self.x, self.weight, 1e-6, 0.0, "llama", self.y, self.rstd, *given)
        else:
            partial = backward_split(self.dy, self.x, self.weight, self.rstd, 0.0, self.dx, True, *given)
            sum_partials(partial, self.dw)


def candidates(name: str) -> list[SplitSettings]:
    return [
        SplitSettings(1, block, warps, per_sm, stages, lookahead)
        for block, warps, per_sm, stages, lookahead in itertools.product(
            (2048, 4096, 8192), (2, 4, 8, 16), (1, 2, 4), (3, 4), (1, 2)
        )
        if 8 <= block // (warps * 32) <= (16 if name == "backward" and lookahead == 2 else 32)
        and 8 <= per_sm * warps <= 32
        and 4096 <= per_sm * block <= 16384
    ]


def compile_all(work: tuple[str, int, list[SplitSettings]]) -> None:
    """In a process of its own: fill Triton's cache on disk."""
    name, n, settings = work
    data = Data(8, n)
    for each in settings:
        data.run(name, each)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--passes", default="backward,forward")
    options = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes.split(",")]
    names = options.passes.split(",")
    work = [(name, n, candidates(name)[i::4]) for _, n in shapes for name in names for i in range(4)]
    with ProcessPoolExecutor(min(14, os.cpu_count() or 2), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, work))
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e6)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, copy {copy:.0f} GB/s"
    )
    for m, n in shapes:
        data = Data(m, n)
        x64, weight64 = data.x[0].double(), data.weight.double()
        rstd = torch.rsqrt(x64.square().mean(-1) + 1e-6).float()
        exact = {"forward": (reference_forward(x64, weight64, 1e-6),)}
        exact["backward"] = reference_backward(data.dy[0].double(), x64, weight64, 1e-6)  # type: ignore[assignment]
        del x64
        for name in names:
            found = []
            for settings in candidates(name):
                data.y.fill_(float("nan")), data.dx.fill_(float("nan")), data.rstd.copy_(rstd)
                data.run(name, settings)
                results = (data.y,) if name == "forward" else (data.dx, data.dw)
                error = max(
                    ((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact[name], strict=True)
                )
                if not error < 4e-3:
                    print("WRONG", name, m, n, settings, error)
                    continue
                took = do_bench(lambda: data.run(name, settings), warmup=3, rep=10, return_mode="median") * 1e3  # noqa: B023
                found.append((took, settings))
            for took, s in sorted(found, key=lambda each: each[0])[:4]:
                share = BYTES[name] * m * n / copy / 1e3 / took
                text = f"{s.block} columns, {s.warps} warps, {s.per_sm} a SM, {s.stages} stages, {s.lookahead} ahead"
                print(f"{name:>9} {m}x{n}  {took:6.1f} µs {share:.1%}  {text}", flush=True)


if __name__ == "__main__":
    main()
