"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on CPU tensors.

Tests marked gpu need the real thing: what the compiler does, large tensors, streams, devices, memory.
"""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import what_an_h200_is_asked  # noqa: E402
from interpreting import interpreter_does_as_the_hardware  # noqa: E402, F401
from kernel_cases import Case, Exact, KernelPromises, KernelRunner, empty, rows  # noqa: E402

from meshnorm import kernels  # noqa: E402
from meshnorm.formula import CASTING_MODES  # noqa: E402
from meshnorm.kernels import gpu, gpu_backward, gpu_chunks, launching, replay, row_views, settings, tiles  # noqa: E402
from meshnorm.kernels.triton_forward import forward_wide_kernel  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
# The rows that fill up a tile are computed like any other, and never stored; NumPy remarks on their 1/0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


class TestTriton(KernelPromises):
    kernels = gpu
    device = DEVICE

    def test_more_rows_than_32_bits_count_take_the_same_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The 64-bit row arithmetic, on few rows. (``test_more_rows_than_32_bits_count`` has them, on a GPU.)"""
        row_view = row_views.row_view
        for module in (gpu, gpu_backward):
            monkeypatch.setattr(module, "row_view", lambda x: row_view(x)._replace(int64=True))
        for view in ("contiguous", "heads"):
            self.check(Case(198, 100, x=view, dy="transposed"))


# --- few rows ---


@pytest.mark.parametrize("n", [600, 1001, 3072, 4096, 7168])
@pytest.mark.parametrize("mode", CASTING_MODES)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, None], ids=str)
def test_few_rows_have_the_bits_that_they_have_among_many(
    n: int, mode: str, weight: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, few = (8192, 5) if CUDA else (6, 2)
    tile = settings.forward_settings(n, torch.bfloat16)
    # The interpreter has 4 multiprocessors.
    monkeypatch.setattr(gpu, "RESIDENT_WARPS", 64 if CUDA else few * tile.warps // 4)
    enough = gpu.RESIDENT_WARPS * tiles.multiprocessors(torch.device(DEVICE))
    assert few * tile.warps <= enough < m * tile.warps
    for residual in (False, True):
        case = Case(m, n, weight=weight, mode=mode, offset=1.0)
        exact, others = Exact(case, DEVICE), rows("contiguous", m, n, case.dtype, DEVICE) if residual else None

        def run(start: int, with_rstd: bool, chunks: int, case=case, exact=exact, others=others) -> list[torch.Tensor]:
            y, total = (empty(m - start, n, dtype=case.dtype, device=DEVICE) for _ in range(2))
            rstd = empty(m - start, dtype=torch.float32, device=DEVICE) if with_rstd else None
            behind = (None, None) if others is None else (others[:, start:], total)
            given = (case.eps, case.offset, case.mode, y, rstd, *behind)
            with replay.Recording() as recording:
                gpu.forward(exact.x[:, start:], exact.weight, *given)
            named = zip(forward_wide_kernel.arg_names[14:], recording.launches[0].constants, strict=True)
            assert dict(named)["HELD"] == chunks
            return [each for each in (y, rstd, behind[1]) if each is not None]

        for with_rstd in (True, False):
            among_many, alone = run(0, with_rstd, 0), run(m - few, with_rstd, -(-n // tile.block))
            assert all(torch.equal(a[m - few :], b) for a, b in zip(among_many, alone, strict=True))


# --- settings and grids: pure ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_width_has_settings(dtype: torch.dtype) -> None:
    for n in (*range(1, 3000), 4096, 4097, 16384, 32769, 131072, 2**20):
        for chosen in (
            settings.forward_settings(n, dtype),
            settings.statistic_settings(n, dtype),
            settings.apply_settings(n, dtype),
            settings.backward_settings(n, dtype) or settings.backward_apply_settings(n, dtype),
        ):
            assert chosen.block & (chosen.block - 1) == 0 and chosen.rows & (chosen.rows - 1) == 0
            assert chosen.rows * chosen.block <= 2**17 and chosen.warps <= 32
            assert chosen.block < 4 * n or chosen.block <= 128  # no more than a power of two of padding


def test_programs_fill_the_device_and_never_outnumber_the_tiles() -> None:
    assert gpu_backward.program_count(tiles=10**6, chunks=1, per_sm=2, sms=132, allowed=None) == 264
    assert gpu_backward.program_count(tiles=100, chunks=1, per_sm=2, sms=132, allowed=None) == 100
    assert gpu_backward.program_count(tiles=10**6, chunks=16, per_sm=2, sms=132, allowed=None) == 18
    assert gpu_backward.program_count(tiles=1, chunks=500, per_sm=2, sms=132, allowed=0) == 1


def test_partial_rows_stay_below_3_percent_of_x_where_they_can_fill_most_of_the_device() -> None:
    assert gpu_backward.program_count(tiles=32768, chunks=1, per_sm=2, sms=132, allowed=491) == 264
    assert gpu_backward.program_count(tiles=8192, chunks=1, per_sm=1, sms=132, allowed=122) == 122
    assert gpu_backward.program_count(tiles=512, chunks=1, per_sm=2, sms=132, allowed=7) == 132


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_cover_a_row_and_each_program_of_a_cluster_has_columns(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = what_an_h200_is_asked(monkeypatch)
    for n in (1025, 1536, 2059, 2880, 4097, 5120, 5121, 8193, 12289, 12300, 17001, 18432, 24577, 49153, 65535, 65536):
        if settings.backward_chunk_settings(n, dtype) is None:
            continue
        x = torch.empty(1, 1, 1, dtype=dtype).expand(1, 40, n)
        gpu.backward(x, x, None, torch.empty(1, 40), 0.0, torch.empty(1, dtype=dtype), None)
        launched = asked.pop()
        parts, width = launched.constants["PARTS"], launched.constants["WIDTH"]
        chunk, chunks = launched.constants["CHUNK"], launched.constants["CHUNKS"]
        assert launched.options["cluster"] == parts
        assert (parts - 1) * width < n <= parts * width and width % 8 == 0  # rows stay aligned
        assert (chunks - 1) * chunk < width <= chunks * chunk and chunks <= 8


@pytest.mark.parametrize(("n", "dtype"), [(18432, torch.bfloat16), (65536, torch.bfloat16), (65536, torch.float32)])
def test_a_gpu_that_refuses_clusters_of_a_size_splits_over_independent_programs(
    n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = what_an_h200_is_asked(monkeypatch)
    monkeypatch.setattr(gpu_chunks, "most_clusters", lambda *arguments, **options: 0)
    x = torch.empty(1, 1, 1, dtype=dtype).expand(1, 40, n)
    dw = torch.empty(n, dtype=dtype)
    gpu.backward(x, x, None, torch.empty(1, 40), 0.0, torch.empty(1, dtype=dtype), dw)
    assert [each.kernel for each in asked] == ["backward_split_kernel", "sum_partials_kernel"]


@pytest.mark.parametrize(("n", "per_sm", "dtype"), [(1536, 8, torch.bfloat16), (5120, 2, torch.float32)])
def test_registers_are_bounded_so_that_all_programs_of_a_multiprocessor_fit(
    n: int, per_sm: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = what_an_h200_is_asked(monkeypatch)
    x = torch.empty(1, 1, 1, dtype=dtype).expand(1, 5000, n)
    gpu.backward(x, x, None, torch.empty(1, 5000), 0.0, torch.empty(1, dtype=dtype), None)
    (launched,) = asked
    assert launched.grid == (132 * per_sm,)
    threads = 32 * launched.options["num_warps"] * per_sm
    assert 0.9 * 65536 < threads * launched.options["maxnreg"] <= 65536


def test_inputs_are_never_read_more_widely_than_outputs_are_written() -> None:
    """What keeps the order of a row's sum independent of strides: see ``row_views.vector``."""
    padded = torch.empty(1, 8, 1008, dtype=torch.bfloat16)
    assert row_views.row_view(padded).unit == 8
    assert row_views.row_view(padded[:, :, :1002]).unit == 2
    assert row_views.row_view(padded[:, :, :1001]).unit == 1
    assert row_views.row_view(torch.empty(1, 8, 1004).bfloat16()[:, :, :1000]).unit == 1
    assert row_views.aligned(padded[:, :, :1000]).data_ptr() == padded.data_ptr()
    assert row_views.aligned(padded[:, :, 1:1001]).data_ptr() != padded.data_ptr() + 2


def test_ptx_is_for_gpus_that_have_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers are rounded at a time from compute capability 8.0 on."""
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert launching.has_ptx.__wrapped__(torch.device("cuda", 0)) is has
    assert not launching.has_ptx.__wrapped__(torch.device("cpu"))


@pytest.mark.gpu
def test_a_cuda_tensor_gets_the_triton_kernels() -> None:
    assert kernels.kernels_for(torch.device("cuda", 0)) is gpu


# --- the real thing ---


@pytest.mark.gpu
class TestGpu(KernelRunner):
    kernels = gpu
    device = "cuda"

    @pytest.mark.parametrize("n", [128, 1002, 1536, 2560, 5120, 18432, 40000, 65536])
    def test_bits_do_not_depend_on_rows_nor_alignment(self, n: int) -> None:
        case = Case(4099, n)
        exact = Exact(case, "cuda")
        whole = self.row_results(case, exact.x, exact.dy, exact.weight)
        for start, stop in ((0, 1), (7, 9), (4098, 4099), (1000, 2001)):
            x, dy = exact.x[:, start:stop], exact.dy[:, start:stop]
            self.assert_same_bits(whole, case, x, dy, exact.weight, start, stop, "alone")
        for columns in (slice(1, n + 1), slice(n, 2 * n)):  # at odd addresses; the middle of three
            strided = torch.empty(1, 4099, 3 * n, dtype=case.dtype, device="cuda")[:, :, columns]
            strided.copy_(exact.x)
            self.assert_same_bits(whole, case, strided, exact.dy, exact.weight, 0, 4099, f"x[{columns}]")
            strided.copy_(exact.dy)
            self.assert_same_bits(whole, case, exact.x, strided, exact.weight, 0, 4099, f"dY[{columns}]")

    def test_more_rows_than_32_bits_count(self) -> None:
        m = 2**31 + 300
        x = torch.full((1, m, 1), 2.0, dtype=torch.bfloat16, device="cuda")
        y = empty(m, 1, dtype=torch.bfloat16, device="cuda")
        rstd = empty(m, dtype=torch.float32, device="cuda")
        weight = torch.ones(1, dtype=torch.bfloat16, device="cuda")
        gpu.forward(x, weight, 0.0, 0.0, "llama", y, rstd)
        assert bool((y == 1).all()) and bool((rstd == 0.5).all())
        dw = empty(1, dtype=torch.float32, device="cuda")
        gpu.backward(x, x, weight, rstd, 0.0, y, dw)
        assert bool((y == 0).all())
        assert dw.item() == pytest.approx(2.0 * m, rel=1e-5)

    def split_results(self, case: Case, exact: Exact) -> tuple[torch.Tensor, ...]:
        y, rstd = self.forward(case, exact.x, exact.weight)
        dx, dw = self.backward(case, exact.dy, exact.x, exact.weight, rstd)
        assert dx is not None and dw is not None
        return y, rstd, dx, dw

    @pytest.mark.parametrize("n", [32769, 65536, 131072, 262144])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_split_rows(self, n: int, dtype: torch.dtype) -> None:
        for m in (1, 9, 300):
            self.check(Case(m, n, dtype=dtype))

    @pytest.mark.parametrize("n", [18432, 65536, 131072])
    def test_split_rows_have_the_same_bits_each_time(self, n: int) -> None:
        case = Case(700, n)
        exact = Exact(case, "cuda")
        first = self.split_results(case, exact)
        for _ in range(20):
            for a, b in zip(first, self.split_results(case, exact), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("widths", [(131072, 262144), (24576, 65536), (65536, 131072)], ids=str)
    def test_split_rows_on_two_streams_at_once(self, widths: tuple[int, int]) -> None:
        cases = [Case(500, widths[0]), Case(301, widths[1])]
        exacts = [Exact(case, "cuda") for case in cases]
        expected = [self.split_results(case, exact) for case, exact in zip(cases, exacts, strict=True)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        found: list[list[tuple[torch.Tensor, ...]]] = [[], []]
        for _ in range(10):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[i].append(self.split_results(cases[i], exacts[i]))
        torch.cuda.synchronize()
        for each, results in zip(expected, found, strict=True):
            for result in results:
                assert all(torch.equal(a, b) for a, b in zip(each, result, strict=True))

    def test_split_rows_survive_the_wrap_around_of_their_tags(self) -> None:
        from meshnorm.kernels.exchange import workspace

        case = Case(300, 262144)
        exact = Exact(case, "cuda")
        expected = self.split_results(case, exact)
        space = workspace(exact.x.device)
        for start in (2**31 - 1, 2**31 - 20, 2**31 - 60):
            space.state[0] = start
            for _ in range(4):
                for a, b in zip(expected, self.split_results(case, exact), strict=True):
                    assert torch.equal(a, b)
            assert 0 < int(space.state[0]) < 2**20 and int(space.state[1]) == 0

    @pytest.mark.parametrize("n", [32769, 65536, 131072])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_wide_row_has_its_multiprocessor_alone(self, n: int, dtype: torch.dtype) -> None:
        """Two programs would share the L1 cache that a row is read from for the second time."""
        x, y = (torch.zeros(1, 4, n, dtype=dtype, device="cuda") for _ in range(2))
        for rstd in (torch.empty(4, device="cuda"), None):
            for weight in (None, torch.ones(n, device="cuda"), torch.ones(n, dtype=dtype, device="cuda")):
                with replay.Recording() as recording:
                    gpu.forward(x, weight, 1e-6, 0.0, "llama", y, rstd)
                (launched,) = recording.launches
                assert launched.ready.metadata.num_warps == 32
                assert launched.ready.n_regs > 32 and launched.ready.n_spills == 0

    def test_a_changed_number_of_rows_compiles_nothing(self) -> None:
        from meshnorm.kernels.triton_backward import backward_kernel, sum_partials_kernel
        from meshnorm.kernels.triton_forward import forward_kernel

        def compiled() -> list[int]:
            jitted = (forward_kernel, backward_kernel, sum_partials_kernel)
            return [sum(len(cache[0]) for cache in each.device_caches.values()) for each in jitted]

        def run(m: int, view: str) -> None:
            case = Case(m, 256, x=view, dy=view)
            x, dy = (rows(view, m, 256, torch.bfloat16, "cuda") for _ in range(2))
            weight = torch.ones(256, dtype=torch.bfloat16, device="cuda")
            _, rstd = self.forward(case, x, weight)
            self.backward(case, dy, x, weight, rstd)

        for view in ("contiguous", "heads"):
            run(6, view)
            run(4098, view)
            before = compiled()
            for m in (12, 48, 16 * 6, 1000 * 6, 4096 * 6):
                run(m, view)
            assert compiled() == before, view
