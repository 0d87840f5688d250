"""Launching Triton kernels, a compiled one directly.

``kernel[grid](…)`` binds and specialises all arguments anew at each call, which takes longer than a small norm. Here
the compiled kernel is remembered under what it depends on: the constants, the launch options, and of each argument its
dtype and whether it is aligned to 16 bytes, or for an int whether it fits into 32 bits. (All int arguments of these
kernels are ``do_not_specialize``: their values make no difference.)

What a call launched can be recorded, to be launched again without all that: see ``replay``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .clusters import compiled_for_clusters, resident_clusters

_compiled: dict[tuple, Any] = {}
_clusters: dict[tuple, int] = {}


class Launched(NamedTuple):
    """One launch. ``ready`` is the compiled kernel, None in Triton's interpreter."""

    ready: Any
    grid: tuple[int, ...]  # all three
    arguments: tuple
    constants: tuple


class Tape(threading.local):
    """What this thread launches and allocates as scratch, where somebody records it."""

    def __init__(self) -> None:
        self.launches: list[Launched] | None = None
        self.scratch: list[Tensor] = []


tape = Tape()


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: tuple, *, cluster: int = 1, **options: Any
) -> None:
    """Launches on the device of the first argument, a tensor, and on its current stream; with ``cluster``, that many
    programs in a thread-block cluster, and as many clusters as ``grid`` says.

    Fused multiply-add is switched off: releases of Triton differ in what is the default, and with it in a result's last
    bit, and nothing here is bound by arithmetic.
    """
    device = arguments[0].device
    key = _key(kernel, arguments, constants, cluster, options)
    whole_grid = (*grid, *(1,) * (3 - len(grid)))
    with _current(device):
        ready = _compiled.get(key)
        if ready is None and cluster == 1:
            ready = _compiled_by_launching(kernel, grid, arguments, constants, options)
            if ready is not None:
                _compiled[key] = ready
        else:
            if ready is None:
                ready = _compiled[key] = compiled_for_clusters(kernel, arguments, constants, cluster, options)
            ready[whole_grid](*arguments, *constants)
    if tape.launches is not None:
        tape.launches.append(Launched(ready, whole_grid, arguments, constants))


def most_clusters(kernel: Any, arguments: tuple, constants: tuple, *, cluster: int, **options: Any) -> int:
    """How many clusters of such a launch run at the same time on the device of the first argument."""
    key = _key(kernel, arguments, constants, cluster, options)
    if key not in _clusters:
        with _current(arguments[0].device):
            if key not in _compiled:
                _compiled[key] = compiled_for_clusters(kernel, arguments, constants, cluster, options)
            _clusters[key] = resident_clusters(_compiled[key], cluster)
    return _clusters[key]


def _key(kernel: Any, arguments: tuple, constants: tuple, cluster: int, options: dict[str, Any]) -> tuple:
    specialisations = tuple(map(_specialisation, arguments))
    return id(kernel), arguments[0].device.index, constants, cluster, tuple(options.values()), specialisations


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that only the launches of this call use. It holds anything: where a launch is replayed, nothing else is
    done to it."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tape.launches is not None:
        tape.scratch.append(tensor)
    return tensor


@functools.cache
def has_ptx(device: torch.device) -> bool:
    """Whether kernels with inline PTX run on ``device``: not in the interpreter, nor on other vendors' GPUs, nor on
    those before compute capability 8.0, which cannot round two numbers at a time."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _compiled_by_launching(
    kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: tuple, options: dict
) -> Any:
    """The compiled kernel; None in the interpreter, where nothing is compiled."""
    return kernel[grid](*arguments, *constants, enable_fp_fusion=False, **options)


def _specialisation(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return None if argument is None else -(2**31) <= argument < 2**31


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device. Switching to another takes microseconds, so only where it is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
