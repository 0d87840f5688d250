"""The kernels of a gated norm: in torch, and Triton's (in its interpreter where there is no GPU)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import what_an_h200_is_asked  # noqa: E402
from interpreting import interpreter_does_as_the_hardware  # noqa: E402, F401
from kernel_cases_gated import BF16, F32, GatedCase, GatedPromises, GatedRunner, Given  # noqa: E402

from meshnorm.kernels import cpu, cpu_gated, gpu_gated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """New inputs each run; a failure shows the seed, MESHNORM_SEED repeats it."""
    seed = int(os.environ.get("MESHNORM_SEED") or random.SystemRandom().randrange(2**31))
    print(f"MESHNORM_SEED={seed}")
    torch.manual_seed(seed)
    yield
    if CUDA:
        torch.cuda.empty_cache()  # tests run beside one another


class TestCpu(GatedPromises):
    kernels = cpu_gated
    device = "cpu"
    threads = (1, 2)

    def test_blocks_end_anywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for elements in (1, 300, 1100):
            monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", elements // torch.get_num_threads())
            for view in ("contiguous", "heads", "transposed", "one_row"):
                for before in (True, False):
                    self.check(GatedCase(66, 96, BF16, F32, x=view, gate="heads", before=before, group=48))


class TestTriton(GatedPromises):
    kernels = gpu_gated
    device = "cuda" if CUDA else "cpu"
    bit_widths = ((102, 34), (1002, 0))
    if CUDA:  # a width for each kind of kernel
        bit_widths = ((17, 0), (128, 64), (1002, 0), (2048, 1024), (2560, 0), (4096, 0), (6144, 0), (8192, 0))
        bit_widths += ((8192, 1024), (12288, 0), (16384, 0), (40000, 0))


@pytest.mark.gpu
class TestGpu(GatedRunner):
    """What only a compiler does: every kind of kernel at its widths."""

    kernels = gpu_gated
    device = "cuda"

    @pytest.mark.parametrize(
        ("n", "group"),
        [
            *((64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (8192, 64), (8192, 1024), (2880, 0), (2048, 0)),
            *((4096, 0), (5120, 0), (6144, 0), (8192, 0), (12288, 0), (16384, 0), (20000, 0), (131072, 0)),
            *((10000, 0), (36864, 18432), (49152, 0)),
        ],
    )
    @pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, F32), (torch.float16, torch.float16)], ids=str)
    @pytest.mark.parametrize("before", [True, False])
    def test_every_kind_of_kernel(self, n: int, group: int, dtypes: tuple, before: bool) -> None:
        for m in (1, 300, 4099 if n <= 4096 else 1031 if n <= 20000 else 7):
            for activation in ("silu", "sigmoid"):
                case = GatedCase(m, n, dtypes[0], dtypes[0], gate_dtype=dtypes[1], before=before, group=group)
                self.check(GatedCase(**{**case.__dict__, "activation": activation}))


# --- what is launched ---


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("n", "group"), [(128, 128), (8192, 64), (8192, 1024), (12288, 1536), (2880, 2880), (8192, 8192), (12288, 12288)]
)
def test_both_passes_are_one_launch_beside_that_of_dw(
    n: int, group: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = what_an_h200_is_asked(monkeypatch)
    m = 2**27 // n
    x = torch.empty(1, m, n, dtype=BF16)  # never touched
    y, weight = x[0], torch.empty(n, dtype=BF16)
    rstd = torch.empty(m, n // group)
    how = GatedCase(m, n, before=before, group=group).how
    gpu_gated.forward(x, x, weight, how, y, rstd)
    (forward,) = asked
    wide = group > (1024 if before else 8192)
    assert forward.kernel == ("gated_forward_wide_kernel" if wide else "gated_forward_kernel")
    asked.clear()
    gpu_gated.backward(x, x, x, weight, rstd, how, y, y, weight)
    assert [launched.kernel for launched in asked] == ["gated_backward_kernel", "sum_partials_kernel"]
    first = asked[0]
    cluster = first.options.get("cluster", 1)
    assert cluster == (-(-group // 8192) if group > 12288 else 1) == first.constants["CHUNKS"]
    programs = first.grid[0] * cluster
    resident = 132 * (65536 // (first.options["maxnreg"] * 32 * first.options["num_warps"]))
    resident = resident if cluster == 1 else 132  # see fake_driver
    assert 0.8 * resident <= programs <= resident and first.grid[0] % (n // group) == 0
    partial = first.arguments["PARTIAL"]
    assert partial.shape == (first.grid[0] // (n // group), n) and partial.nbytes <= 0.03 * 2 * m * n


def test_groups_beyond_a_cluster_take_their_sums_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = what_an_h200_is_asked(monkeypatch)
    wide = 131072
    for before, want, kernels in (
        (True, "dX dGate dW", ["gated_statistic_kernel", "gated_backward_kernel", "sum_partials_kernel"]),
        (True, "dGate dW", ["gated_backward_kernel", "sum_partials_kernel"]),
        (False, "dGate", ["gated_statistic_kernel", "gated_backward_kernel"]),
        (False, "dW", ["gated_backward_kernel", "sum_partials_kernel"]),
    ):
        given = Given.__new__(Given)
        given.case = GatedCase(600, wide, BF16, BF16, before=before)
        x, given.weight = torch.empty(1, 600, wide, dtype=BF16), torch.empty(wide, dtype=BF16)
        asked.clear()
        TestTriton().backward(given, x, x, x, torch.empty(600, 1), want)
        assert [launched.kernel for launched in asked] == kernels


@pytest.mark.parametrize(("dtypes", "n", "unit"), [((BF16, BF16), 96, 8), ((BF16, F32), 96, 4), ((F32, BF16), 102, 2)])
def test_no_tensor_is_accessed_more_widely_than_another(
    dtypes: tuple, n: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled row sum's order follows from the widest access: it must not follow from what is wanted, or aligned."""
    asked = what_an_h200_is_asked(monkeypatch)
    given = Given(GatedCase(5, n, dtypes[0], F32, gate_dtype=dtypes[1], before=False, group=n), "cpu")
    rstd = TestTriton().forward(given, given.x, given.gate)[1]
    assert rstd is not None
    TestTriton().backward(given, given.dy, given.x, given.gate, rstd)
    TestTriton.kernels.statistic(given.x, given.gate, given.case.how, rstd)
    for launched in asked:
        units = {name: value for name, value in launched.constants.items() if name.endswith("_UNIT")}
        wanted = {name for name in units if launched.kernel != "gated_statistic_kernel" or name != "DY_UNIT"}
        assert all(units[name] == unit for name in wanted), (launched.kernel, units)
