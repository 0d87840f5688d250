"""Kernels launched as thread-block clusters whose size is no part of the kernel.

Triton knows clusters as programs whose tensors are spread over several blocks (``num_ctas``). Here each block is a
program of its own, as without clusters, and only the launch says how many of them make a cluster. Triton's launcher
takes that number from ``CompiledKernel.packed_metadata``, (warps, num_ctas, bytes of shared memory): private, seen in
Triton 3.6 and 3.9. It multiplies the grid by it, so that the grid counts clusters.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

# enum values of cuda.h
_CLUSTER_DIMENSION = 4
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_PORTABLE = 8  # the largest cluster that every GPU with clusters takes


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes from byte 8 on."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Whether ``device`` has thread-block clusters: compute capability 9.0 and up."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def compiled_for_clusters(kernel: Any, arguments: tuple, constants: tuple, cluster: int, options: dict) -> Any:
    """The compiled kernel, of which every launch is one of clusters of ``cluster`` programs."""
    ready = kernel.warmup(*arguments, *constants, grid=(1,), enable_fp_fusion=False, **options)
    ready._init_handles()
    warps, _, shared = ready.packed_metadata
    ready.packed_metadata = (warps, cluster, shared)
    if cluster > _PORTABLE:  # a GPU that has no such clusters says so in ``resident_clusters``
        _driver().cuFuncSetAttribute(ctypes.c_void_p(ready.function), _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    return ready


def resident_clusters(ready: Any, cluster: int) -> int:
    """How many clusters of a compiled kernel the current device runs at once; 0 where it has none of that size. Fewer
    than its multiprocessors would hold, since a cluster lies within one group of them (a GPC): on an H200 62 of 66
    clusters of 4 programs, two of which fit a multiprocessor."""
    attribute = _Attribute(id=_CLUSTER_DIMENSION)
    attribute.value[:3] = [cluster, 1, 1]
    warps, _, shared = ready.packed_metadata
    config = _Config((cluster, 1, 1), (32 * warps, 1, 1), shared, None, ctypes.pointer(attribute), 1)
    count = ctypes.c_int()
    function = ctypes.c_void_p(ready.function)
    refused = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    return 0 if refused else count.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
