"""The kernels under compute-sanitizer: memcheck, racecheck, initcheck and synccheck, on one CUDA GPU.

    PYTHONPATH=src python3 benchmarks/sanitize.py [--tools memcheck,…] [--groups forward,…] [--out FILE]

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from sanitize_launches import GROUPS, PLANTED, planted_kernel

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SEES_PLANTED = ("memcheck", "initcheck")
LAUNCHES = Path(__file__).with_name("sanitize_launches.py")


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
    return [sys.executable, str(LAUNCHES), group, f"{shard}/{shards}"]


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
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None or not torch.cuda.is_available():
        what = "no compute-sanitizer on the PATH or in /usr/local/cuda/bin" if sanitizer is None else "no CUDA GPU"
        print(f"there is {what}", file=sys.stderr)
        return 2
    tools, groups = options.tools.split(","), options.groups.split(",")
    with ThreadPoolExecutor(options.parallel) as pool:
        shards = -(-options.parallel // len(groups))
        shares = [(group, i) for group in reversed(groups) for i in range(shards)]
        first = list(pool.map(lambda share: plain(share[0], share[1], shards, options.limit), shares))
        chosen = filters(sanitizer)
        work = [(tool, group) for group in reversed(groups) for tool in tools]  # the slow ones first
        work += [(tool, PLANTED) for tool in tools if tool in SEES_PLANTED]
        found = list(pool.map(lambda w: sanitized(sanitizer, w[0], w[1], chosen, options.limit), work))
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
