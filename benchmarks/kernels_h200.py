"""Time of each kernel against copy bandwidth, and a search for better launch settings. Runs on one CUDA GPU:

    PYTHONPATH=src python3 benchmarks/kernels_h200.py [--sweep] [--shapes 32768x4096,…] [--csv FILE]

bf16, cold L2, medians of ``triton.testing.do_bench``. 100% is the time that a device-to-device copy needs for the bytes
that must move: 4·M·N forward (x, y), 6·M·N backward (dY, x, dX; dW included in the time).

``--sweep`` compiles alternatives to the ladders of ``settings.py`` in as many processes as there are cores, times them,
and prints the best three beside the ladder's choice. It has the wide rows' two steps apart, and the sum of dW's partial
rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
    candidates: Callable[[int], list]


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


def row_candidates(n: int) -> list[RowSettings]:
    """Whole rows in tiles of 1 to 16 K elements, or wider where the row is; rows above 8192 in chunks too."""
    whole = triton.next_power_of_2(n)
    blocks = {whole} | {block for block in (4096, 8192, 16384) if block < n and n > 8192}
    return [
        RowSettings(rows, block, warps)
        for block in sorted(blocks)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for warps in (2, 4, 8, 16, 32)
        if (rows == 1 or 1024 <= rows * block <= 16384) and 8 <= rows * block / warps / 32 <= 64
    ]


def persistent_candidates(blocks: list[int], most: int) -> list[PersistentSettings]:
    return [
        PersistentSettings(rows, block, warps, per_sm, stages)
        for block in blocks
        for rows in (1, 2, 4, 8, 16, 32)
        for warps in (4, 8, 16, 32)
        for stages in (3, 4, 5)
        for per_sm in (1, 2, 4)
        if (rows == 1 or 1024 <= rows * block <= most)
        and 8 <= rows * block / warps / 32 <= 32
        and 8 <= per_sm * warps <= 64
        and 2 * 2 * rows * block * (stages - 1) * per_sm <= 220 * 1024
    ]


def backward_candidates(n: int) -> list[PersistentSettings]:
    whole = triton.next_power_of_2(n)
    return persistent_candidates([whole], 8192) if whole <= 32768 else []


def statistic_candidates(n: int) -> list[RowSettings]:
    return row_candidates(n) if n >= 4096 else []


def apply_candidates(n: int) -> list[RowSettings]:
    return [c for c in row_candidates(min(n, 4096)) if c.rows * c.block <= 8192 and n >= 4096]


def backward_apply_candidates(n: int) -> list[PersistentSettings]:
    return persistent_candidates([1024, 2048, 4096], 8192) if n > 8192 else []


SUBJECTS = (
    Subject(
        "forward",
        4,
        forward,
        lambda n: ladders.forward_split_settings(n) or ladders.forward_settings(n, DTYPE),
        row_candidates,
    ),
    Subject(
        "backward",
        6,
        backward,
        lambda n: ladders.backward_split_settings(n, DTYPE) or ladders.backward_settings(n, DTYPE),
        backward_candidates,
    ),
    Subject("statistic", 2, statistic, lambda n: ladders.statistic_settings(n, DTYPE), statistic_candidates),
    Subject("apply", 4, apply, lambda n: ladders.apply_settings(n, DTYPE), apply_candidates),
    Subject(
        "backward_statistic",
        4,
        backward_statistic,
        lambda n: ladders.statistic_settings(n, DTYPE),
        statistic_candidates,
    ),
    Subject(
        "backward_apply",
        6,
        backward_apply,
        lambda n: ladders.backward_apply_settings(n, DTYPE),
        backward_apply_candidates,
    ),
)


def microseconds(run: Callable[[], object], rep: int = 60) -> float:
    milliseconds: Any = do_bench(run, warmup=rep // 4, rep=rep, return_mode="median")
    return milliseconds * 1e3


def copy_bandwidth() -> float:
    """GB/s, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source)) / 1e3


def compile_all(work: tuple[str, int, list]) -> None:
    """In a process of its own: fill Triton's cache on disk. Kernels do not depend on the number of rows."""
    name, n, candidates = work
    subject = next(s for s in SUBJECTS if s.name == name)
    tensors = Tensors(64, n)
    for candidate in candidates:
        try:
            subject.run(tensors, candidate)
            torch.cuda.synchronize()
        except triton.runtime.errors.OutOfResources:
            pass


def compile_in_parallel(shapes: list[tuple[int, int]], subjects: list[Subject]) -> None:
    work = []
    for _, n in shapes:
        for subject in subjects:
            # The number of programs is no part of a kernel.
            distinct = {}
            for c in subject.candidates(n):
                key = (c.rows, c.block, c.warps, getattr(c, "stages", 0))
                distinct.setdefault(key, c)
            candidates = list(distinct.values())
            work += [(subject.name, n, candidates[i : i + 8]) for i in range(0, len(candidates), 8)]
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(compile_all, work))


def short(settings: RowSettings | None) -> str:
    if settings is None:
        return "statistic + apply"
    text = f"{settings.rows}x{settings.block} w{settings.warps}"
    if isinstance(settings, ladders.SplitSettings):
        text = f"split, {text} a{settings.lookahead}"
    return text + (f" p{settings.per_sm} s{settings.stages}" if isinstance(settings, PersistentSettings) else "")


def sweep(subject: Subject, tensors: Tensors, floor: float) -> str:
    found = []
    for candidate in subject.candidates(tensors.n):
        try:
            found.append((microseconds(lambda c=candidate: subject.run(tensors, c), rep=12), candidate))
        except triton.runtime.errors.OutOfResources:
            continue
    found.sort(key=lambda pair: pair[0])
    again = sorted(((microseconds(lambda c=c: subject.run(tensors, c)), c) for _, c in found[:5]), key=lambda p: p[0])
    return " | ".join(f"{short(c)} {us:.1f} µs {100 * floor / us:.0f}%" for us, c in again[:3])


def sweep_sum(n: int) -> str:
    """The sum of dW's partial rows, as many as the ladder's choice writes at the shape of this width."""
    m = next(m for m, width in SHAPES if width == n)
    tile = ladders.backward_settings(n, DTYPE) or ladders.backward_apply_settings(n, DTYPE)
    tiles, chunks = -(-m // tile.rows), -(-n // tile.block)
    sms = gpu.multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    programs = gpu.program_count(tiles, chunks, tile.per_sm, sms, int(gpu.PARTIALS_SHARE * m / 2))
    partial, dw = torch.randn(programs, n, device="cuda"), torch.empty(n, device="cuda", dtype=DTYPE)
    found = []
    for rows in (16, 32, 64, 128):
        for block in (16, 32, 64, 128):
            for warps in (2, 4, 8):
                if 4 <= rows * block / warps / 32 <= 32:
                    chosen = RowSettings(rows, block, warps)
                    us = microseconds(lambda c=chosen: gpu.sum_partials(partial, dw, settings=c), rep=12)
                    found.append((us, chosen))
    found.sort(key=lambda pair: pair[0])
    now = microseconds(lambda: gpu.sum_partials(partial, dw))
    best = " | ".join(f"{short(c)} {us:.1f} µs" for us, c in found[:3])
    return f"{programs} rows of {n}: {short(ladders.SUM_PARTIALS)} {now:.1f} µs; best {best}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other launch settings")
    parser.add_argument("--shapes", default=",".join(f"{m}x{n}" for m, n in SHAPES), help="MxN,MxN,…")
    parser.add_argument("--kernels", default=",".join(s.name for s in SUBJECTS), help="which of them")
    parser.add_argument("--csv", help="write the table here too")
    arguments = parser.parse_args()
    shapes = [(int(m), int(n)) for m, n in (shape.split("x") for shape in arguments.shapes.split(","))]
    subjects = [s for s in SUBJECTS if s.name in arguments.kernels.split(",")]

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, ", end="")
    print(f"{datetime.date.today()}, {str(DTYPE).removeprefix('torch.')}")
    if arguments.sweep:
        compile_in_parallel(shapes, subjects)
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
            if arguments.sweep and (best := sweep(subject, tensors, floor)):
                print(f"{'':>14} best: {best}", flush=True)
        if arguments.sweep and any(n == width for _, width in SHAPES):
            print(f"{'':>14} sum of partials, {sweep_sum(n)}", flush=True)
        del tensors
        torch.cuda.empty_cache()
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("shape", "kernel", "microseconds", "percent_of_copy", "settings"))
            writer.writerows(table)


if __name__ == "__main__":
    main()
