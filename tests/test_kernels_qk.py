"""The kernels of two norms at once: Triton's (in its interpreter where there is no GPU), beside those of one norm."""

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import Asked, what_an_h200_is_asked  # noqa: E402
from interpreting import interpreter_does_as_the_hardware  # noqa: E402, F401
from kernel_cases import Case, Exact, empty  # noqa: E402
from torch import Tensor  # noqa: E402

from meshnorm.formula import CASTING_MODES, accumulation_dtype  # noqa: E402
from meshnorm.kernels import cpu, gpu, gpu_qk  # noqa: E402
from meshnorm.kernels.qk import OneByOne  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if CUDA else "cpu"
BF16, F32, F64, F16 = torch.bfloat16, torch.float32, torch.float64, torch.float16


@pytest.fixture(autouse=True)
def seed() -> None:
    """New inputs each run; a failure shows the seed, MESHNORM_SEED repeats it."""
    seed = int(os.environ.get("MESHNORM_SEED") or random.SystemRandom().randrange(2**31))
    print(f"MESHNORM_SEED={seed}")
    torch.manual_seed(seed)


class Ran:
    """What the six functions of ``kernels`` give for two cases, poisoned before."""

    def __init__(self, kernels: Any, exacts: list[Exact], want: tuple[str, ...] = ("dx dw", "dx dw")) -> None:
        self.exacts, cases = exacts, [exact.case for exact in exacts]
        eps, offset, mode = cases[0].eps, cases[0].offset, cases[0].mode
        self.ys, self.applied, self.dxs, self.applied_dxs = (
            [empty(c.m, c.n, dtype=c.dtype, device=DEVICE) for c in cases] for _ in range(4)
        )
        self.rstds, self.totals, self.c = (
            [empty(c.m, dtype=accumulation_dtype(c.dtype), device=DEVICE) for c in cases] for _ in range(3)
        )
        self.dws, self.applied_dws = (
            [None if c.weight is None else empty(c.n, dtype=c.weight, device=DEVICE) for c in cases] for _ in range(2)
        )
        xs, ws, dys = ([getattr(e, name) for e in exacts] for name in ("x", "weight", "dy"))
        sizes = [c.n for c in cases]

        def halves(*columns: list) -> list[tuple]:
            return list(zip(*columns, strict=True))

        def wanted(tensors: list, name: str) -> list:
            return [t if name in w else None for t, w in zip(tensors, want, strict=True)]

        kernels.forward(halves(xs, ws, self.ys, self.rstds), eps, offset, mode)
        kernels.statistic(halves(xs, self.totals))
        rstds = [torch.empty_like(rstd) for rstd in self.rstds]
        kernels.apply(halves(xs, ws, self.totals, sizes, self.applied, rstds), eps, offset, mode)
        given = dys, xs, ws, self.rstds
        dxs, dws = wanted(self.dxs, "dx"), wanted(self.dws, "dw")
        kernels.backward(halves(*given, dxs, dws), offset)
        kernels.backward_statistic(halves(*given, self.c), offset)
        dxs, dws = wanted(self.applied_dxs, "dx"), wanted(self.applied_dws, "dw")
        kernels.backward_apply(halves(*given, self.c, sizes, dxs, dws), offset)

    def tensors(self) -> list[Tensor | None]:
        found: list[Tensor | None] = [*self.ys, *self.applied, *self.rstds, *self.totals, *self.c]
        return [*found, *self.dxs, *self.applied_dxs, *self.dws, *self.applied_dws]

    def check(self) -> None:
        for place, exact in enumerate(self.exacts):
            exact.check_rstd(self.rstds[place])
            for ys, dxs, dws in ((self.ys, self.dxs, self.dws), (self.applied, self.applied_dxs, self.applied_dws)):
                exact.check_y(ys[place])
                exact.check_dx(dxs[place])
                if dws[place] is not None:
                    exact.check_dw(dws[place])


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit; NaN is what nothing was written to."""
    return a is b if a is None or b is None else torch.equal(a.nan_to_num(math.e), b.nan_to_num(math.e))


def check(q: Case, k: Case, **options: Any) -> None:
    """Right, and bit for bit what each alone gives."""
    exacts = [Exact(case, DEVICE) for case in (q, k)]
    both, alone = Ran(gpu_qk, exacts, **options), Ran(OneByOne(gpu), exacts, **options)
    if not options:
        both.check()
    for place, (a, b) in enumerate(zip(both.tensors(), alone.tensors(), strict=True)):
        assert same(a, b), place


# Widths that share launches; the others take their own.
SHARED = [(64, 64), (100, 100), (128, 128), (600, 1000)]


@pytest.mark.parametrize("n", [*SHARED, (128, 64), (1000, 128)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_both_are_right_and_have_the_bits_of_each_alone(n: tuple[int, int], dtype: torch.dtype) -> None:
    many = (66, 21) if max(n) < 600 else (7, 5)
    for rows, weights in ((many, (dtype, F32)), ((1, 9), (None, dtype)), ((7, 2), (None, None))):
        q, k = (Case(m, width, dtype, w) for m, width, w in zip(rows, n, weights, strict=True))
        check(q, k)


@pytest.mark.parametrize("mode", CASTING_MODES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_every_casting_mode_and_offset(mode: str, offset: float) -> None:
    for n, rows in ((64, (30, 12)), (600, (5, 3))):
        check(*(Case(m, n, BF16, F32, mode, offset) for m in rows))


@pytest.mark.parametrize("views", list(itertools.permutations(("contiguous", "fused_qkv", "heads", "odd"), 2)), ids=str)
def test_strided_rows(views: tuple[str, str]) -> None:
    for n, rows in ((64, (30, 12)), (600, (6, 4))):
        check(Case(rows[0], n, x=views[0], dy=views[1]), Case(rows[1], n, x=views[1], dy="transposed"))


@pytest.mark.parametrize("want", list(itertools.product(("dx dw", "dx", "dw"), repeat=2)), ids=str)
def test_what_is_frozen_is_not_written(want: tuple[str, str]) -> None:
    for n, rows in ((64, (40, 13)), (1000, (6, 3))):
        check(*(Case(m, n) for m in rows), want=want)


def test_one_half_alone() -> None:
    exact = Exact(Case(20, 64), DEVICE)
    ran = Ran(gpu_qk, [exact], ("dx dw",))
    ran.check()


def test_on_a_cpu_each_is_the_norm_alone() -> None:
    if CUDA:
        pytest.skip("the plain torch kernels: test_qk_plain.py runs them on a CPU")
    exacts = [Exact(Case(20, 64), DEVICE), Exact(Case(6, 100), DEVICE)]
    Ran(OneByOne(cpu), exacts).check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n",
    [
        *((16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (192, 192), (256, 256), (512, 512), (1024, 1024)),
        *(
            (2048, 2048),
            (4096, 4096),
            (6144, 4096),
            (8192, 8192),
            (5120, 1024),
            (6144, 1024),
            (2880, 2880),
            (16384, 16384),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_kind_of_kernel_on_a_gpu(n: tuple[int, int], dtype: torch.dtype) -> None:
    """What only a compiler does: two halves of one launch sum in the order of each alone."""
    for rows in ((1, 1), (300, 75), (40990, 4099), (64, 20000)):
        if max(rows) * max(n) > 2**27:
            rows = (rows[0] // 8 + 1, rows[1] // 8 + 1)
        check(*(Case(m, width, dtype, dtype) for m, width in zip(rows, n, strict=True)))
    for views in (("heads", "odd"), ("fused_qkv", "heads")):
        check(*(Case(300, w, dtype, F32, x=view, dy=view) for w, view in zip(n, views, strict=True)))


# --- what is launched ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return what_an_h200_is_asked(monkeypatch)


def _launched(asked: list[Asked], q: tuple[int, int], k: tuple[int, int], dtype: torch.dtype = BF16) -> dict[str, list]:
    """The kernels that each of the six functions launches for (rows, columns) of q and of k."""
    xs = [torch.empty(1, 1, 1, dtype=dtype).expand(1, *shape) for shape in (q, k)]  # never touched
    ys, ws = [torch.empty(1, 1, dtype=dtype).expand(*shape) for shape in (q, k)], [torch.empty(s[1]) for s in (q, k)]
    rs, sizes = [torch.empty(s[0]) for s in (q, k)], [q[1], k[1]]
    calls = {
        "forward": lambda: gpu_qk.forward(list(zip(xs, ws, ys, rs, strict=True)), 1e-6, 0.0, "llama"),
        "statistic": lambda: gpu_qk.statistic(list(zip(xs, rs, strict=True))),
        "apply": lambda: gpu_qk.apply(list(zip(xs, ws, rs, sizes, ys, rs, strict=True)), 1e-6, 0.0, "llama"),
        "backward": lambda: gpu_qk.backward(list(zip(xs, xs, ws, rs, ys, ws, strict=True)), 0.0),
        "backward_statistic": lambda: gpu_qk.backward_statistic(list(zip(xs, xs, ws, rs, rs, strict=True)), 0.0),
        "backward_apply": lambda: gpu_qk.backward_apply(list(zip(xs, xs, ws, rs, rs, sizes, ys, ws, strict=True)), 0.0),
    }
    found = {}
    for name, call in calls.items():
        asked.clear()
        call()
        found[name] = list(asked)
    return found


@pytest.mark.parametrize("width", [64, 128, 256, 1024, 2048, 4096, 8192])
def test_each_pass_is_one_launch_beside_that_of_dw(asked: list[Asked], width: int) -> None:
    n = width, width
    found = _launched(asked, (200000, n[0]), (50000, n[1]))
    names = {name: [launched.kernel for launched in each] for name, each in found.items()}
    assert names == {
        "forward": ["qk_forward_kernel" if n[0] <= 512 else "qk_forward_wide_kernel"],
        "statistic": ["qk_statistic_kernel"],
        "apply": ["qk_apply_kernel"],
        "backward": ["qk_backward_kernel", "qk_sum_partials_kernel"],
        "backward_statistic": ["qk_backward_statistic_kernel"],
        "backward_apply": ["qk_backward_apply_kernel", "qk_sum_partials_kernel"],
    }
    # Each half on the programs that it would have alone.
    first, last = found["backward"]
    partials = last.arguments["QPARTIAL"].shape[0], last.arguments["KPARTIAL"].shape[0]
    assert first.arguments["q_programs"] == partials[0] and first.grid == (sum(partials),)
    asked.clear()
    x, y = torch.empty(1, 1, 1, dtype=BF16).expand(1, 200000, n[0]), torch.empty(1, 1, dtype=BF16).expand(200000, n[0])
    gpu.backward(x, x, torch.empty(n[0]), torch.empty(200000), 0.0, y, torch.empty(n[0]))
    assert asked[0].grid[0] == partials[0]


@pytest.mark.parametrize("n", [(5120, 1024), (6144, 1024), (768, 128), (100, 128), (2880, 2880)])
def test_what_one_launch_would_sum_in_another_order_takes_two(asked: list[Asked], n: tuple[int, int]) -> None:
    found = _launched(asked, (1000, n[0]), (1000, n[1]))
    assert not [launched.kernel for launched in found["backward"] if launched.kernel.startswith("qk_b")]
    assert len(found["forward"]) == (2 if n[0] != n[1] else 1)


def test_a_frozen_weight_launches_no_sum(asked: list[Asked]) -> None:
    x, y = torch.empty(1, 1, 1, dtype=BF16).expand(1, 9000, 64), torch.empty(1, 1, dtype=BF16).expand(9000, 64)
    w, rstd = torch.empty(64), torch.empty(9000)
    one, both = ["sum_partials_kernel"], ["qk_sum_partials_kernel"]
    for dws, kernels in (((None, None), []), ((w, None), one), ((w, w), both)):
        asked.clear()
        gpu_qk.backward([(x, x, w, rstd, y, dw) for dw in dws], 0.0)
        assert [launched.kernel for launched in asked] == ["qk_backward_kernel", *kernels]
        assert asked[0].arguments["KPARTIAL"] is None or dws[1] is not None
