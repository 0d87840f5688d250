"""The launch of a tile, and what a device has room for."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .launching import launch
from .settings import PersistentSettings, RowSettings


def launch_tile(
    kernel: Any, grid: tuple[int, ...], tile: RowSettings | PersistentSettings, arguments: tuple, constants: tuple
) -> None:
    if torch.version.hip:
        # A wavefront is twice as wide as a warp, and a program has 1024 threads at most.
        launch(kernel, grid, arguments, constants, num_warps=min(tile.warps, 16))
    elif isinstance(tile, RowSettings) and tile.registers is not None:
        launch(kernel, grid, arguments, constants, num_warps=tile.warps, maxnreg=tile.registers)
    else:
        launch(kernel, grid, arguments, constants, num_warps=tile.warps)


def stages_of(tile: PersistentSettings, element_bytes: int, shared_memory: int) -> int:
    """As many stages as the tile asks for and shared memory holds (what is loaded in each stage but one lies there)."""
    return fitting_stages(tile.stages, tile.per_sm, tile.rows * tile.block * element_bytes, shared_memory)


def fitting_stages(stages: int, per_sm: int, stage_bytes: int, shared_memory: int) -> int:
    return max(1, min(stages, 1 + (shared_memory - 8192) // per_sm // stage_bytes))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """A few where there is no GPU: Triton's interpreter then goes through the same loops."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 228 * 1024
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) or 48 * 1024


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
