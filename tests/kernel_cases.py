"""What every kernel module promises, as one class of tests: ``test_kernels.py`` and ``test_kernels_triton.py`` run it.

The exact result is the formula in float64 on the same inputs. A result's tolerance is derived, with
u = eps/2 of the output's dtype (one rounding to nearest), e = eps of the accumulation dtype::

    y    roundings · u · |y|  +  k · e · |x̂| · (|w| + |offset|)             roundings: llama 2, gemma 1, none 3
    rstd k · e · rstd
    dX   u · |dX|             +  k · e · (|s| + |x̂| · mean|s·x̂|) · rstd      s = dY · (|w| + |offset|)
    dW   u · |dW|             +  k · e · Σ|dY·x̂|

where k = 8 + log2 of the number of terms in the sums that lead to it: a handful of elementwise steps, and a sum added
up pairwise or in lanes. A sum in one long chain would miss it. Results below a dtype's normal range may be off by its
smallest subnormal.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from meshnorm.formula import CASTING_MODES, accumulation_dtype, reference_backward, reference_forward, reference_rstd

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = {"llama": 2, "gemma": 1, "none": 3}


@dataclass(frozen=True)
class Case:
    """One norm: ``x`` and ``dy`` name row views (see ``rows``), ``weight`` is the weight's dtype or None."""

    m: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    weight: torch.dtype | None = torch.bfloat16
    mode: str = "llama"
    offset: float = 0.0
    eps: float = 1e-6
    x: str = "contiguous"
    dy: str = "contiguous"
    dw: torch.dtype | None = None

    def __str__(self) -> str:
        given = [f"{self.m}x{self.n}", _short(self.dtype), f"w-{_short(self.weight)}", self.mode]
        given += [f"offset{self.offset:g}"] * bool(self.offset) + ["eps0"] * (not self.eps)
        given += [self.x] * (self.x != "contiguous") + [f"dy-{self.dy}"] * (self.dy != "contiguous")
        return "-".join(given + [f"dw-{_short(self.dw)}"] * (self.dw is not None))


def _short(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else str(dtype).removeprefix("torch.").replace("float", "f")


def rows(kind: str, m: int, n: int, dtype: torch.dtype, device: str) -> Tensor:
    """An (A, B, N) row view of m random rows."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)

    b = next((d for d in (3, 2, 5, 7) if m % d == 0), m)
    a = m // b
    match kind:
        case "contiguous":
            return normal(1, m, n)
        case "three_dims":
            return normal(a, b, n)
        case "fused_qkv":  # the middle third of a fused projection
            return normal(1, m, 3 * n)[:, :, n : 2 * n]
        case "heads":  # b of b + 2 heads of each token
            return normal(a, b + 2, n)[:, 1 : 1 + b]
        case "transposed":  # (sequence, batch) seen as (batch, sequence)
            return normal(b, a, n).transpose(0, 1)
        case "expanded":  # each row b times
            return normal(a, 1, n).expand(a, b, n)
        case "one_row":
            return normal(1, 1, n).expand(a, b, n)
        case "odd":  # rows at odd addresses
            return normal(m, n + 1)[:, 1:].unsqueeze(1)
    raise ValueError(kind)


VIEWS = ("three_dims", "fused_qkv", "heads", "transposed", "expanded", "one_row", "odd")


class Exact:
    """A case's inputs, the exact results in float64, and how far from them a kernel may be."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.acc = accumulation_dtype(case.dtype)
        x = rows(case.x, case.m, case.n, case.dtype, device)
        dy = rows(case.dy, case.m, case.n, case.dtype, device)
        weight = None
        if case.weight is not None:
            weight = (torch.randn(case.n, device=device) + 1 - case.offset).to(case.weight)
        self.set(x, dy, weight)

    def set(self, x: Tensor, dy: Tensor, weight: Tensor | None) -> None:
        """Takes these inputs, and computes what is exact for them."""
        case = self.case
        self.x, self.dy, self.weight = x, dy, weight
        x, dy = (t.reshape(case.m, case.n).double() for t in (self.x, self.dy))
        weight = None if weight is None else weight.double()
        self.y = reference_forward(x, weight, case.eps, case.offset)
        self.rstd = reference_rstd(x, case.eps).squeeze(1)
        self.dx, self.dw = reference_backward(dy, x, weight, case.eps, case.offset)
        x_hat = (x * self.rstd[:, None]).abs()
        scale = 1.0 if weight is None else weight.abs() + abs(case.offset)
        self.y_terms = x_hat * scale
        scaled = dy.abs() * scale
        self.dx_terms = (scaled + x_hat * (scaled * x_hat).mean(1, keepdim=True)) * self.rstd[:, None]
        self.dw_terms = (dy.abs() * x_hat).sum(0)

    def check_y(self, y: Tensor) -> None:
        self._check("y", y, self.y, ROUNDINGS[self.case.mode], self.y_terms, self.case.n)

    def check_rstd(self, rstd: Tensor) -> None:
        self._check("rstd", rstd, self.rstd, 1, self.rstd, self.case.n)

    def check_dx(self, dx: Tensor) -> None:
        self._check("dX", dx, self.dx, 1, self.dx_terms, self.case.n)

    def check_dw(self, dw: Tensor) -> None:
        assert self.dw is not None
        self._check("dW", dw, self.dw, 1, self.dw_terms, self.case.n * self.case.m)

    def _check(self, name: str, got: Tensor, exact: Tensor, roundings: int, terms: Tensor, length: int) -> None:
        info = torch.finfo(got.dtype)
        k = 8 + math.log2(length)
        bound = roundings * info.eps / 2 * exact.abs() + k * torch.finfo(self.acc).eps * terms
        scale = 1.0 if self.weight is None else self.weight.abs().max().item() + 1
        bound += roundings * scale * info.smallest_normal * info.eps
        error = (got.double() - exact).abs()
        wrong = ~(error <= bound)  # NaN, where nothing was written, is wrong too
        worst = (error / bound).nan_to_num(math.inf).max()
        assert got.shape == exact.shape
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} off, the worst by {worst:.3g} times the tolerance, "
            f"the first at {wrong.nonzero()[0].tolist()}"
        )


def empty(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """An output, poisoned: what a kernel does not write stays NaN."""
    return torch.full(shape, math.nan, dtype=dtype, device=device)


class KernelRunner:
    """Runs a case on the subclass's ``kernels`` and ``device``."""

    kernels: ModuleType
    device: str

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        """New inputs each run; a failure shows the seed, MESHNORM_SEED repeats it."""
        seed = int(os.environ.get("MESHNORM_SEED") or random.SystemRandom().randrange(2**31))
        print(f"MESHNORM_SEED={seed}")
        torch.manual_seed(seed)

    def forward(self, case: Case, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        m = x.shape[0] * x.shape[1]
        y = empty(m, case.n, dtype=case.dtype, device=self.device)
        rstd = empty(m, dtype=accumulation_dtype(case.dtype), device=self.device)
        assert self.kernels.forward(x, weight, case.eps, case.offset, case.mode, y, rstd) is None
        return y, rstd

    def backward(
        self, case: Case, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, want: str = "dx dw"
    ) -> tuple[Tensor | None, Tensor | None]:
        m = x.shape[0] * x.shape[1]
        dx = empty(m, case.n, dtype=case.dtype, device=self.device) if "dx" in want else None
        dw_dtype = case.dw or case.weight
        dw = empty(case.n, dtype=dw_dtype, device=self.device) if "dw" in want and dw_dtype else None
        assert self.kernels.backward(dy, x, weight, rstd, case.offset, dx, dw) is None
        return dx, dw

    def check(self, case: Case) -> None:
        exact = Exact(case, self.device)
        y, rstd = self.forward(case, exact.x, exact.weight)
        y_alone = torch.empty_like(y)
        self.kernels.forward(exact.x, exact.weight, case.eps, case.offset, case.mode, y_alone, None)
        assert torch.equal(y_alone, y)  # rstd is stored or not
        dx, dw = self.backward(case, exact.dy, exact.x, exact.weight, rstd)
        exact.check_y(y)
        exact.check_rstd(rstd)
        assert dx is not None
        exact.check_dx(dx)
        if dw is not None:
            exact.check_dw(dw)

    def row_results(self, case: Case, x: Tensor, dy: Tensor, weight: Tensor | None) -> dict[str, Tensor]:
        y, rstd = self.forward(case, x, weight)
        dx, _ = self.backward(case, dy, x, weight, rstd)
        assert dx is not None
        total, total_dy = torch.empty_like(rstd), torch.empty_like(rstd)
        self.kernels.statistic(x, total)
        self.kernels.backward_statistic(dy, x, weight, rstd, case.offset, total_dy)
        return {"y": y, "rstd": rstd, "dX": dx, "statistic": total, "backward_statistic": total_dy}

    def assert_same_bits(self, whole, case, x, dy, weight, start: int, stop: int, how: str) -> None:
        for name, some in self.row_results(case, x, dy, weight).items():
            same = torch.equal(some, whole[name][start:stop])
            assert same, f"{name} of rows {start}:{stop} differs at n={case.n}, {case.dtype}, {how}"


class KernelPromises(KernelRunner):
    """``threads`` lists the numbers of threads that no bit may depend on."""

    threads: tuple[int, ...] = ()

    # --- correctness -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("n", [1, 2, 3, 17, 100, 128, 1000, 1024, 4097])
    @pytest.mark.parametrize("dtype", DTYPES, ids=_short)
    def test_every_width_and_number_of_rows(self, n: int, dtype: torch.dtype) -> None:
        for m in (1, 2, 7, 199 if n < 1000 else 23):
            self.check(Case(m, n, dtype, dtype))

    @pytest.mark.parametrize("n", [16384 + 8, 40000 + 1])
    def test_rows_wider_than_one_program_holds(self, n: int) -> None:
        for dtype in (torch.bfloat16, torch.float64):
            self.check(Case(5, n, dtype, dtype))

    @pytest.mark.parametrize("mode", CASTING_MODES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=_short)
    @pytest.mark.parametrize("weight", (*DTYPES, None), ids=_short)
    def test_every_casting_mode_and_weight(self, mode: str, dtype: torch.dtype, weight: torch.dtype | None) -> None:
        self.check(Case(7, 100, dtype, weight, mode, offset=0.0, eps=0.0))
        self.check(Case(7, 100, dtype, weight, mode, offset=1.0))

    @pytest.mark.parametrize("mode", CASTING_MODES)
    def test_a_casting_mode_rounds_where_it_says(self, mode: str) -> None:
        """Nearly every bit is the formula's own in this mode, which the other modes miss in one element of ten or more.
        (The sums' last bits may differ, and tip a rounding in one element of thousands.)"""
        for dtype in (torch.bfloat16, torch.float16):
            case = Case(7, 1000, dtype, torch.float32, mode, offset=1.0)
            exact = Exact(case, self.device)
            y, rstd = self.forward(case, exact.x, exact.weight)
            applied = torch.empty_like(y)
            total = torch.empty_like(rstd)
            self.kernels.statistic(exact.x, total)
            self.kernels.apply(exact.x, exact.weight, total, case.n, case.eps, 1.0, mode, applied, rstd)
            for other in CASTING_MODES:
                formula = reference_forward(exact.x[0], exact.weight, case.eps, 1.0, other)
                for got in (y, applied):
                    same = (got == formula).double().mean().item()
                    assert same > 0.99 if other == mode else same < 0.9, f"{mode} beside {other}: {same:.2%} equal"

    @pytest.mark.parametrize("dw", DTYPES, ids=_short)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=_short)
    def test_dw_is_rounded_once_to_whatever_dtype_it_has(self, dtype: torch.dtype, dw: torch.dtype) -> None:
        for m in (1, 199):  # one program writes dW itself; several leave it to a second kernel
            self.check(Case(m, 100, dtype, torch.bfloat16, dw=dw))

    def test_an_offset_is_added_to_the_weight_exactly(self) -> None:
        """In bfloat16 1 + 2⁻⁸ is 1."""
        case = Case(2, 128, torch.float32, torch.bfloat16, "gemma", offset=1.0)
        exact = Exact(case, self.device)
        exact.weight = torch.full((128,), 2.0**-8, dtype=torch.bfloat16, device=self.device)
        y, _ = self.forward(case, exact.x, exact.weight)
        unscaled, _ = self.forward(replace(case, weight=None), exact.x, None)
        torch.testing.assert_close(y / unscaled, torch.full_like(y, 1 + 2.0**-8), rtol=1e-6, atol=0)

    def test_rows_of_zeros(self) -> None:
        case = Case(7, 100)
        x = torch.zeros(1, 7, 100, dtype=case.dtype, device=self.device)
        y, rstd = self.forward(case, x, None)
        assert torch.equal(y, x[0])
        torch.testing.assert_close(rstd, torch.full_like(rstd, 1e3), rtol=1e-6, atol=0)
        dy = torch.ones_like(x)
        dx, dw = self.backward(replace(case, weight=torch.float32), dy, x, None, rstd)
        assert torch.equal(dx, torch.full_like(y, 1e3)) and torch.equal(dw, torch.zeros_like(dw))

    @pytest.mark.parametrize("n", [100, 128, 1024])
    @pytest.mark.parametrize("view", VIEWS)
    def test_strided_rows(self, view: str, n: int) -> None:
        for m in (1, 6, 198):
            self.check(Case(m, n, x=view))
            self.check(Case(m, n, x=view, dy=VIEWS[(VIEWS.index(view) + 3) % len(VIEWS)]))
            self.check(Case(m, n, dy=view))
        self.check(Case(6, n, torch.float32, torch.float32, x=view, dy="heads"))

    def test_dy_of_another_dtype(self) -> None:
        case = Case(7, 100, torch.bfloat16, torch.float32)
        exact = Exact(case, self.device)
        _, rstd = self.forward(case, exact.x, exact.weight)
        dx, dw = self.backward(case, exact.dy.float(), exact.x, exact.weight, rstd)
        exact.check_dx(dx)
        exact.check_dw(dw)

    # --- frozen tensors, shared memory -----------------------------------------------------------------------------

    @pytest.mark.parametrize("n", [100, 17001])
    def test_a_frozen_tensor_costs_nothing_and_changes_nothing(self, n: int) -> None:
        case = Case(7, n)
        exact = Exact(case, self.device)
        _, rstd = self.forward(case, exact.x, exact.weight)
        given = exact.dy, exact.x, exact.weight, rstd
        dx, dw = self.backward(case, *given)
        only_dx, no_dw = self.backward(case, *given, want="dx")
        no_dx, only_dw = self.backward(case, *given, want="dw")
        assert no_dx is None and no_dw is None and self.backward(case, *given, want="") == (None, None)
        assert torch.equal(only_dx, dx) and torch.equal(only_dw, dw)

    @pytest.mark.parametrize("n", [100, 4097, 17001])
    def test_dx_may_take_dy_s_memory(self, n: int) -> None:
        for start in (0, 1):  # the second at an odd address
            case = Case(7, n, torch.bfloat16, torch.float32)
            exact = Exact(case, self.device)
            _, rstd = self.forward(case, exact.x, exact.weight)
            dx, dw = self.backward(case, exact.dy, exact.x, exact.weight, rstd)
            memory = torch.empty(7 * n + 1, dtype=case.dtype, device=self.device)[start : start + 7 * n].view(7, n)
            memory.copy_(exact.dy[0])
            dw_in_place = empty(n, dtype=torch.float32, device=self.device)
            self.kernels.backward(memory[None], exact.x, exact.weight, rstd, 0.0, memory, dw_in_place)
            assert torch.equal(memory, dx) and torch.equal(dw_in_place, dw)

    # --- statistics exchanged between the slices of a row ----------------------------------------------------------

    @pytest.mark.parametrize("parts", [(100,), (33, 67), (1, 98, 1), (5000, 3001)], ids=str)
    @pytest.mark.parametrize("mode", CASTING_MODES)
    def test_slices_of_a_row_that_exchange_their_totals_are_the_row(self, parts: tuple[int, ...], mode: str) -> None:
        for dtype, offset in ((torch.bfloat16, 1.0), (torch.float64, 0.0)):
            case = Case(6, sum(parts), dtype, torch.float32, mode, offset, x="heads", dy="transposed")
            exact = Exact(case, self.device)
            assert exact.weight is not None
            xs, dys, ws = (t.split(parts, -1) for t in (exact.x, exact.dy, exact.weight))
            ys = [empty(6, n, dtype=dtype, device=self.device) for n in parts]
            totals = empty(len(parts), 6, dtype=exact.acc, device=self.device)
            for x, total in zip(xs, totals, strict=True):
                self.kernels.statistic(x, total)
            total = totals.sum(0)
            for x, w, y in zip(xs, ws, ys, strict=True):
                rstd = empty(6, dtype=exact.acc, device=self.device)
                self.kernels.apply(x, w.contiguous(), total, case.n, case.eps, offset, mode, y, rstd)
                exact.check_rstd(rstd)
            exact.check_y(torch.cat(ys, 1))

            dxs = [empty(6, n, dtype=dtype, device=self.device) for n in parts]
            dws = [empty(n, dtype=torch.float32, device=self.device) for n in parts]
            totals.fill_(math.nan)
            for dy, x, w, total in zip(dys, xs, ws, totals, strict=True):
                self.kernels.backward_statistic(dy, x, w.contiguous(), rstd, offset, total)
            total = totals.sum(0)
            for dy, x, w, dx, dw in zip(dys, xs, ws, dxs, dws, strict=True):
                given = (dy, x, w.contiguous(), rstd, total, case.n, offset)
                self.kernels.backward_apply(*given, dx, dw)
                only_dx, only_dw = torch.empty_like(dx), torch.empty_like(dw)
                self.kernels.backward_apply(*given, only_dx, None)
                self.kernels.backward_apply(*given, None, only_dw)
                assert torch.equal(only_dx, dx) and torch.equal(only_dw, dw)
            exact.check_dx(torch.cat(dxs, 1))
            exact.check_dw(torch.cat(dws))

    def test_slices_without_a_weight(self) -> None:
        case = Case(7, 100, weight=None)
        exact = Exact(case, self.device)
        total, rstd = (empty(7, dtype=torch.float32, device=self.device) for _ in range(2))
        y, dx = (empty(7, 100, dtype=case.dtype, device=self.device) for _ in range(2))
        self.kernels.statistic(exact.x, total)
        self.kernels.apply(exact.x, None, total, 100, case.eps, 1.0, "llama", y, rstd)
        exact.check_y(y)
        self.kernels.backward_statistic(exact.dy, exact.x, None, rstd, 1.0, total)
        self.kernels.backward_apply(exact.dy, exact.x, None, rstd, total, 100, 1.0, dx, None)
        exact.check_dx(dx)

    # --- bits ------------------------------------------------------------------------------------------------------

    bit_widths = (1, 3, 17, 100, 1000, 1002, 4097, 17001)

    def test_a_row_s_bits_depend_on_nothing_but_the_row(self) -> None:
        """Not on the number of rows, the row's place, its alignment and strides, or the number of threads."""
        for n in self.bit_widths:
            for dtype in (torch.bfloat16, torch.float32):
                with self.on_threads(self.threads[0] if self.threads else None):
                    m = 199 if n < 1000 or self.threads else 9
                    case = Case(m, n, dtype, torch.float32)
                    exact = Exact(case, self.device)
                    results = self.row_results(case, exact.x, exact.dy, exact.weight)
                for threads in self.threads or (None,):
                    with self.on_threads(threads):
                        for start, stop in ((0, 1), (m - 1, m), (3, 5), (2, 5), (0, m)):
                            x, dy = exact.x[:, start:stop], exact.dy[:, start:stop]
                            self.assert_same_bits(results, case, x, dy, exact.weight, start, stop, f"{threads} threads")
                        odd = empty(m, n + 1, dtype=dtype, device=self.device)[:, 1:].unsqueeze(0)
                        odd.copy_(exact.x)
                        self.assert_same_bits(results, case, odd, exact.dy, exact.weight, 0, m, "x at odd addresses")
                        odd.copy_(exact.dy)
                        self.assert_same_bits(results, case, exact.x, odd, exact.weight, 0, m, "dY at odd addresses")
                        wide = empty(m, 3 * n, dtype=dtype, device=self.device)[:, :n].unsqueeze(0)
                        wide.copy_(exact.x)
                        self.assert_same_bits(results, case, wide, exact.dy, exact.weight, 0, m, "x as a slice")

    @contextlib.contextmanager
    def on_threads(self, threads: int | None) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def test_every_result_is_the_same_each_time(self) -> None:
        for n in (128, 1000, 17001):
            case = Case(31, n)
            exact = Exact(case, self.device)
            y, rstd = self.forward(case, exact.x, exact.weight)
            dx, dw = self.backward(case, exact.dy, exact.x, exact.weight, rstd)
            for _ in range(2):
                again_y, again_rstd = self.forward(case, exact.x, exact.weight)
                again_dx, again_dw = self.backward(case, exact.dy, exact.x, exact.weight, rstd)
                assert torch.equal(again_y, y) and torch.equal(again_rstd, rstd)
                assert torch.equal(again_dx, dx) and torch.equal(again_dw, dw)
