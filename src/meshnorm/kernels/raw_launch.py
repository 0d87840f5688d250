"""Triton's compiled kernels launched by address: the one place that knows how a release of Triton does it.

``ready[grid](…)`` asks for the device, the stream and the hooks, calls two (empty) chains of hooks, and has the driver
look up every tensor's address; all this takes several times what launching does. Here ready's launcher is called with
the addresses as ints. Calling the driver itself through ctypes would be slower: converting 11 arguments takes ctypes
0.8 µs, packing the kernel's own 0.2; Triton's launcher, compiled for the kernel's signature, takes 0.4 for all (on a
CPU, with a driver that does nothing). Nor would it be safe: threads that share the packed arguments could overwrite
them between packing and launching.

Private, seen in Triton 3.6 and 3.9: ``CompiledKernel.run(gridX, gridY, gridZ, stream, function, packed_metadata,
launch_metadata, enter_hook, exit_hook, *arguments)``, an address or a tensor for each pointer, anything for a constant.
In 3.6 alone ``run.launch`` is the compiled launcher itself, which saves 0.5 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs

# Not through torch.cuda, whose functions check each time that CUDA is initialised. Triton asks for streams like this.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def launcher(ready: Any) -> tuple[Callable[..., None], tuple]:
    """(launch, fixed): ``launch(*grid, stream, *fixed, *arguments)`` launches the compiled kernel ``ready``, which has
    been launched before, on the current device."""
    run, function, metadata = ready.run, ready.function, ready.packed_metadata
    needs_scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher" and not needs_scratch:
        cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (function, cooperative, dependent, None, None, metadata, None, None, None)
    return run, (function, metadata, None, None, None)


def is_watched() -> bool:
    """Whether somebody, a profiler for one, has asked to be called at launches; then Triton itself has to launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
