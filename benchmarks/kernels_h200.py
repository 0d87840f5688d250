"""Time of each kernel against copy bandwidth. Runs on one CUDA GPU (``tune.py`` searches for better launch settings):

    PYTHONPATH=src python3 benchmarks/kernels_h200.py [--shapes 32768x4096,…] [--csv FILE]

bf16, cold L2, medians of ``triton.testing.do_bench``. 100% is the time that a device-to-device copy needs for the bytes
that must move: 4·M·N forward (x, y), 6·M·N backward (dY, x, dX; dW included in the time).
"""

from __future__ import annotations

import argparse
import csv
import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.testing import do_bench

from meshnorm.kernels import gpu
from meshnorm.kernels import settings as ladders
from meshnorm.kernels.settings import PersistentSettings, RowSettings

SHAPES = (
    (1048576, 128),
    (262144, 512),
    (131072, 1024),
    (65536, 2048),
    (32768, 4096),
    (24576, 5120),
    (16384, 8192),
    (8192, 12288),
    (8192, 16384),
    (4096, 32768),
    (2048, 65536),
    (1024, 131072),
)
DTYPE = torch.bfloat16


class Tensors:
    """One shape's inputs and outputs."""

    def __init__(self, m: int, n: int) -> None:
        self.m, self.n = m, n
        self.x, self.dy = (torch.randn(1, m, n, device="cuda", dtype=DTYPE) for _ in range(2))
        self.y, self.dx = (torch.empty(m, n, device="cuda", dtype=DTYPE) for _ in range(2))
        self.weight, self.dw = torch.randn(n, device="cuda", dtype=DTYPE), torch.empty(n, device="cuda", dtype=DTYPE)
        self.rstd, self.total = torch.ones(m, device="cuda"), torch.zeros(m, device="cuda")


class Subject(NamedTuple):
    """What is timed: ``run(tensors, settings)``, the bytes that it must move per element, the ladder's choice."""

    name: str
    bytes_per_element: int
    run: Callable[[Tensors, Any], None]
    chosen: Callable[[int], RowSettings | None]


def forward(t: Tensors, settings: RowSettings | None) -> None:
    gpu.forward(t.x, t.weight, 1e-6, 0.0, "llama", t.y, t.rstd, settings=settings)


def backward(t: Tensors, settings: PersistentSettings | None) -> None:
    gpu.backward(t.dy, t.x, t.weight, t.rstd, 0.0, t.dx, t.dw, settings=settings)


def statistic(t: Tensors, settings: RowSettings | None) -> None:
    gpu.statistic(t.x, t.total, settings=settings)


def apply(t: Tensors, settings: RowSettings | None) -> None:
    gpu.apply(t.x, t.weight, t.total, t.n, 1e-6, 0.0, "llama", t.y, t.rstd, settings=settings)


def backward_statistic(t: Tensors, settings: RowSettings | None) -> None:
    gpu.backward_statistic(t.dy, t.x, t.weight, t.rstd, 0.0, t.total, settings=settings)


def backward_apply(t: Tensors, settings: PersistentSettings | None) -> None:
    gpu.backward_apply(t.dy, t.x, t.weight, t.rstd, t.total, t.n, 0.0, t.dx, t.dw, settings=settings)


SUBJECTS = (
    Subject("forward", 4, forward, lambda n: ladders.forward_split_settings(n) or ladders.forward_settings(n, DTYPE)),
    Subject(
        "backward",
        6,
        backward,
        lambda n: ladders.backward_split_settings(n, DTYPE) or ladders.backward_settings(n, DTYPE),
    ),
    Subject("statistic", 2, statistic, lambda n: ladders.statistic_settings(n, DTYPE)),
    Subject("apply", 4, apply, lambda n: ladders.apply_settings(n, DTYPE)),
    Subject("backward_statistic", 4, backward_statistic, lambda n: ladders.statistic_settings(n, DTYPE)),
    Subject("backward_apply", 6, backward_apply, lambda n: ladders.backward_apply_settings(n, DTYPE)),
)


def microseconds(run: Callable[[], object], rep: int = 60) -> float:
    milliseconds: Any = do_bench(run, warmup=rep // 4, rep=rep, return_mode="median")
    return milliseconds * 1e3


def copy_bandwidth() -> float:
    """GB/s, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source)) / 1e3


def short(settings: RowSettings | None) -> str:
    if settings is None:
        return "statistic + apply"
    text = f"{settings.rows}x{settings.block} w{settings.warps}"
    if isinstance(settings, ladders.SplitSettings):
        text = f"split, {text} a{settings.lookahead}"
    return text + (f" p{settings.per_sm} s{settings.stages}" if isinstance(settings, PersistentSettings) else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(f"{m}x{n}" for m, n in SHAPES), help="MxN,MxN,…")
    parser.add_argument("--kernels", default=",".join(s.name for s in SUBJECTS), help="which of them")
    parser.add_argument("--csv", help="write the table here too")
    arguments = parser.parse_args()
    shapes = [(int(m), int(n)) for m, n in (shape.split("x") for shape in arguments.shapes.split(","))]
    subjects = [s for s in SUBJECTS if s.name in arguments.kernels.split(",")]

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, ", end="")
    print(f"{datetime.date.today()}, {str(DTYPE).removeprefix('torch.')}")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth:.0f} GB/s")
    table = []
    for m, n in shapes:
        tensors = Tensors(m, n)
        for subject in subjects:
            floor = subject.bytes_per_element * m * n / bandwidth / 1e3
            us = microseconds(lambda s=subject, t=tensors: s.run(t, None))
            row = (f"{m}x{n}", subject.name, f"{us:.1f}", f"{100 * floor / us:.0f}", short(subject.chosen(n)))
            table.append(row)
            print(f"{row[0]:>14} {row[1]:<19} {row[2]:>7} µs {row[3]:>3}%  {row[4]}", flush=True)
        del tensors
        torch.cuda.empty_cache()
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("shape", "kernel", "microseconds", "percent_of_copy", "settings"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
