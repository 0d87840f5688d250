"""What a run found, for the eye and for a file: the machine and versions, tables, CSV, a plot."""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import meshnorm

from .job import Result

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "date",
    "machine",
    "python",
    "torch",
    "triton",
    "meshnorm",
    "copy_gb_s",
    "provider",
    "version",
    "dtype",
    "m",
    "n",
    "pass",
    "device_us",
    "percent_of_copy",
    "graph_us",
    "host_us",
    "peak_mib",
    "reason",
)


@dataclass(frozen=True)
class Setting:
    """Where and when a run took place; ``copy_gb_s`` is the copy bandwidth measured in it, in GB/s."""

    machine: str
    copy_gb_s: float
    date: str
    python: str
    torch: str
    triton: str
    meshnorm: str

    @staticmethod
    def here(device: str, copy_gb_s: float) -> Setting:
        try:
            triton = metadata.version("triton")
        except metadata.PackageNotFoundError:
            triton = "none"
        today = datetime.date.today().isoformat()
        versions = (platform.python_version(), torch.__version__, triton, meshnorm.__version__)
        return Setting(_machine(device), copy_gb_s, today, *versions)

    def __str__(self) -> str:
        return (
            f"{self.machine}, copy bandwidth {self.copy_gb_s:,.0f} GB/s; meshnorm {self.meshnorm}, "
            f"torch {self.torch}, triton {self.triton}, python {self.python}; {self.date}"
        )


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def tables(results: Sequence[Result], setting: Setting) -> list[Table]:
    """A table for each pass and each kind of figure that was taken: shapes down, providers across."""

    def device_words(result: Result) -> str:
        percent = result.percent_of_copy(setting.copy_gb_s)
        return f"{_number(result.device_us)} ({percent:.0f})" if percent is not None else ""

    figures: tuple[tuple[str, str, Callable[[Result], str]], ...] = (
        ("device_us", "{}, µs (% of copy bandwidth)", device_words),
        ("graph_us", "{} in a CUDA graph, warm L2, µs", lambda result: _number(result.graph_us)),
        ("host_us", "host time of {}, µs", lambda result: _number(result.host_us)),
        ("peak_mib", "peak memory of {}, its results included, MiB", lambda result: _number(result.peak_mib)),
    )
    found = []
    for which in dict.fromkeys(result.which for result in results):
        of_pass = [result for result in results if result.which == which]
        for figure, title, words in figures:
            # the first table shows every shape, so that a failure is seen too
            if figure == "device_us" or any(getattr(result, figure) is not None for result in of_pass):
                whole = "forward and backward" if (figure, which) == ("host_us", "backward") else which
                found.append(_table(of_pass, figure, title.format(whole), words))
    return found


def _table(results: Sequence[Result], figure: str, title: str, words: Callable[[Result], str]) -> Table:
    from rich.table import Table

    providers = list(dict.fromkeys(result.provider for result in results))
    table = Table(title=title)
    for column in ("M×N", *providers):
        table.add_column(column, justify="right", no_wrap=True)
    for m, n in dict.fromkeys((result.m, result.n) for result in results):
        cells = {result.provider: result for result in results if (result.m, result.n) == (m, n)}
        taken = {name: getattr(cell, figure) for name, cell in cells.items() if getattr(cell, figure) is not None}
        if not taken and figure != "device_us":
            continue
        best = min(taken, key=taken.__getitem__, default="")
        row = [_cell(cells.get(name), figure, words) for name in providers]
        table.add_row(
            f"{m}×{n}",
            *(f"[bold green]{cell}[/]" if name == best else cell for name, cell in zip(providers, row, strict=True)),
        )
    return table


def _cell(result: Result | None, figure: str, words: Callable[[Result], str]) -> str:
    if result is None:
        return ""
    if getattr(result, figure) is not None:
        return words(result)
    if figure != "device_us":
        return "–"
    return "[red]wrong[/]" if result.reason.startswith("wrong") else "[red]fails[/]"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def comparisons(results: Sequence[Result]) -> list[str]:
    """How meshnorm compares with the best of the others at each shape: their times' ratio, in geometric mean, and where
    it is smallest. A line for each pass, and one for the small shapes, whose time within a CUDA graph was taken."""
    found: dict[str, list[tuple[float, str]]] = {}
    for which, m, n in dict.fromkeys((result.which, result.m, result.n) for result in results):
        cells = {r.provider: r for r in results if (r.which, r.m, r.n) == (which, m, n)}
        mine = cells.pop("meshnorm", None)
        in_graph = mine is not None and mine.graph_us is not None
        figure = "graph_us" if in_graph else "device_us"
        times = {name: getattr(cell, figure) for name, cell in cells.items() if not name.startswith("meshnorm@")}
        taken = {name: time for name, time in times.items() if time is not None}
        own = getattr(mine, figure, None)
        if own is not None and taken:
            best = min(taken, key=taken.__getitem__)
            ratios = found.setdefault(f"{which} in a CUDA graph" if in_graph else which, [])
            ratios.append((taken[best] / own, f"{m}×{n}, beside {best}"))
    lines = []
    for what, ratios in found.items():
        middle = statistics.geometric_mean(ratio for ratio, _ in ratios)
        least, where = min(ratios)
        lines.append(
            f"{what}: the best other takes {middle:.2f} times as long as meshnorm (geometric mean over the shapes), "
            f"at least {least:.2f} ({where})"
        )
    return lines


def write_csv(file: Path, results: Sequence[Result], setting: Setting) -> None:
    """One line for each provider, shape and pass; every line says the machine, the versions and the date."""
    here = (setting.date, setting.machine, setting.python, setting.torch, setting.triton, setting.meshnorm)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for r in results:
            figures = (r.device_us, r.percent_of_copy(setting.copy_gb_s), r.graph_us, r.host_us, r.peak_mib)
            rounded = ("" if figure is None else f"{figure:.2f}" for figure in figures)
            what = (r.provider, r.version, r.dtype, r.m, r.n, r.which)
            writer.writerow((*here, f"{setting.copy_gb_s:.1f}", *what, *rounded, r.reason))
