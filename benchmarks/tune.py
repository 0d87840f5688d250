"""Tries the neighbours of every launch setting in ``kernels/settings.py`` on this GPU, and says what would change.

    PYTHONPATH=src python3 benchmarks/tune.py [--widths 4096,8192] [--dtypes bfloat16] [--passes forward,backward]
        [--csv FILE] [--list]

A kernel is timed at each width with a cold L2 on tensors of 256 MiB, with the present settings and with those that
differ in one thing or two: half or twice the rows, warps or programs, a pipeline stage more or less, another block or
another split of the row. The best few are timed again, in turns with the present ones. What is shown as a change was
faster by more than ``--threshold`` percent, and right (its results are held against those of the present settings).

Candidates are compiled in as many processes as there are cores, before any is timed; ``--list`` says how many there are
and needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from meshnorm.benching.timing import copy_bandwidth, device_time
from meshnorm.formula import accumulation_dtype
from meshnorm.kernels import gpu, gpu_split
from meshnorm.kernels import settings as ladders
from meshnorm.kernels.settings import PersistentSettings, RowSettings, SplitSettings

WIDTHS = (128, 512, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536, 131072)
TENSOR = 2**28  # bytes of x
SHARED_MEMORY = 227 * 1024  # of a program, on the GPUs that have most; where there is less, a candidate is refused
AGAIN = 4  # candidates that are timed again, in turns with the present settings
ROUNDS = 5
SHORT_MS, LONG_MS = 4.0, 8.0
WRONG = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}  # relative distance of two right results, and more


class Tensors:
    """One width's inputs and outputs."""

    def __init__(self, m: int, n: int, dtype: torch.dtype) -> None:
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype)

        self.n, self.dtype, acc = n, dtype, accumulation_dtype(dtype)
        self.x, self.dy, self.weight = drawn(1, m, n), drawn(1, m, n), drawn(n)
        self.y, self.dx, self.dw = drawn(m, n), drawn(m, n), drawn(n)
        self.rstd = torch.rsqrt(self.x[0].to(acc).square().mean(1) + 1e-6)
        self.own_rstd, self.total = torch.empty_like(self.rstd), torch.full_like(self.rstd, 0.5)
        self.sms = gpu.multiprocessors(self.x.device)
        self.partial = torch.randn(2 * self.sms, n, device="cuda", dtype=acc)


# --- what is tuned: each runs on Tensors with settings, and gives what it wrote ---


def forward(t: Tensors, settings: Any) -> list[torch.Tensor]:
    given = (t.x, t.weight, 1e-6, 0.0, "llama", t.y, t.own_rstd)
    if isinstance(settings, SplitSettings):
        gpu_split.forward_split(*given, settings, t.sms, settings.stages)
    else:
        gpu.forward(*given, settings=settings)
    return [t.y, t.own_rstd]


def backward(t: Tensors, settings: Any) -> list[torch.Tensor]:
    given = (t.dy, t.x, t.weight, t.rstd, 0.0, t.dx)
    if isinstance(settings, SplitSettings):
        partial = gpu_split.backward_split(*given, True, settings, t.sms, settings.stages)
        assert partial is not None
        gpu.sum_partials(partial, t.dw)
    else:
        gpu.backward(*given, t.dw, settings=settings)
    return [t.dx, t.dw]


def statistic(t: Tensors, settings: Any) -> list[torch.Tensor]:
    gpu.statistic(t.x, t.own_rstd, settings=settings)
    return [t.own_rstd]


def apply(t: Tensors, settings: Any) -> list[torch.Tensor]:
    gpu.apply(t.x, t.weight, t.total, t.n, 1e-6, 0.0, "llama", t.y, t.own_rstd, settings=settings)
    return [t.y, t.own_rstd]


def backward_statistic(t: Tensors, settings: Any) -> list[torch.Tensor]:
    gpu.backward_statistic(t.dy, t.x, t.weight, t.rstd, 0.0, t.own_rstd, settings=settings)
    return [t.own_rstd]


def backward_apply(t: Tensors, settings: Any) -> list[torch.Tensor]:
    gpu.backward_apply(t.dy, t.x, t.weight, t.rstd, t.total, t.n, 0.0, t.dx, t.dw, settings=settings)
    return [t.dx, t.dw]


def sum_partials(t: Tensors, settings: Any) -> list[torch.Tensor]:
    gpu.sum_partials(t.partial, t.dw, settings=settings)
    return [t.dw]


@dataclass(frozen=True)
class Subject:
    """``tensors``: how many of x's size must move, 0 where none has. ``present(n, dtype)``: the settings of today."""

    name: str
    tensors: int
    run: Callable[[Tensors, Any], list[torch.Tensor]]
    present: Callable[[int, torch.dtype], RowSettings | None]


def present_forward(n: int, dtype: torch.dtype) -> RowSettings:
    return ladders.forward_split_settings(n) or ladders.forward_settings(n, dtype)


def present_backward(n: int, dtype: torch.dtype) -> RowSettings | None:
    return ladders.backward_split_settings(n, dtype) or ladders.backward_settings(n, dtype)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("forward", 2, forward, present_forward),
        Subject("backward", 3, backward, present_backward),
        Subject("statistic", 1, statistic, ladders.statistic_settings),
        Subject("apply", 2, apply, ladders.apply_settings),
        Subject("backward_statistic", 2, backward_statistic, ladders.statistic_settings),
        Subject("backward_apply", 3, backward_apply, ladders.backward_apply_settings),
        Subject("sum_partials", 0, sum_partials, lambda n, dtype: ladders.SUM_PARTIALS),
    )
}


# --- candidates ---


def candidates(subject: Subject, n: int, dtype: torch.dtype) -> list[RowSettings]:
    """The present settings first, then their neighbours."""
    now = subject.present(n, dtype)
    if now is None:
        return []
    pools = [now]
    if subject.name in ("forward", "backward"):
        pools += _other_ways(subject.name, n)
    found = (
        each
        for base in pools
        for each in _neighbours(subject.name, base, n)
        if _is_sensible(subject.name, each, n, dtype)
    )
    return [now, *(each for each in dict.fromkeys(found) if each != now)]


def _other_ways(name: str, n: int) -> list[RowSettings]:
    """What wide rows, and rows that are no power of two, have beside the ladder's choice: the whole row in one program,
    chunks of it, or a split."""
    whole = 1 << (n - 1).bit_length()
    found: list[RowSettings] = []
    if n > 8192:
        found.append(ladders.FORWARD_SPLIT if name == "forward" else ladders.BACKWARD_SPLIT)
        if name == "backward" and whole <= 16384:
            found.append(PersistentSettings(1, whole, 16, 1, 3))
        if name == "forward" and whole <= 32768:
            found.append(RowSettings(1, whole, 16))
    if name == "forward" and (n > 8192 or n != whole):
        found += [RowSettings(1, block, 8) for block in (1024, 2048, 4096, 8192, 16384) if n <= 6 * block < 6 * n]
    return found


def _neighbours(name: str, base: RowSettings, n: int) -> Iterable[RowSettings]:
    steps: dict[str, tuple[int, ...]] = {
        "rows": (base.rows // 2, base.rows, base.rows * 2),
        "warps": (base.warps // 2, base.warps, base.warps * 2),
    }
    if isinstance(base, SplitSettings):
        steps["rows"] = (base.rows,)
        steps["lookahead"] = (1, 2)
    if base.block < n or name == "sum_partials":  # the row goes in chunks
        steps["block"] = (base.block // 2, base.block, base.block * 2)
    if isinstance(base, PersistentSettings):
        steps["per_sm"] = (base.per_sm // 2, base.per_sm, base.per_sm + 1, base.per_sm * 2)
        steps["stages"] = (base.stages - 1, base.stages, base.stages + 1)
    for values in itertools.product(*steps.values()):
        if sum(value != getattr(base, field) for field, value in zip(steps, values, strict=True)) <= 2:
            yield replace(base, **dict(zip(steps, values, strict=True)))


def _is_sensible(name: str, s: RowSettings, n: int, dtype: torch.dtype) -> bool:
    """What may be faster, and can run: registers, shared memory and threads of a multiprocessor suffice."""
    elements = s.rows * s.block / (s.warps * 32) if s.warps else 0  # of a tile, to a thread
    if not (s.rows >= 1 and 1 <= s.warps <= 32 and 1 <= elements <= 64):
        return False
    if isinstance(s, PersistentSettings):
        read = dtype.itemsize * (1 if name == "forward" else 2)
        pipelined = s.rows * s.block * read * (s.stages - 1) * s.per_sm
        if not (s.stages >= 2 and s.per_sm >= 1 and s.per_sm * s.warps <= 64 and pipelined <= SHARED_MEMORY):
            return False
        if elements > 32:
            return False
    if isinstance(s, SplitSettings):
        return s.block < n and s.per_sm * s.warps <= 32 and elements >= 4
    return True


def ladder_of(subject: Subject, n: int, settings: RowSettings) -> str:
    """The name that settings.py has for the present settings."""
    for name, value in vars(ladders).items():
        if name.isupper() and value == settings:
            return name
    for name in ("FORWARD", "BACKWARD"):
        for widest, each in getattr(ladders, name):
            if each == settings:
                return f"{name} ≤ {widest}"
    return subject.name


# --- compiling and timing ---


def compile_all(work: tuple[str, int, str, list[RowSettings]]) -> None:
    """In a process of its own: fills Triton's cache on disk. Kernels do not depend on the number of rows."""
    name, n, dtype, chosen = work
    tensors = Tensors(64, n, getattr(torch, dtype))
    for each in chosen:
        try:
            SUBJECTS[name].run(tensors, each)
            torch.cuda.synchronize()
        except Exception:  # refused: timing will meet it again, and leave it out
            continue


def compile_in_parallel(plan: dict[tuple[str, int, str], list[RowSettings]]) -> None:
    work = []
    for (name, n, dtype), chosen in plan.items():
        # The number of programs is no part of a kernel, but where it bounds a split kernel's registers.
        distinct: dict[tuple, RowSettings] = {}
        for each in chosen:
            distinct.setdefault(astuple(each if isinstance(each, SplitSettings) else _without_per_sm(each)), each)
        kernels = list(distinct.values())
        work += [(name, n, dtype, kernels[i : i + 6]) for i in range(0, len(kernels), 6)]
    processes = max(1, min(len(work), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, work))


def _without_per_sm(settings: RowSettings) -> RowSettings:
    return replace(settings, per_sm=1) if isinstance(settings, PersistentSettings) else settings


@dataclass(frozen=True)
class Timed:
    settings: RowSettings
    microseconds: float  # inf where it was refused or wrong
    note: str = ""


def timed(subject: Subject, tensors: Tensors, chosen: list[RowSettings]) -> list[Timed]:
    """The present settings first; the best of the others, and they, timed again in turns."""
    dtype = str(tensors.dtype).removeprefix("torch.")
    written = subject.run(tensors, chosen[0])
    expected = [each.clone() for each in written]
    found = []
    for settings in chosen:
        for each in written:
            each.fill_(float("nan"))  # what a candidate does not write is wrong too
        try:
            results = subject.run(tensors, settings)
            off = max(_distance(a, b) for a, b in zip(results, expected, strict=True))
            if not off <= WRONG[dtype]:
                found.append(Timed(settings, float("inf"), f"wrong: off by {off:.2g}"))
                continue
            took = device_time(lambda s=settings: subject.run(tensors, s), "cuda", SHORT_MS)
            found.append(Timed(settings, took))
        except Exception as error:  # not enough registers, shared memory or room for all programs
            found.append(Timed(settings, float("inf"), f"{type(error).__name__}: {error}"[:90]))
    best = sorted(found[1:], key=lambda each: each.microseconds)[:AGAIN]
    finalists = [found[0], *(each for each in best if each.microseconds < 1.05 * found[0].microseconds)]
    times: dict[RowSettings, list[float]] = {each.settings: [] for each in finalists}
    for _ in range(ROUNDS if len(finalists) > 1 else 1):
        for settings, taken in times.items():
            taken.append(device_time(lambda s=settings: subject.run(tensors, s), "cuda", LONG_MS))
    again = {settings: statistics.median(taken) for settings, taken in times.items()}
    return [replace(each, microseconds=again.get(each.settings, each.microseconds)) for each in found]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()


# --- report ---


def words(settings: RowSettings) -> str:
    given = ", ".join(f"{field.name}={getattr(settings, field.name)}" for field in fields(settings))
    return f"{type(settings).__name__}({given})"


def report(
    console: Console, found: dict[tuple[str, int, str], list[Timed]], copy_gb_s: float, threshold: float
) -> list[tuple]:
    """Prints both tables; gives the lines of the CSV."""
    changes = Table(title=f"what would change (more than {threshold:g}% faster)")
    measured = Table(title="the present settings, and the best others")
    for table in (changes, measured):
        for column in ("step", "width", "dtype", "µs", "% of copy", "faster by", "settings"):
            table.add_column(column, justify="right" if column in ("width", "µs", "% of copy", "faster by") else "left")
    lines = []
    for (name, n, dtype), results in found.items():
        subject, now = SUBJECTS[name], results[0]
        floor = subject.tensors * (TENSOR // n // getattr(torch, dtype).itemsize) * n * getattr(torch, dtype).itemsize

        def row(each: Timed, step: str, floor=floor, now=now, n=n, dtype=dtype) -> tuple[str, ...]:
            gain = f"{100 * (now.microseconds / each.microseconds - 1):+.1f}%"
            percent = f"{100 * floor / (each.microseconds * 1e3 * copy_gb_s):.1f}" if floor else ""
            return (step, str(n), dtype, f"{each.microseconds:.1f}", percent, gain, words(each.settings))

        step = f"{name}: {ladder_of(subject, n, now.settings)}"
        ranked = sorted((each for each in results[1:] if not each.note), key=lambda each: each.microseconds)
        measured.add_row(*row(now, step), style="bold")
        for each in ranked[:3]:
            measured.add_row(*row(each, ""))
        if ranked and now.microseconds / ranked[0].microseconds - 1 > threshold / 100:
            changes.add_row(*row(now, step))
            changes.add_row(*row(ranked[0], ""), style="bold green", end_section=True)
        for each in results:
            if each.note.startswith("wrong"):
                console.print(f"{name} {n} {dtype}: {words(each.settings)}: {each.note}", markup=False)
            lines.append((name, n, dtype, f"{each.microseconds:.2f}", each is now, words(each.settings), each.note))
    console.print(measured)
    console.print(changes if changes.row_count else f"nothing would change: no candidate is {threshold:g}% faster")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--passes", default="forward,backward", help=f"of {','.join(SUBJECTS)}")
    parser.add_argument("--threshold", type=float, default=1.5, help="percent")
    parser.add_argument("--csv", type=Path, help="write every measurement here")
    parser.add_argument("--list", action="store_true", help="how many candidates there are, without running any")
    options = parser.parse_args()
    plan: dict[tuple[str, int, str], list[RowSettings]] = {}
    for dtype, n, name in itertools.product(
        options.dtypes.split(","), map(int, options.widths.split(",")), options.passes.split(",")
    ):
        plan[name, n, dtype] = candidates(SUBJECTS[name], n, getattr(torch, dtype))
    plan = {unit: chosen for unit, chosen in plan.items() if chosen}
    console = Console(width=200)
    if options.list:
        for (name, n, dtype), chosen in plan.items():
            console.print(f"{name} {n} {dtype}: {len(chosen)} candidates; now {words(chosen[0])}", markup=False)
        return
    import triton

    compile_in_parallel(plan)
    copy_gb_s = copy_bandwidth("cuda", 100.0)
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"{datetime.date.today()}, copy bandwidth {copy_gb_s:,.0f} GB/s",
        markup=False,
    )
    found = {}
    for (name, n, dtype), chosen in plan.items():
        tensors = Tensors(TENSOR // n // getattr(torch, dtype).itemsize, n, getattr(torch, dtype))
        found[name, n, dtype] = timed(SUBJECTS[name], tensors, chosen)
        del tensors
        torch.cuda.empty_cache()
    lines = report(console, found, copy_gb_s, options.threshold)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("kernel", "width", "dtype", "microseconds", "present", "settings", "note"))
            writer.writerows(lines)


if __name__ == "__main__":
    main()
