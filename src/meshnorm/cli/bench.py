"""``meshnorm bench``: the norm beside every other one that is installed, timed in one run."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshnorm.cli.plan import DTYPE_NAMES, parse_shape
from meshnorm.errors import OptionError

if TYPE_CHECKING:
    from meshnorm.benching.job import Job, Result

# On a GPU the model widths at a batch that fills it, about 2^27 elements, and three small batches.
DEFAULT_SHAPES = {
    "cuda": "1048576x128,262144x512,131072x1024,65536x2048,32768x4096,24576x5120,16384x8192,8192x12288,8192x16384,"
    "4096x32768,2048x65536,1024x131072,1x4096,64x4096,512x4096",
    "cpu": "4096x4096,1024x1024,65536x128",
}
QUICK_SHAPES = {"cuda": "32768x4096,8192x16384,64x4096", "cpu": "1024x1024"}
# Milliseconds for which the calls of one figure are timed.
REP_MS = {"cuda": 25.0, "cpu": 300.0}
QUICK_REP_MS = {"cuda": 8.0, "cpu": 30.0}


def add_to(verbs: Any) -> None:
    from meshnorm.benching.job import PASSES
    from meshnorm.benching.providers import SOURCES

    parser: argparse.ArgumentParser = verbs.add_parser(
        "bench",
        help="time the norm beside the others that are installed",
        description="Times RMSNorm, forward and backward, on the GPU if there is one, else on the CPU. Every result is "
        "held against float64 first; what is wrong or fails is named and not timed. Exit status 1 where that is "
        "meshnorm.",
    )
    parser.add_argument("--shapes", help="rows x hidden size, as in 32768x4096,64x4096")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPE_NAMES), metavar="DTYPE")
    parser.add_argument("--providers", default=",".join(SOURCES), help=f"of {','.join(SOURCES)} (all)")
    parser.add_argument("--passes", default=",".join(PASSES), help="forward,backward")
    parser.add_argument("--baseline", metavar="REV", help="time meshnorm as of another commit of this checkout too")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw percent of copy bandwidth over width here")
    parser.add_argument("--quick", action="store_true", help="few shapes, short timings")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from meshnorm.benching.providers import SOURCES, find_providers

    job = job_of(options)
    names = _chosen("--providers", options.providers, tuple(SOURCES))
    _check_outputs(options)
    providers, missing = find_providers(names, job.device)
    if not providers:
        raise OptionError("--providers: none can run here; " + "; ".join(f"{n}: {why}" for n, why in missing.items()))
    with _interruptible():
        results, copy_gb_s, complete = _measured(job, providers, options.baseline)
    if not results:
        print("meshnorm bench was interrupted before anything was timed; no file is written", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
    _report(console, results, missing, job, copy_gb_s, options)
    if not complete:
        print("meshnorm bench was interrupted: what it had timed by then is above", file=sys.stderr)
    failed = any(r.provider == "meshnorm" and r.device_us is None for r in results)
    return 1 if failed or not complete else 0


def job_of(options: argparse.Namespace) -> Job:
    from meshnorm.benching.job import PASSES, Job

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and find_spec("triton") is None:
        raise OptionError("bench times a GPU with triton.testing, and Triton is not installed: install triton")
    return Job(
        shapes=parse_shapes(options.shapes or (QUICK_SHAPES if options.quick else DEFAULT_SHAPES)[device]),
        dtype=str(DTYPE_NAMES[options.dtype]).removeprefix("torch."),
        passes=_chosen("--passes", options.passes, PASSES),
        device=device,
        rep_ms=(QUICK_REP_MS if options.quick else REP_MS)[device],
    )


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """ "32768x4096,64x4096" as ((32768, 4096), (64, 4096)), each shape once."""
    found = []
    for part in text.split(","):
        sizes = parse_shape(part)
        if len(sizes) != 2 or 0 in sizes:
            raise OptionError(f"--shapes: {part!r} is no shape to time: write rows x hidden size, as in 32768x4096")
        found.append((sizes[0], sizes[1]))
    return tuple(dict.fromkeys(found))


def _chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise OptionError(f"{option}: {name!r} is none of {', '.join(known)}")
    return names


def _check_outputs(options: argparse.Namespace) -> None:
    """Before minutes of timing, not after."""
    for option in ("csv", "plot"):
        file: Path | None = getattr(options, option)
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise OptionError(f"--{option} {file}: there is no such folder to write a file in")
    if options.plot is not None:
        if options.plot.suffix.lower() != ".png":
            raise OptionError(f"--plot {options.plot}: name a .png file")
        if find_spec("matplotlib") is None:
            raise OptionError("--plot needs matplotlib: install meshnorm[bench]")
    if options.baseline is not None:
        from meshnorm.benching.baseline import commit_of

        commit_of(options.baseline)


def _measured(job: Job, providers: Sequence[Any], baseline: str | None) -> tuple[list[Result], float, bool]:
    """Results; the copy bandwidth in GB/s, the better of one before and one after; and whether nobody interrupted."""
    from meshnorm.benching.measure import measure
    from meshnorm.benching.timing import copy_bandwidth
    from meshnorm.benching.warming import units, warm_up

    bandwidth = float("nan")
    results: list[Result] = []
    try:
        bandwidth = copy_bandwidth(job.device, 4 * job.rep_ms)
        if job.device == "cuda":
            names = [provider.name for provider in providers]
            for _ in _with_progress(warm_up(job, names), len(units(job, names)), "compiling", "{0} {1}x{2}"):
                pass
        total = len(job.shapes) * len(providers) * len(job.passes)
        timed = _with_progress(measure(job, providers), total, "timing", "{0.provider} {0.m}x{0.n} {0.which}")
        for result in timed:
            results.append(result)
        if baseline is not None:
            from meshnorm.benching.baseline import measure_baseline

            results += measure_baseline(job, baseline)
    except KeyboardInterrupt:
        return results, bandwidth, False
    return results, max(bandwidth, copy_bandwidth(job.device, 4 * job.rep_ms)), True


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A run that is told to end, by ``timeout`` for one, ends as by Ctrl-C: with what it has found."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_progress(items: Iterable[Any], total: int, title: str, words: str) -> Iterable[Any]:
    """A bar where a person looks, else a line for each tenth; ``words`` says what the last item was, which a tuple
    gives as {0}, {1}, …"""
    if find_spec("tqdm") is None or not sys.stderr.isatty():
        began, steps = time.monotonic(), max(1, total // 10)
        for done, item in enumerate(items, 1):
            if done % steps == 0 or done == total:
                what = words.format(*item if isinstance(item, tuple) else (item,))
                print(f"{title} {done}/{total} {time.monotonic() - began:.0f} s {what}", file=sys.stderr, flush=True)
            yield item
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, leave=False) as bar:
        for item in items:
            bar.set_postfix_str(words.format(*item if isinstance(item, tuple) else (item,)), refresh=False)
            bar.update()
            yield item


def _report(
    console: Any, results: list[Result], missing: dict[str, str], job: Job, copy_gb_s: float, options: Any
) -> None:
    from meshnorm.benching.report import Setting, comparisons, tables, write_csv

    setting = Setting.here(job.device, copy_gb_s)
    versions = dict.fromkeys(f"{result.provider} {result.version}" for result in results)
    console.print(f"RMSNorm, {job.dtype}. {setting}", f"timed: {', '.join(versions)}", sep="\n", markup=False)
    for table in tables(results, setting):
        console.print(table)
    for line in comparisons(results):
        console.print(line, markup=False)
    for name, why in missing.items():
        console.print(f"not timed: {name}: {why}", markup=False)
    for result in results:
        if result.reason:
            console.print(f"{result.provider} {result.m}×{result.n} {result.which}: {result.reason}", markup=False)
    if options.csv is not None:
        write_csv(options.csv, results, setting)
    if options.plot is not None:
        from meshnorm.benching.plot import draw

        draw(options.plot, results, setting)
    for file in filter(None, (options.csv, options.plot)):
        console.print(f"written: {file}", markup=False)
