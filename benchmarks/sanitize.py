"""The kernels under compute-sanitizer: memcheck, racecheck, initcheck and synccheck, on one CUDA GPU.

    PYTHONPATH=src python3 benchmarks/sanitize.py [--tools memcheck,…] [--groups rows,…] [--out FILE]

Each group of launches runs once without a tool, which fills Triton's cache and holds the results against the plain
torch kernels, and then once under each tool, in a process and with a time limit of its own: a tool that cannot follow
programs that wait for one another (the split kernels) is shown as "timed out" and takes nothing else with it. A kernel
with planted errors shows that memcheck and initcheck see what they are to see. Exit status 1 where a tool found
something, or a group failed; 2 where there is no compute-sanitizer or no GPU.

Only this package's kernels are instrumented, but for initcheck, which must see whatever writes memory. Every allocation
is the driver's own: torch's caching allocator would hide an access beyond a tensor's end in its block.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLANTED = "planted errors"
SEES_PLANTED = ("memcheck", "initcheck")
GROUPS = ("forward", "backward", "slices", "split_forward", "split_backward")
# The launches believe in a few multiprocessors only, so that each program goes through several rows, and so that
# programs that wait for one another are resident even though instrumented ones take more room.
MULTIPROCESSORS = 8
DEVICE = "cuda"

# Each step of the ladders of settings.py, full and with columns left over.
NARROW = (1, 16, 17, 33, 100, 128, 200, 512, 1000, 1024, 2048, 2880)
WIDE = (4096, 4097, 5120, 8192, 12288, 16384)
CHUNKED = (18432, 20001, 32768)  # forward, one program a row; the backward splits them
SPLIT = (32769, 40000, 65536, 131072)


class Launch(NamedTuple):
    """``x`` and ``dy`` name views (see ``rows``); ``weight`` is "same", "float32" or "none"; ``want`` gradients."""

    m: int
    n: int
    dtype: str = "bfloat16"
    weight: str = "same"
    mode: str = "llama"
    offset: float = 0.0
    x: str = "contiguous"
    dy: str = "contiguous"
    want: str = "dx dw"


VARIANTS = (
    {"dtype": "float32", "weight": "none", "dy": "heads", "want": "dx"},
    {"dtype": "float16", "weight": "float32", "mode": "gemma", "offset": 1.0, "x": "heads"},
    {"weight": "float32", "mode": "none", "x": "odd", "dy": "odd"},
    {"x": "expanded", "dy": "one_row", "want": "dw"},
    {"x": "transposed", "dy": "transposed", "want": "dx"},
)


def launches(group: str) -> Iterator[Launch]:
    """A full bfloat16 case of every width, and in turn two of the variants."""
    widths = {
        "forward": NARROW + WIDE + CHUNKED,
        "backward": NARROW + WIDE,
        "slices": NARROW[::2] + WIDE[::2] + (20001,),
    }
    for i, n in enumerate(widths.get(group, SPLIT if group == "split_forward" else CHUNKED[1:] + SPLIT)):
        m = 300 if n <= 1024 else 12 if n > 32768 else 40
        yield Launch(m, n)
        for k in (2 * i, 2 * i + 1):
            chosen = dict(VARIANTS[k % len(VARIANTS)])
            if group == "backward" and n > 8192:
                chosen.pop("dtype", None)  # rows of float32 are split from there on
            yield Launch(m, n, **chosen)  # type: ignore[arg-type]
    if not group.startswith("split"):
        yield Launch(6, 1000, "float64")
        yield Launch(6, 9000, "float64", x="heads")


@triton.jit
def planted_kernel(X, Y):
    """Reads 1024 numbers and writes them."""
    index = tl.arange(0, 1024)
    tl.store(Y + index, tl.load(X + index))


def run_planted() -> None:
    """X holds numbers that nobody has written, and Y has room for 1000."""
    import torch

    planted_kernel[(1,)](torch.empty(1024, device=DEVICE), torch.empty(1000, device=DEVICE))
    torch.cuda.synchronize()
    print("all launches done")


def run(group: str, shard: int, shards: int) -> None:
    """Launches a group's share, results held against the plain torch kernels on the CPU."""
    import torch

    from meshnorm.kernels import gpu

    gpu.multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
    torch.manual_seed(0)
    for launch in list(launches(group))[shard::shards]:
        _run(group, launch)
    print(f"{group}: all launches done, results right")


def _run(group: str, launch: Launch) -> None:
    import torch
    from torch import Tensor

    from meshnorm.kernels import cpu, gpu

    m, n, dtype = launch.m, launch.n, getattr(torch, launch.dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = rows(launch.x, m, n, dtype), rows(launch.dy, m, n, dtype)
    weight = None
    if launch.weight != "none":
        weight = torch.randn(n).to(dtype if launch.weight == "same" else torch.float32)
    w = None if weight is None else weight.to(DEVICE)
    xc, dyc = on_gpu(x), on_gpu(dy)

    def both(*shape: int, of: torch.dtype = acc) -> tuple[Tensor, Tensor]:
        return torch.empty(shape, dtype=of), torch.empty(shape, dtype=of, device=DEVICE)

    def check(name: str, expected: Tensor, found: Tensor) -> None:
        expected, found = expected.double(), found.cpu().double()
        off = (expected - found).norm() / expected.norm().clamp_min(1e-30)
        limit = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-10}[launch.dtype]
        # With one column dX is the rounding error of a zero.
        if not off <= limit and not (name == "dX" and n == 1):
            raise SystemExit(f"{group}, {launch}: {name} is off by {off:.3g}")

    y, yc = both(m, n, of=dtype)
    rstd, rstdc = both(m)
    options = (1e-6, launch.offset, launch.mode)
    cpu.forward(x, weight, *options, y, rstd)
    if group in ("forward", "split_forward"):
        gpu.forward(xc, w, *options, yc, rstdc)
        check("y", y, yc), check("rstd", rstd, rstdc)
        return
    total, totalc = both(m)
    if group == "slices":
        cpu.statistic(x, total)
        gpu.statistic(xc, totalc)
        check("statistic", total, totalc)
        gpu.apply(xc, w, totalc, n, *options, yc, rstdc)
        check("y", y, yc), check("rstd", rstd, rstdc)
    rstdc = rstd.to(DEVICE)
    dx, dxc = both(m, n, of=dtype)
    dw, dwc = both(n, of=dtype if weight is None else weight.dtype)
    needs_dx, needs_dw = "dx" in launch.want, "dw" in launch.want and weight is not None
    wanted = (dx if needs_dx else None, dw if needs_dw else None)
    wantedc = (dxc if needs_dx else None, dwc if needs_dw else None)
    cpu.backward(dy, x, weight, rstd, launch.offset, *wanted)
    if group == "slices":
        cpu.backward_statistic(dy, x, weight, rstd, launch.offset, total)
        gpu.backward_statistic(dyc, xc, w, rstdc, launch.offset, totalc)
        if n > 1:
            check("backward_statistic", total, totalc)
        gpu.backward_apply(dyc, xc, w, rstdc, totalc, n, launch.offset, *wantedc)
    else:
        gpu.backward(dyc, xc, w, rstdc, launch.offset, *wantedc)
    if needs_dx:
        check("dX", dx, dxc)
    if needs_dw:
        check("dW", dw, dwc)


def rows(kind: str, m: int, n: int, dtype):
    """An (A, B, N) view of m random rows on the CPU; ``m`` is even."""
    import torch

    def normal(*shape: int):
        return torch.randn(*shape).to(dtype)

    match kind:
        case "contiguous":
            return normal(1, m, n)
        case "heads":  # two of four heads of each token
            return normal(m // 2, 4, n)[:, 1:3]
        case "transposed":
            return normal(2, m // 2, n).transpose(0, 1)
        case "expanded":
            return normal(m // 2, 1, n).expand(m // 2, 2, n)
        case "one_row":
            return normal(1, 1, n).expand(m // 2, 2, n)
        case "odd":  # rows at odd addresses
            return normal(1, m, n + 1)[:, :, 1:]
    raise ValueError(kind)


def on_gpu(x):
    """x with its strides, its storage no longer than it must be. By a copy from the host, which initcheck sees."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(DEVICE)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


# --- the tools -------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    tool: str
    group: str
    words: str  # "clean", "12 errors", "timed out after 90 s", …
    seconds: float
    output: str = ""


def kernel_names() -> list[str]:
    """Every kernel of the package, by its name on the device."""
    import meshnorm.kernels

    names = []
    for module in pkgutil.iter_modules(meshnorm.kernels.__path__):
        if module.name.startswith("triton_"):
            found = vars(importlib.import_module(f"meshnorm.kernels.{module.name}"))
            names += [name for name, value in found.items() if name.endswith("_kernel") and hasattr(value, "fn")]
    return [*dict.fromkeys(names), planted_kernel.fn.__name__]


def filters(sanitizer: str) -> list[str]:
    """Options that restrict a tool to this package's kernels; the option's name has changed over the releases."""
    told = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    option = next((each for each in ("--kernel-name", "--kernel-regex", "--filter") if each in told), None)
    return [word for name in kernel_names() for word in (option, f"kne={name}")] if option else []


def launch_command(group: str, shard: int = 0, shards: int = 1) -> list[str]:
    return [sys.executable, __file__, "--launch", group, "--shard", f"{shard}/{shards}"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}


def plain(group: str, shard: int, shards: int, limit: float) -> Verdict:
    return _verdict("none", group, launch_command(group, shard, shards), limit)


def sanitized(sanitizer: str, tool: str, group: str, chosen: list[str], limit: float) -> Verdict:
    options = ["--tool", tool, "--launch-timeout", str(int(limit)), "--print-limit", "20"]
    if tool == "racecheck":
        options += ["--racecheck-report", "analysis"]
    if tool == "memcheck":
        # Calls that torch and Triton make to ask, and whose refusal they handle. A refused launch ends the run anyway.
        options += ["--report-api-errors", "no"]
    if tool != "initcheck":
        options += chosen
    return _verdict(tool, group, [sanitizer, *options, *launch_command(group)], limit)


def _verdict(tool: str, group: str, command: list[str], limit: float) -> Verdict:
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,  # so that what the tool started ends with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
        words = words_of(output, process.returncode, tool)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        words = f"timed out after {limit:.0f} s"
    return Verdict(tool, group, words, time.perf_counter() - began, output)


def words_of(output: str, status: int, tool: str) -> str:
    """What a run's output says, in a word or two."""
    done = "all launches done" in output
    if tool == "none":
        return "right" if done and status == 0 else "failed"
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output)
    if summary and int(summary[1]):
        return f"{summary[2]} errors, {summary[3]} warnings" + ("" if done else ", and did not finish")
    errors = re.search(r"ERROR SUMMARY: (\d+) errors?", output)
    if errors and int(errors[1]):
        return f"{errors[1]} errors" + ("" if done else ", and did not finish")
    if not summary and not errors:
        return "failed: the tool gave no summary"
    return "clean" if done and status == 0 else "failed: the launches did not finish"


def report(verdicts: list[Verdict], groups: list[str], tools: list[str], heading: str) -> str:
    by = {(verdict.tool, verdict.group): verdict for verdict in verdicts}
    width = max(len(f"{v.words} ({v.seconds:.0f} s)") for v in verdicts) + 2
    lines = [heading, "", f"{'':16}" + "".join(f"{tool:{width}}" for tool in tools)]
    for group in groups:
        cells = (by[tool, group] for tool in tools)
        lines.append(f"{group:16}" + "".join(f"{f'{v.words} ({v.seconds:.0f} s)':{width}}" for v in cells))
    for verdict in verdicts:
        if verdict.words not in ("clean", "right"):
            lines += ["", f"--- {verdict.tool}, {verdict.group}: {verdict.words}", *verdict.output.splitlines()[:60]]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one group under one tool")
    parser.add_argument("--parallel", type=int, default=max(2, (os.cpu_count() or 2)), help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path("sanitizer.txt"), help="the report, as a text file")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        shard, shards = map(int, options.shard.split("/"))
        run_planted() if options.launch == PLANTED else run(options.launch, shard, shards)
        return 0
    import torch

    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None or not torch.cuda.is_available():
        what = "no compute-sanitizer on the PATH or in /usr/local/cuda/bin" if sanitizer is None else "no CUDA GPU"
        print(f"there is {what}", file=sys.stderr)
        return 2
    tools, groups = options.tools.split(","), options.groups.split(",")
    with ThreadPoolExecutor(options.parallel) as pool:
        shards = max(1, options.parallel // len(groups))
        first = list(
            pool.map(lambda g: plain(*g, options.limit), [(g, i, shards) for g in groups for i in range(shards)])
        )
        chosen = filters(sanitizer)
        work = [(tool, group) for group in reversed(groups) for tool in tools]  # the slow ones first
        work += [(tool, PLANTED) for tool in tools if tool in SEES_PLANTED]
        found = list(pool.map(lambda w: sanitized(sanitizer, *w, chosen, options.limit), work))
    told = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"[Vv]ersion \S+", told)
    heading = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, compute-sanitizer "
        f"{version[0] if version else 'of unknown version'}, {datetime.date.today()}\n"
        f"kernels: {', '.join(kernel_names()[:-1])}"
    )
    wrong = [verdict for verdict in first if verdict.words != "right"]
    planted, found = [v for v in found if v.group == PLANTED], [v for v in found if v.group != PLANTED]
    text = report(found, groups, tools, heading)
    blind = [verdict for verdict in planted if "errors" not in verdict.words]
    for verdict in planted:
        seen = "does not see" if verdict in blind else "sees"
        text += f"{verdict.tool} {seen} planted errors: {verdict.words}\n"
    for verdict in blind:
        text += f"{verdict.output[-2000:]}\n"
    for verdict in wrong:
        text += f"\n--- without a tool, {verdict.group}: {verdict.words}\n{verdict.output[-2000:]}\n"
    options.out.write_text(text)
    print(text)
    return 1 if wrong or blind or any(v.words != "clean" for v in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
