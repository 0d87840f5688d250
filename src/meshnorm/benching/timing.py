"""How time and memory are taken. Times are microseconds, and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


QUEUE = 10  # calls queued behind one wait of the GPU
CYCLES = 2000  # of a GPU's clock in a microsecond, at the most


def device_time(call: Call, device: str, rep_ms: float) -> float:
    """µs of a call: on a GPU between CUDA events with a cold L2, on a CPU by the wall clock.

    Calls are queued while the GPU is kept waiting, so that a call's own launches follow one another as in a training
    step. Else a backward whose host takes longer than its kernels would be timed by the host: 32% of copy bandwidth
    where its kernels reach 79% (1024×131072, H200). ``host_time`` says what the host takes.
    """
    if device == "cpu":
        return _wall_time(call, rep_ms)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    wait = int(1.5 * QUEUE * (host_time(call, calls=QUEUE, rounds=1) + 50) * CYCLES)
    times: list[float] = []
    while len(times) < 2 * QUEUE or (sum(times) < rep_ms * 1e3 and len(times) < 10 * QUEUE):
        torch.cuda.synchronize()
        torch.cuda._sleep(wait)
        events = []
        for _ in range(QUEUE):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) * 1e3 for start, end in events]
    return statistics.median(times)


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
