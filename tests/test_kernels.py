"""The plain torch kernels, and the choice between them and Triton's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from kernel_cases import Case, Exact, KernelPromises
from torch.utils._python_dispatch import TorchDispatchMode

from meshnorm import kernels
from meshnorm.kernels import cpu


class TestCpu(KernelPromises):
    kernels = cpu
    device = "cpu"
    threads = (1, 2)
    bit_widths = (*KernelPromises.bit_widths, 70000)

    def test_blocks_end_anywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks of one row, of a few that do not divide M, and of parts of a row view's A."""
        for elements in (1, 300, 500, 1100):
            monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", elements // torch.get_num_threads())
            for view in ("contiguous", "heads", "transposed", "one_row"):
                self.check(Case(198, 100, x=view, dy="heads"))

    @pytest.mark.parametrize("view", ["contiguous", "fused_qkv", "heads", "transposed"])
    def test_nothing_as_large_as_x_is_allocated(self, view: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", 2**14 // torch.get_num_threads())
        case = Case(600, 1000, x=view, dy=view)
        exact = Exact(case, "cpu")
        y, rstd = self.forward(case, exact.x, exact.weight)
        dx, dw = torch.empty_like(y), torch.empty(case.n)
        total = torch.empty_like(rstd)
        with _Allocations() as allocations:
            cpu.forward(exact.x, exact.weight, 1e-6, 0.0, "llama", y, rstd)
            cpu.statistic(exact.x, total)
            cpu.apply(exact.x, exact.weight, total, case.n, 1e-6, 0.0, "gemma", y, rstd)
            cpu.backward(exact.dy, exact.x, exact.weight, rstd, 0.0, dx, dw)
        assert 0 < allocations.largest <= 2**14


class _Allocations(TorchDispatchMode):
    """The elements of the largest storage that an op made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            a.untyped_storage().data_ptr() for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)
        }
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_a_cpu_tensor_gets_the_torch_kernels_and_no_triton_is_imported() -> None:
    code = (
        "import sys, torch, meshnorm.kernels as k; "
        "assert k.kernels_for(torch.device('cpu')) is k.cpu; "
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_every_device_gets_the_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find_spec(name, *a))
    kernels._triton_module.cache_clear()
    try:
        assert kernels.kernels_for(torch.device("cuda", 0)) is cpu
    finally:
        kernels._triton_module.cache_clear()
