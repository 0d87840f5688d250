"""The kernels alone against the copy bandwidth of this GPU; and whether other launch settings would be faster.

    PYTHONPATH=src python3 benchmarks/tune.py [--present] [--shapes 4096,16384x8192] [--dtypes bfloat16,float32]
        [--passes forward,backward] [--most 24] [--csv FILE] [--list]

``--present`` times the settings that ``kernels/settings.py`` chooses, and nothing else. Without it every choice is held
against others: another kernel for the same rows (whole in one program, read twice, in chunks, over the programs of a
cluster, split over independent programs), and the neighbours of the present settings, which differ in one thing or two.
The best few are timed again, in turns with the present ones. What is shown as a change was faster by more than
``--threshold`` percent, and right (its results are held against those of the present settings).

Times are medians, with a cold L2, of calls that follow one another on the GPU. 100% is the time that a device-to-device
copy needs for the bytes that must move: x and y forward, dY, x and dX backward, whose dW is included in the time.

Candidates are compiled in as many processes as there are cores, before any is timed; ``--list`` says how many there are
and needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from rich.console import Console
from rich.table import Table

from meshnorm.benching.timing import copy_bandwidth, device_time
from meshnorm.formula import accumulation_dtype
from meshnorm.kernels import gpu, gpu_split, tiles
from meshnorm.kernels import settings as ladders
from meshnorm.kernels.settings import ChunkSettings, PersistentSettings, RowSettings, SplitSettings

Settings: TypeAlias = "RowSettings | PersistentSettings | ChunkSettings"

# Rows of bfloat16; wider dtypes have fewer, so that a tensor stays as large.
SHAPES = (
    "1048576x128,262144x512,131072x1024,65536x2048,32768x4096,24576x5120,16384x8192,8192x12288,8192x16384,4096x32768,"
    "2048x65536,1024x131072"
)
TENSOR = 2**28  # bytes of x, where only the width is given
# Of an H200. What does not fit the GPU at hand is refused, and left out.
REGISTERS, SHARED_MEMORY, MOST_IN_A_CLUSTER = 65536, 227 * 1024, 16
AGAIN = 4  # candidates that are timed again, in turns with the present settings
ROUNDS = 5
SHORT_MS, LONG_MS = 4.0, 8.0
WRONG = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}  # relative distance of two right results, and more


class Unit(NamedTuple):
    """A pass over rows of one shape."""

    name: str
    m: int
    n: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


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
        self.sms = tiles.multiprocessors(self.x.device)
        self.partial = torch.randn(partial_rows(n, dtype, self.sms), n, device="cuda", dtype=acc)


def partial_rows(n: int, dtype: torch.dtype, sms: int) -> int:
    """About as many as the backward leaves."""
    now = present_backward(n, dtype)
    parts = parts_of(n, now) if isinstance(now, ChunkSettings | SplitSettings) else 1
    return max(1, (1 if now is None else now.per_sm) * sms // parts)


def parts_of(n: int, settings: ChunkSettings | SplitSettings) -> int:
    """Programs to a row."""
    return ladders.parts_of(n, settings) if isinstance(settings, ChunkSettings) else -(-n // settings.block)


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
    present: Callable[[int, torch.dtype], Settings | None]


def present_forward(n: int, dtype: torch.dtype) -> RowSettings | SplitSettings:
    """As ``gpu.forward`` chooses."""
    return ladders.forward_split_settings(n, dtype) or ladders.forward_settings(n, dtype)


def present_backward(n: int, dtype: torch.dtype) -> PersistentSettings | ChunkSettings | None:
    """As ``gpu.backward`` chooses."""
    chunks = ladders.backward_chunk_settings(n, dtype)
    return chunks or ladders.backward_split_settings(n, dtype) or ladders.backward_settings(n, dtype)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("forward", 2, forward, present_forward),
        Subject("backward", 3, backward, present_backward),
        Subject("statistic", 1, statistic, ladders.statistic_settings),
        Subject("apply", 2, apply, ladders.apply_settings),
        Subject("backward_statistic", 2, backward_statistic, ladders.statistic_settings),
        Subject("backward_apply", 3, backward_apply, ladders.backward_apply_settings),
        Subject("sum_partials", 0, sum_partials, lambda n, dtype: ladders.sum_settings(n)),
    )
}


# --- candidates ---


def candidates(subject: Subject, n: int, dtype: torch.dtype, most: int) -> list[Settings]:
    """The present settings first, then the other kernels, then neighbours of the present settings, then those of the
    other kernels; ``most`` of them."""
    now = subject.present(n, dtype)
    if now is None:
        return []
    others: list[Settings] = []
    if subject.name == "forward":
        others = [*other_forwards(n, dtype)]
    elif subject.name == "backward":
        others = [*other_backwards(n, dtype)]
    others = [each for each in dict.fromkeys(others) if each != now and is_sensible(subject.name, each, n, dtype)]
    nearby = [*neighbours(subject.name, now, n, 2)]
    far = itertools.zip_longest(*(neighbours(subject.name, each, n, 1) for each in others))
    found = [*nearby, *(each for turn in far for each in turn if each is not None)]
    found = [each for each in found if is_sensible(subject.name, each, n, dtype)]
    return [*dict.fromkeys([now, *others, *found])][:most]


def other_forwards(n: int, dtype: torch.dtype) -> Iterator[RowSettings | SplitSettings]:
    whole = 1 << (n - 1).bit_length()
    if n > 512:
        if whole <= 32768:
            yield RowSettings(1, whole, max(4, min(32, whole // 1024)))
        for block in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            if n <= 8 * block < 8 * n:
                yield RowSettings(1, block, max(4, min(32, block // 256)))
    if n > 8192:
        yield ladders.FORWARD_SPLIT_32 if dtype == torch.float32 else ladders.FORWARD_SPLIT


def other_backwards(n: int, dtype: torch.dtype) -> Iterator[PersistentSettings | ChunkSettings]:
    whole = ladders.backward_settings(n, dtype)
    if whole is not None:
        yield whole
    if n > 1024:
        yield from chunkings(n, dtype)
    if n > 8192:
        yield ladders.BACKWARD_SPLIT if n <= 65536 else ladders.BACKWARD_SPLIT_WIDEST


def chunkings(n: int, dtype: torch.dtype) -> list[ChunkSettings]:
    """Rows in chunks, over clusters where they are wide: those that pad least, and of these the best three numbers of
    programs to a row, nearest to 6144 columns to a program. Of each, as many programs to a multiprocessor as fit."""
    found: dict[int, tuple[tuple[float, float, float], ChunkSettings]] = {}
    clusters = range(1, MOST_IN_A_CLUSTER + 1 if n * dtype.itemsize > 8192 else 2)
    for parts, chunk, warps in itertools.product(clusters, (512, 1024, 2048), (2, 4, 8)):
        chunks = -(-n // (parts * chunk))
        padded, elements = parts * chunk * chunks / n, chunk * chunks / (32 * warps)
        for per_sm in range(8, 0, -1):
            settings = ChunkSettings(chunk, chunks, warps, per_sm, stages=3)
            if is_sensible("backward", settings, n, dtype) and padded < 1.2:
                rank = (round(padded, 2), abs(math.log2(n / parts / 6144)), abs(math.log2(elements / 32)))
                found[parts] = min(found.get(parts, (rank, settings)), (rank, settings), key=lambda each: each[0])
                break
    return [settings for _, settings in sorted(found.values(), key=lambda each: each[0])[:3]]


def neighbours(name: str, base: Settings, n: int, changes: int) -> Iterator[Settings]:
    """Those that differ in one thing, then in two, up to ``changes``."""
    steps: dict[str, tuple[int, ...]] = {"warps": (base.warps // 2, base.warps * 2)}
    if isinstance(base, ChunkSettings):
        steps["chunk"] = (base.chunk // 2, base.chunk * 2)  # as many columns: see below
    else:
        one_row = isinstance(base, SplitSettings) or (name == "forward" and base.block < n)
        steps["rows"] = () if one_row else (base.rows // 2, base.rows * 2)
        steps["block"] = (base.block // 2, base.block * 2) if base.block < n or name == "sum_partials" else ()
        if name == "forward" and isinstance(base, RowSettings) and base.block < n:
            steps["held"] = (base.held - 1, base.held + 1)
    if isinstance(base, SplitSettings):
        steps["lookahead"] = (3 - base.lookahead,)
    if isinstance(base, PersistentSettings | ChunkSettings):
        steps["per_sm"] = (base.per_sm - 1, base.per_sm + 1)
        steps["stages"] = (base.stages - 1, base.stages + 1)
    for count in range(1, changes + 1):
        for chosen in itertools.combinations(steps, count):
            for values in itertools.product(*(steps[field] for field in chosen)):
                other = replace(base, **dict(zip(chosen, values, strict=True)))
                if isinstance(other, ChunkSettings) and isinstance(base, ChunkSettings) and other.chunk:
                    other = replace(other, chunks=-(-base.chunk * base.chunks // other.chunk))
                yield other


def is_sensible(name: str, s: Settings, n: int, dtype: torch.dtype) -> bool:
    """What may be faster, and can run: registers, shared memory and threads of a multiprocessor suffice."""
    if not 1 <= s.warps <= 32:
        return False
    if isinstance(s, ChunkSettings):
        return _fits_in_chunks(s, n, dtype)
    elements = s.rows * s.block / (s.warps * 32)  # of a tile, to a thread
    if not (s.rows >= 1 and 1 <= elements <= 64):
        return False
    if isinstance(s, RowSettings):
        registers = s.block * (1 + s.held * dtype.itemsize / 4)  # of squares and of what is held
        return 0 <= s.held <= 4 and s.held * s.block <= n and (not s.held or registers <= REGISTERS)
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


def _fits_in_chunks(s: ChunkSettings, n: int, dtype: torch.dtype) -> bool:
    if not (s.chunk >= 32 * s.warps and 1 <= s.chunks <= 8 and s.per_sm >= 1 and s.stages >= 2):
        return False
    if ladders.parts_of(n, s) > MOST_IN_A_CLUSTER:
        return False
    elements = s.chunk * s.chunks / (s.warps * 32)
    # To an element: dW in float32, and x, dY and w in their own dtype.
    registers = 40 + elements * (1 + 3 * dtype.itemsize / 4)
    pipelined = s.chunk * s.chunks * 2 * dtype.itemsize * (s.stages - 1) * s.per_sm
    room = SHARED_MEMORY - 7 * 1024  # each program takes a little on its own
    return 8 <= elements <= 64 and s.warps * 32 * s.per_sm * registers <= REGISTERS and pipelined <= room


def ladder_of(subject: Subject, settings: Settings, n: int) -> str:
    """The name that settings.py has for the present settings."""
    for name, value in vars(ladders).items():
        if not name.isupper():
            continue
        if value == settings:
            return name
        for step in value if isinstance(value, tuple) else ():
            if step[-1] == settings and n <= step[-2]:
                return f"{name} ≤ {step[-2]}"
    return subject.name


def kernel_of(name: str, settings: Settings, n: int) -> str:
    """Which kernel of a pass these settings are for, in words."""
    if isinstance(settings, ChunkSettings):
        parts = ladders.parts_of(n, settings)
        return "chunks" if parts == 1 else f"clusters of {parts}"
    if isinstance(settings, SplitSettings):
        return f"split over {parts_of(n, settings)}"
    if name == "forward":
        return "whole row" if n <= settings.block else "read twice"
    return "whole row" if name == "backward" else name


# --- compiling and timing ---


def compile_all(work: tuple[str, int, str, list[Settings]]) -> None:
    """In a process of its own: fills Triton's cache on disk. Kernels do not depend on the number of rows."""
    name, n, dtype, chosen = work
    tensors = Tensors(min(1024, 2**23 // n), n, getattr(torch, dtype))  # rows enough for more than one partial row
    for each in chosen:
        try:
            SUBJECTS[name].run(tensors, each)
            torch.cuda.synchronize()
        except Exception:  # refused: timing will meet it again, and leave it out
            continue


def compile_in_parallel(plan: dict[Unit, list[Settings]]) -> None:
    work = []
    for unit, chosen in plan.items():
        distinct = {_of_kernel(each): each for each in reversed(chosen)}
        kernels = list(distinct.values())
        work += [(unit.name, unit.n, unit.dtype, kernels[i : i + 3]) for i in range(0, len(kernels), 3)]
    work.sort(key=lambda each: -each[1])  # those that take longest to compile first
    processes = max(1, min(len(work), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, work))


def _of_kernel(settings: Settings) -> tuple:
    """What makes a kernel another one. The number of programs does not, but where it bounds the registers."""
    bounded = isinstance(settings, SplitSettings | ChunkSettings) or not isinstance(settings, PersistentSettings)
    return (type(settings), *astuple(settings if bounded else replace(settings, per_sm=1)))


@dataclass(frozen=True)
class Timed:
    settings: Settings
    microseconds: float  # inf where it was refused or wrong
    note: str = ""


def timed(subject: Subject, tensors: Tensors, chosen: list[Settings]) -> list[Timed]:
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
    times: dict[Settings, list[float]] = {each.settings: [] for each in finalists}
    for _ in range(ROUNDS if len(finalists) > 1 else 1):
        for settings, taken in times.items():
            taken.append(device_time(lambda s=settings: subject.run(tensors, s), "cuda", LONG_MS))
    again = {settings: statistics.median(taken) for settings, taken in times.items()}
    return [replace(each, microseconds=again.get(each.settings, each.microseconds)) for each in found]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()


# --- report ---


def words(settings: Settings) -> str:
    values = ((field, getattr(settings, field.name)) for field in fields(settings))
    given = ", ".join(f"{field.name}={value}" for field, value in values if value != field.default)
    return f"{type(settings).__name__}({given})"


COLUMNS = ("pass", "shape", "dtype", "µs", "% of copy", "faster by", "kernel", "settings")
RIGHT = ("µs", "% of copy", "faster by")


def report(
    console: Console, found: dict[Unit, list[Timed]], copy_gb_s: float, threshold: float, present: bool
) -> list[tuple]:
    """Prints the tables; gives the lines of the CSV."""
    changes = Table(title=f"what would change (more than {threshold:g}% faster)")
    measured = Table(title="the present settings" + ("" if present else ", and the best others"))
    for table in (changes, measured):
        for column in COLUMNS:
            table.add_column(column, justify="right" if column in RIGHT else "left")
    lines = []
    for unit, results in found.items():
        subject, now = SUBJECTS[unit.name], results[0]
        floor = subject.tensors * unit.m * unit.n * unit.torch_dtype.itemsize / (copy_gb_s * 1e3)

        def row(each: Timed, unit=unit, subject=subject, now=now, floor=floor) -> tuple[str, ...]:
            is_present = each is now
            return (
                f"{unit.name}: {ladder_of(subject, each.settings, unit.n)}" if is_present else "",
                f"{unit.m}x{unit.n}" if is_present else "",
                unit.dtype if is_present else "",
                f"{each.microseconds:.1f}",
                f"{100 * floor / each.microseconds:.1f}" if floor else "",
                "" if is_present else f"{100 * (now.microseconds / each.microseconds - 1):+.1f}%",
                kernel_of(unit.name, each.settings, unit.n),
                words(each.settings),
            )

        ranked = sorted((each for each in results[1:] if not each.note), key=lambda each: each.microseconds)
        measured.add_row(*row(now), style=None if present else "bold")
        for each in ranked[:3]:
            measured.add_row(*row(each))
        if ranked and now.microseconds / ranked[0].microseconds - 1 > threshold / 100:
            changes.add_row(*row(now))
            changes.add_row(*row(ranked[0]), style="bold green", end_section=True)
        for each in results:
            if each.note.startswith("wrong"):
                console.print(f"{' '.join(map(str, unit))}: {words(each.settings)}: {each.note}", markup=False)
            percent = f"{100 * floor / each.microseconds:.1f}" if floor else ""
            kernel = kernel_of(unit.name, each.settings, unit.n)
            lines.append(
                (*unit, f"{each.microseconds:.2f}", percent, each is now, kernel, words(each.settings), each.note)
            )
    console.print(measured)
    if not present:
        console.print(changes if changes.row_count else f"nothing would change: no candidate is {threshold:g}% faster")
    return lines


def units(shapes: Iterable[str], dtypes: Iterable[str], passes: Iterable[str]) -> list[Unit]:
    """A shape is MxN with M rows of bfloat16, or N alone."""
    found = []
    for dtype, shape, name in itertools.product(dtypes, shapes, passes):
        *rows, n = map(int, shape.split("x"))
        itemsize = getattr(torch, dtype).itemsize
        found.append(Unit(name, rows[0] * 2 // itemsize if rows else TENSOR // n // itemsize, n, dtype))
    return found


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--present", action="store_true", help="only the present settings")
    parser.add_argument("--shapes", default=SHAPES, help="M×N as MxN, or N alone; M for 2-byte dtypes")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--passes", default="forward,backward", help=f"of {','.join(SUBJECTS)}")
    parser.add_argument("--most", type=int, default=24, help="candidates for each pass and shape")
    parser.add_argument("--threshold", type=float, default=1.5, help="percent")
    parser.add_argument("--csv", type=Path, help="write every measurement here")
    parser.add_argument("--list", action="store_true", help="how many candidates there are, without running any")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    most = 1 if options.present else options.most
    plan: dict[Unit, list[Settings]] = {}
    for unit in units(options.shapes.split(","), options.dtypes.split(","), options.passes.split(",")):
        plan[unit] = candidates(SUBJECTS[unit.name], unit.n, unit.torch_dtype, most)
    plan = {unit: chosen for unit, chosen in plan.items() if chosen}
    console = Console(width=180)
    if options.list:
        for unit, chosen in plan.items():
            now = f"{kernel_of(unit.name, chosen[0], unit.n)}, {words(chosen[0])}"
            console.print(f"{' '.join(map(str, unit))}: {len(chosen)} candidates; now {now}", markup=False)
        console.print(f"{sum(map(len, plan.values()))} candidates", markup=False)
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
    for unit, chosen in plan.items():
        tensors = Tensors(unit.m, unit.n, unit.torch_dtype)
        found[unit] = timed(SUBJECTS[unit.name], tensors, chosen)
        del tensors
        torch.cuda.empty_cache()
    lines = report(console, found, copy_gb_s, options.threshold, options.present)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ("pass", "rows", "width", "dtype", "microseconds", "percent_of_copy")
                + ("present", "kernel", "settings", "note")
            )
            writer.writerows(lines)


if __name__ == "__main__":
    main()
