"""The kernels of a norm of x + residual: in torch, and Triton's (in its interpreter where there is no GPU)."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import what_an_h200_is_asked  # noqa: E402
from interpreting import interpreter_does_as_the_hardware  # noqa: E402, F401
from kernel_cases_add import BF16, F32, AddCase, AddPromises, AddRunner, Given  # noqa: E402

from meshnorm.kernels import cpu, gpu  # noqa: E402
from meshnorm.kernels.settings import RowSettings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def seed() -> None:
    """New inputs each run; a failure shows the seed, MESHNORM_SEED repeats it."""
    seed = int(os.environ.get("MESHNORM_SEED") or random.SystemRandom().randrange(2**31))
    print(f"MESHNORM_SEED={seed}")
    torch.manual_seed(seed)


class TestCpu(AddPromises):
    kernels = cpu
    device = "cpu"
    threads = (1, 2)

    def test_blocks_end_anywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for elements in (1, 300, 1100):
            monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", elements // torch.get_num_threads())
            for view in ("contiguous", "heads", "transposed", "one_row"):
                self.check(AddCase(198, 100, BF16, F32, x=view, residual="heads", residual_dtype=F32))


class TestTriton(AddPromises):
    kernels = gpu
    device = "cuda" if CUDA else "cpu"
    bit_widths = (17, 1002)
    if CUDA:  # a width for each kind of kernel
        bit_widths = (17, 128, 1002, 1536, 2560, 2880, 4096, 5120, 8192, 12288, 18432, 40000, 65536, 131072)


@pytest.mark.gpu
class TestGpu(AddRunner):
    """What only a compiler does: every kind of kernel at its widths, rows in clusters, and rows too wide for all."""

    kernels = gpu
    device = "cuda"

    @pytest.mark.parametrize("n", [64, 512, 1024, 1536, 2048, 2560, 4096, 5120, 8192, 12288, 18432, 32768])
    @pytest.mark.parametrize("residual_dtype", [BF16, F32], ids=str)
    def test_every_kind_of_kernel(self, n: int, residual_dtype: torch.dtype) -> None:
        for m in (1, 300, 4099):
            self.check(AddCase(m, n, BF16, BF16, residual_dtype=residual_dtype))

    @pytest.mark.parametrize("n", [65536, 131072, 262144])
    @pytest.mark.parametrize("residual_dtype", [BF16, F32], ids=str)
    def test_rows_beyond_any_program(self, n: int, residual_dtype: torch.dtype) -> None:
        for m in (1, 300):
            self.check(AddCase(m, n, BF16, BF16, residual_dtype=residual_dtype))


@pytest.mark.parametrize("n", [1000, 4097] + [65536] * CUDA)
@pytest.mark.parametrize("residual_dtype", [BF16, F32], ids=str)
def test_the_stored_sum_read_again_gives_the_bits_of_another_addition(n: int, residual_dtype: torch.dtype) -> None:
    case = AddCase(300 if CUDA else 3, n, BF16, F32, residual="heads", residual_dtype=residual_dtype)
    given = Given(case, TestTriton.device)
    for held in (0, 1):
        found = []
        for sum_again in (False, True):
            y, out = (torch.full((case.m, n), torch.nan, device=TestTriton.device) for _ in range(2))
            y, out = y.to(case.dtype), out.to(residual_dtype)
            rstd = torch.full((case.m,), torch.nan, device=TestTriton.device)
            tile = RowSettings(1, max(256, n // 8), 4, held, sum_again=sum_again)
            norm = (given.x, given.weight, 1e-6, 0.0, "llama", y, rstd, given.residual, out)
            gpu.forward(*norm, settings=replace(tile, block=1 << (tile.block - 1).bit_length()))
            found.append((y, rstd, out))
        exact = given.exact()
        exact.check_y(found[1][0])
        assert torch.equal(found[1][2], given.residual_out)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- what is launched ---


def test_without_a_residual_the_kernels_have_no_argument_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is no argument of a compiled Triton kernel: rms_norm's are what they were without all this."""
    asked = what_an_h200_is_asked(monkeypatch)
    for n in (128, 2880, 8192, 18432):
        x, y, rstd = torch.empty(1, 1, 1).expand(1, 40, n).bfloat16(), torch.empty(40, n).bfloat16(), torch.empty(40)
        gpu.forward(x, None, 1e-6, 0.0, "llama", y, rstd)
        gpu.statistic(x, rstd)
        gpu.backward(x, x, None, rstd, 0.0, y, None)
        gpu.backward_apply(x, x, None, rstd, rstd, n, 0.0, y, None)
    names = ("RESIDUAL", "RESIDUAL_OUT", "r_b", "r_stride_a", "r_stride_b", "R_UNIT", "R_FLAT")
    names += ("DRESIDUAL_OUT", "DRESIDUAL")
    for launched in asked:
        known = {**launched.arguments, **launched.constants}
        found = [name for name in names if name in known]
        assert len(found) >= 2 and all(known[name] is None for name in found), launched.kernel


@pytest.mark.parametrize("residual_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("n", [128, 2880, 8192, 18432, 65536])
def test_both_passes_are_one_launch_beside_that_of_dw(
    n: int, residual_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = what_an_h200_is_asked(monkeypatch)
    case = AddCase(40, n, BF16, BF16, residual_dtype=residual_dtype)
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: torch.ones(1).expand(*shape))
    given = Given(case, "cpu")
    y, rstd = torch.empty(40, n, dtype=BF16), torch.empty(40)
    gpu.forward(given.x, given.weight, 1e-6, 0.0, "llama", y, rstd, given.residual, given.residual_out)
    assert [launched.kernel for launched in asked] == ["forward_kernel" if n == 128 else "forward_wide_kernel"]
    asked.clear()
    out, dw = given.residual_out, torch.empty(n, dtype=BF16)
    second = None if residual_dtype == BF16 else out
    gpu.backward(given.dy, out[None], given.weight, rstd, 0.0, y, dw, given.d_out, second)
    first, *others = asked
    assert first.kernel in ("backward_kernel", "backward_chunks_kernel")
    assert [launched.kernel for launched in others] in ([], ["sum_partials_kernel"])
    assert first.arguments["DRESIDUAL_OUT"] is given.d_out and first.arguments["DRESIDUAL"] is second
