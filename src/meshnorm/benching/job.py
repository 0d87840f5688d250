"""What is asked of a run, and what a run finds: plain data that also travels between processes as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Job:
    """Shapes, passes and device of a run.

    ``shapes`` are (M, N): M rows of N elements. ``dtype`` is torch's name for it, as in "bfloat16". ``rep_ms`` is for
    how many milliseconds each figure's calls are timed.
    """

    shapes: tuple[tuple[int, int], ...]
    dtype: str
    passes: tuple[str, ...]
    device: str
    rep_ms: float

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(found: dict[str, Any]) -> Job:
        shapes = tuple((m, n) for m, n in found["shapes"])
        return Job(shapes, found["dtype"], tuple(found["passes"]), found["device"], found["rep_ms"])


@dataclass(frozen=True)
class Result:
    """One provider at one shape in one pass. A figure that was not taken is None; ``reason`` then says why.

    ``device_us``: µs a call, median, cold L2 (on a CPU: wall time). ``graph_us``: µs a call within a replayed CUDA
    graph, warm L2. ``host_us``: µs until a call is queued; for the backward, a forward and a backward. ``peak_mib``:
    the allocator's peak during a call above what was held before it, the results included, in MiB.
    """

    provider: str
    version: str
    m: int
    n: int
    dtype: str
    which: str
    device_us: float | None = None
    graph_us: float | None = None
    host_us: float | None = None
    peak_mib: float | None = None
    reason: str = ""

    def percent_of_copy(self, copy_gb_s: float) -> float | None:
        """Of the time that a copy needs for the bytes that must move: x and y, or dY, x and dX."""
        if self.device_us is None:
            return None
        tensors = 2 if self.which == "forward" else 3
        moved = tensors * self.m * self.n * getattr(torch, self.dtype).itemsize
        return 100 * moved / (self.device_us * 1e-6) / (copy_gb_s * 1e9)
