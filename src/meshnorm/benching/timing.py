"""How time and memory are taken. Times are microseconds, and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]


def device_time(call: Call, device: str, rep_ms: float) -> float:
    """µs of a call: on a GPU between CUDA events with a cold L2, on a CPU by the wall clock."""
    if device == "cpu":
        return _wall_time(call, rep_ms)
    from triton.testing import do_bench

    milliseconds: Any = do_bench(call, warmup=int(rep_ms / 2) or 1, rep=int(rep_ms) or 1, return_mode="median")
    return milliseconds * 1e3


def graph_time(prepare: Callable[[], Call], calls: int = 20, replays: int = 10) -> float:
    """µs of a call within a CUDA graph of ``calls`` calls, with a warm L2: the device's time without the host's.

    ``prepare`` makes the call on the stream that captures, leaves included: autograd runs a backward on its forward's
    stream, and hands a leaf's gradient over on the stream where the leaf was first used.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare()
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(replays + 1):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    return statistics.median(times[1:])  # the first replay uploads the graph


def host_time(call: Call, calls: int = 30, rounds: int = 3) -> float:
    """µs of the host until a call is queued: calls queued without waiting, divided by their number."""
    call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def peak_memory(call: Call) -> float:
    """MiB that a call's results and temporaries take at the most, by torch's allocator of the current GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_bandwidth(device: str, rep_ms: float) -> float:
    """GB/s (1e9 bytes, read and written) of a device-local copy: of 256 MiB on a GPU, 64 MiB on a CPU."""
    size = (64 if device == "cpu" else 256) << 20
    source, target = (torch.zeros(size // 4, device=device) for _ in range(2))
    return 2 * size / (device_time(lambda: target.copy_(source), device, rep_ms) * 1e-6) / 1e9


def _wall_time(call: Call, rep_ms: float) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + rep_ms / 1e3
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
