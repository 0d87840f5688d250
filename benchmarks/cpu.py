"""The norm on a CPU: torch's own, torch.compile's and meshnorm's, side by side.

    PYTHONPATH=src python3 benchmarks/cpu.py [--threads 2] [--compile] [--shapes 4096x4096,…] [--csv FILE]

Milliseconds, medians; for an otherwise idle machine. Public functions; the backward, dX and dW, through autograd.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import meshnorm

SHAPES = ((4096, 4096), (65536, 128), (16384, 1000), (1024, 16384), (1, 4096))


def milliseconds(run: Callable, prepare: Callable[[], tuple] = tuple, seconds: float = 1.0) -> float:
    """The median time of ``run(*prepare())``, of which the preparation is not timed."""
    run(*prepare())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        given = prepare()
        start = time.perf_counter()
        run(*given)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


def autograd_pair(norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> tuple:
    with torch.no_grad():
        forward = milliseconds(lambda: norm(x, weight))
    leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    backward = milliseconds(lambda y: torch.autograd.grad(y, leaves, dy), lambda: (norm(*leaves),))
    return forward, backward


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return meshnorm.rms_norm(x, weight, 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="torch.compile too (needs a C++ compiler)")
    parser.add_argument("--shapes", default=",".join(f"{m}x{n}" for m, n in SHAPES), help="MxN,MxN,…")
    parser.add_argument("--csv", help="write the table here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, ", end="")
    print(f"torch {torch.__version__}, {datetime.date.today()}")
    print(f"{'':>12} {'':>8} {'':<14} {'forward':>9} {'backward':>9} ms")
    table = []
    for m, n in (map(int, shape.split("x")) for shape in arguments.shapes.split(",")):
        for dtype in (torch.bfloat16, torch.float32):
            x, dy, weight = (torch.randn(*size).to(dtype) for size in ((m, n), (m, n), (n,)))

            ways = {"F.rms_norm": lambda x, weight, dy: autograd_pair(torch_norm, x, weight, dy)}
            if arguments.compile:
                ways["torch.compile"] = lambda x, weight, dy: autograd_pair(torch.compile(torch_norm), x, weight, dy)
            ways["meshnorm"] = lambda x, weight, dy: autograd_pair(our_norm, x, weight, dy)
            for way, run in ways.items():
                torch.compiler.reset()
                times = run(x, weight, dy)
                row = (f"{m}x{n}", str(dtype).removeprefix("torch."), way, *(f"{t:.3f}" for t in times))
                table.append(row)
                print(f"{row[0]:>12} {row[1]:>8} {row[2]:<14} {row[3]:>9} {row[4]:>9}", flush=True)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            file.write(f"# {platform.machine()}, {arguments.threads} threads, torch {torch.__version__}, ")
            file.write(f"{datetime.date.today()}, medians in milliseconds\n")
            writer.writerow(("shape", "dtype", "way", "forward_ms", "backward_ms"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
