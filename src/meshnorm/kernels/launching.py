"""Launching Triton kernels, a compiled one directly.

``kernel[grid](…)`` binds and specialises all arguments anew at each call, which takes longer than a small norm. Here
the compiled kernel is remembered under what it depends on: the constants, the launch options, and of each argument its
dtype and whether it is aligned to 16 bytes, or for an int whether it fits into 32 bits. (All int arguments of these
kernels are ``do_not_specialize``: their values make no difference.)
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from .clusters import compiled_for_clusters, resident_clusters

_compiled: dict[tuple, Any] = {}
_clusters: dict[tuple, int] = {}


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
    with _current(device):
        ready = _compiled.get(key)
        if ready is None and cluster == 1:
            # None in the interpreter, where nothing is compiled
            ready = kernel[grid](*arguments, *constants, enable_fp_fusion=False, **options)
            if ready is not None:
                _compiled[key] = ready
            return
        if ready is None:
            ready = _compiled[key] = compiled_for_clusters(kernel, arguments, constants, cluster, options)
        ready[grid + (1,) * (3 - len(grid))](*arguments, *constants)


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


@functools.cache
def has_ptx(device: torch.device) -> bool:
    """Whether kernels with inline PTX run on ``device``: not in the interpreter, nor on other vendors' GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def _specialisation(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return None if argument is None else -(2**31) <= argument < 2**31


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device. Switching to another takes microseconds, so only where it is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
