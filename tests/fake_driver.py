"""Triton's compiler and driver on a CPU, for tests of what is launched and how.

Its "compiled" kernels take addresses, as the real ones do, and run in Triton's interpreter on the memory found there.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from meshnorm import kernels, ops
from meshnorm.kernels import (
    exchange,
    gated,
    gpu,
    gpu_backward,
    gpu_chunks,
    gpu_gated,
    gpu_qk,
    gpu_split,
    launching,
    replay,
    tiles,
)


class Launch(NamedTuple):
    kernel: str
    is_replayed: bool
    stream: int


class FakeDriver:
    """``with_driver(monkeypatch)`` puts one in place: CPU tensors then take the path of a GPU's."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.device, self.stream = 0, 11

    def compiled_by_launching(self, kernel: Any, grid: Any, arguments: tuple, constants: tuple, options: dict) -> Any:
        self.run_kernel(kernel, grid, *arguments, *constants)
        self.launches.append(Launch(kernel.fn.__name__, False, 0))
        return _Compiled(self, kernel, [a.dtype if isinstance(a, Tensor) else None for a in arguments])

    @staticmethod
    def run_kernel(kernel: Any, grid: Any, *arguments: Any) -> None:
        kernel[grid](*arguments)

    def counts(self) -> tuple[int, int]:
        """(launches that took the ordinary way, replayed ones) since the last time."""
        replayed = sum(launch.is_replayed for launch in self.launches)
        ordinary = len(self.launches) - replayed
        self.launches.clear()
        return ordinary, replayed


class _Compiled:
    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self, driver: FakeDriver, kernel: Any, dtypes: list[torch.dtype | None]) -> None:
        self._driver, self._kernel, self._dtypes = driver, kernel, dtypes

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any) -> None:
            self._driver.run_kernel(self._kernel, grid, *arguments)
            self._driver.launches.append(Launch(self._kernel.fn.__name__, False, 0))

        return launch

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        assert (function, metadata) == (self.function, self.packed_metadata) and rest[:3] == (None, None, None)
        assert all(type(number) is int for number in (x, y, z, stream))
        arguments = list(rest[3:])
        for place, dtype in enumerate(self._dtypes):
            if dtype is not None:
                assert type(arguments[place]) is int and arguments[place] % 16 == 0
                arguments[place] = _tensor_at(arguments[place], dtype)
        self._driver.run_kernel(self._kernel, (x, y, z), *arguments)
        self._driver.launches.append(Launch(self._kernel.fn.__name__, True, stream))


def _tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)


def with_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    for module in (ops, kernels, gated):
        monkeypatch.setattr(module, "kernels_for", lambda device: gpu)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_compiled_by_launching", driver.compiled_by_launching)
    monkeypatch.setattr(replay, "current_device", lambda: driver.device)
    monkeypatch.setattr(replay, "current_stream", lambda device: driver.stream)
    return driver


class Asked(NamedTuple):
    """A launch, its arguments by their names."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]


def what_an_h200_is_asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """A list that each launch is added to, instead of being done: with the settings and grids of an H200, whatever the
    device of the tensors is."""
    asked: list[Asked] = []

    def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options: Any) -> None:
        names, count = kernel.arg_names, len(arguments)
        named = dict(zip(names, arguments, strict=False)), dict(zip(names[count:], constants, strict=True))
        asked.append(Asked(kernel.fn.__name__, grid, *named, options))

    for module in (tiles, gpu_backward, gpu_chunks, gpu_split, gpu_gated, gpu_qk):
        monkeypatch.setattr(module, "launch", launch)
    for module in (gpu, gpu_backward, gpu_chunks, gpu_split, gpu_gated, gpu_qk):
        monkeypatch.setattr(module, "has_ptx", lambda device: True)
    for module in (gpu_backward, gpu_chunks, gpu_gated, gpu_qk):
        monkeypatch.setattr(module, "has_clusters", lambda device: True)
    for module in (gpu, gpu_backward, gpu_gated, gpu_qk):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(module, "shared_memory_of", lambda device: 227 * 1024)
    for module in (gpu_chunks, gpu_gated):
        monkeypatch.setattr(module, "most_clusters", lambda *arguments, **options: 132 // options["cluster"])
    space = exchange.Workspace(torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int64))
    monkeypatch.setattr(gpu_split, "workspace", lambda device: space)
    return asked
