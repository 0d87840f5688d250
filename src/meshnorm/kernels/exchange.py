"""Where programs of one GPU exchange: slots and their tags, one workspace for each stream."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

RING = 8  # rows; LOOKAHEAD up to 3 (see triton_exchange)
# Slots of all programs: at most 8 programs a multiprocessor are resident, and a group's parts are padded to a power
# of two.
SLOTS_PER_MULTIPROCESSOR = 8 * 2 * RING


class Workspace(NamedTuple):
    """``state``: the next free tag and a count of finished programs, int32. ``slots``: int64."""

    state: Tensor
    slots: Tensor


def workspace(device: torch.device) -> Workspace:
    """The workspace of the current stream: its launches run one after another, so they can share it.

    A graph that is being captured gets one of its own for each launch, cleared by the graph: it may be replayed on any
    stream, beside others. It is freed behind the launch, and what then lies there in the graph's pool is written by
    what comes later in the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return _new(device)
    return _of_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Workspace:
    """Allocated in a thread of its own, since it lives on: where torch.compile warms up for a graph, what this thread
    allocates lies in the graphs' pool, which takes all of it for its own that is not a result."""
    current = torch.cuda.current_stream(device)
    assert current.cuda_stream == stream

    def allocated() -> Workspace:
        with torch.cuda.stream(current):
            return _new(device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocated).result()


def _new(device: torch.device) -> Workspace:
    count = SLOTS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    state = torch.zeros(2, dtype=torch.int32, device=device)
    state[:1] = 1  # slots are born with tag 0
    return Workspace(state, torch.zeros(count, dtype=torch.int64, device=device))
