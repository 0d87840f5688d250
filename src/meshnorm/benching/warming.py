"""Kernels compiled before any is timed, many at once: each provider runs each shape in some process, and leaves what it
compiled in its cache on disk (Triton's, Inductor's, quack's), where the process that times finds it.

One after the other they would take minutes: half a second to some seconds a kernel, two or three kernels a provider and
width, and an autotuner's candidates beside.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from .correctness import Inputs
from .job import Job
from .providers import SOURCES, find_providers, in_one_line

# What a process must know before it starts. One thread for each of Inductor's compilations, since there are many
# processes; and what fla's autotuner measures while others keep the GPU busy must not be kept.
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "FLA_CACHE_RESULTS": "0"}
_BYTES_OF_A_PROCESS = 2 << 30  # a CUDA context, its kernels, a flush buffer


def units(job: Job, names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(provider, M, N) of whatever compiles something."""
    return [(name, m, n) for m, n in job.shapes for name in names if SOURCES[name].compiles]


def warm_up(job: Job, names: Sequence[str]) -> Iterator[tuple[str, int, int, str]]:
    """Each unit as it is done, with what went wrong, or "". Nothing that goes wrong here ends a run: timing will meet
    it again, and report it."""
    todo = units(job, names)
    if not todo:
        return
    with _environment():
        pool = ProcessPoolExecutor(_processes(job, len(todo)), multiprocessing.get_context("spawn"))
        try:
            futures = {pool.submit(_run, job, *unit): unit for unit in todo}
            for future in as_completed(futures):
                try:
                    reason = future.result()
                except BrokenProcessPool as error:
                    reason = in_one_line(error)
                yield *futures[future], reason
        except BaseException:  # told to end: minutes of compiling are not waited for
            workers = list((getattr(pool, "_processes", None) or {}).values())  # no public way ends what runs
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()
            raise
        pool.shutdown()


def _run(job: Job, name: str, m: int, n: int) -> str:
    try:
        found, missing = find_providers([name], job.device)
        if missing:
            return missing[name]
        norm = found[0].prepare()
        inputs = Inputs.drawn(m, n, job.torch_dtype, torch.Generator(job.device).manual_seed(0))
        if "forward" in job.passes:
            norm(inputs.x, inputs.weight)
        if "backward" in job.passes:
            leaves = inputs.x.requires_grad_(), inputs.weight.requires_grad_()
            torch.autograd.grad(norm(*leaves), leaves, inputs.dy)
        if job.device == "cuda":
            torch.cuda.synchronize()
            del inputs
            torch.cuda.empty_cache()
    except Exception as error:  # whatever another library may raise on a shape that it does not take
        return in_one_line(error)
    return ""


def _processes(job: Job, most: int) -> int:
    """As many as cores and the GPU's memory allow: a dozen tensors of the largest shape to each."""
    cores = max(1, (os.cpu_count() or 2) - 2)
    if job.device == "cuda":
        largest = max(m * n for m, n in job.shapes) * job.torch_dtype.itemsize
        free, _ = torch.cuda.mem_get_info()
        cores = min(cores, max(1, free // (12 * largest + _BYTES_OF_A_PROCESS)))
    return min(most, cores)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
