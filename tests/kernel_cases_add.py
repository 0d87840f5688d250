"""What every kernel module promises of a norm of x + residual, as one class of tests.

The exact result is the formula in float64 on the residual_out that the kernel stored, which is checked to the bit;
tolerances are those of ``kernel_cases``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import Case, Exact, _short, empty, rows
from torch import Tensor

from meshnorm.formula import CASTING_MODES, accumulation_dtype, reference_forward

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (x, residual)
PAIRS = [(F64, F64), (F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32), (F32, BF16), (BF16, F16)]


@dataclass(frozen=True)
class AddCase(Case):
    """``dtype`` is x's, and y's; ``residual`` names the residual's row view."""

    residual_dtype: torch.dtype = torch.bfloat16
    residual: str = "contiguous"

    def __str__(self) -> str:
        return f"{super().__str__()}-onto-{_short(self.residual_dtype)}-{self.residual}"


class Given:
    """A case's inputs, and what the exact results are held to."""

    def __init__(self, case: AddCase, device: str) -> None:
        self.case, self.acc = case, accumulation_dtype(case.dtype)
        self.x = rows(case.x, case.m, case.n, case.dtype, device)
        self.residual = rows(case.residual, case.m, case.n, case.residual_dtype, device)
        self.dy = rows(case.dy, case.m, case.n, case.dtype, device)
        self.d_out = torch.randn(case.m, case.n, device=device).to(case.residual_dtype)
        self.weight = None
        if case.weight is not None:
            self.weight = (torch.randn(case.n, device=device) + 1 - case.offset).to(case.weight)
        x, residual = (t.reshape(case.m, case.n).to(self.acc) for t in (self.x, self.residual))
        self.residual_out = (x + residual).to(case.residual_dtype)

    def exact(self) -> Exact:
        """Of the norm of residual_out; d(residual_out) added to the exact dX."""
        exact = Exact.__new__(Exact)
        exact.case, exact.acc = self.case, self.acc
        exact.set(self.residual_out[None], self.dy, self.weight)
        exact.dx = exact.dx + self.d_out.double()
        exact.dx_terms = exact.dx_terms + self.d_out.double().abs()
        return exact


class AddRunner:
    """Runs a case on the subclass's ``kernels`` and ``device``."""

    kernels: ModuleType
    device: str

    def forward(self, given: Given, x: Tensor, residual: Tensor, with_rstd: bool = True) -> tuple[Any, ...]:
        """(y, residual_out, rstd)."""
        case, m = given.case, x.shape[0] * x.shape[1]
        y = empty(m, case.n, dtype=case.dtype, device=self.device)
        out = empty(m, case.n, dtype=case.residual_dtype, device=self.device)
        rstd = empty(m, dtype=given.acc, device=self.device) if with_rstd else None
        self.kernels.forward(x, given.weight, case.eps, case.offset, case.mode, y, rstd, residual, out)
        return y, out, rstd

    def backward(
        self, given: Given, dy: Tensor, out: Tensor, rstd: Tensor, d_out: Tensor | None, want: str = "dx dr dw"
    ) -> tuple[Tensor | None, ...]:
        """(dX of x's dtype, dResidual, dW), None for what is not wanted."""
        case, m = given.case, out.shape[0]
        dx, dr = (
            empty(m, case.n, dtype=dtype, device=self.device) if name in want else None
            for name, dtype in (("dx", case.dtype), ("dr", case.residual_dtype))
        )
        dw = empty(case.n, dtype=case.weight, device=self.device) if "dw" in want and case.weight else None
        first, second = (dr, None) if dx is None else (dx, dr)
        self.kernels.backward(dy, out[None], given.weight, rstd, case.offset, first, dw, d_out, second)
        return dx, dr, dw

    def check(self, case: AddCase) -> None:
        given = Given(case, self.device)
        y, out, rstd = self.forward(given, given.x, given.residual)
        again = self.forward(given, given.x, given.residual, with_rstd=False)
        assert torch.equal(out, given.residual_out) and torch.equal(again[0], y) and torch.equal(again[1], out)
        exact = given.exact()
        exact.check_y(y)
        exact.check_rstd(rstd)
        for d_out in (given.d_out, None):
            dx, dr, dw = self.backward(given, given.dy, out, rstd, d_out)
            if d_out is None:
                exact.dx = exact.dx - given.d_out.double()
            assert dx is not None and dr is not None
            exact.check_dx(dx)
            exact.check_dx(dr)
            if dw is not None:
                exact.check_dw(dw)


class AddPromises(AddRunner):
    """``threads`` lists the numbers of threads that no bit may depend on."""

    threads: tuple[int, ...] = ()
    bit_widths: tuple[int, ...] = (1, 3, 17, 100, 1002, 4097)

    # --- correctness -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("n", "dtypes"),
        [(n, pair) for n in (1, 3, 128, 1000, 4097) for pair in PAIRS[2:5:2]] + [(100, pair) for pair in PAIRS],
        ids=lambda value: str(value) if isinstance(value, int) else "-onto-".join(map(_short, value)),
    )
    def test_every_width_and_number_of_rows(self, n: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        for m in (1, 199) if n < 1000 else (2,):
            self.check(AddCase(m, n, dtypes[0], dtypes[0], residual_dtype=dtypes[1]))

    def test_rows_wider_than_one_program_holds(self) -> None:
        self.check(AddCase(2, 40000 + 1, BF16, F32, residual_dtype=F32))

    @pytest.mark.parametrize("mode", CASTING_MODES)
    @pytest.mark.parametrize("weight", [F32, BF16, None], ids=_short)
    def test_every_casting_mode_and_weight(self, mode: str, weight: torch.dtype | None) -> None:
        for residual_dtype in (BF16, F32):
            self.check(AddCase(7, 100, BF16, weight, mode, eps=0.0, residual_dtype=residual_dtype))
            self.check(AddCase(7, 100, BF16, weight, mode, offset=1.0, residual_dtype=residual_dtype))

    @pytest.mark.parametrize("mode", CASTING_MODES)
    def test_a_casting_mode_rounds_to_x_s_dtype(self, mode: str) -> None:
        """Nearly every bit is the formula's own in this mode, which the other modes miss in one element of ten."""
        case = AddCase(7, 1000, BF16, F32, mode, offset=1.0, residual_dtype=F32)
        given = Given(case, self.device)
        y, out, _ = self.forward(given, given.x, given.residual)
        for other in CASTING_MODES:
            same = (y == reference_forward(out, given.weight, case.eps, 1.0, other, dtype=BF16)).double().mean().item()
            assert same > 0.99 if other == mode else same < 0.9, f"{mode} beside {other}: {same:.2%} equal"

    @pytest.mark.parametrize("view", ["fused_qkv", "heads", "odd"])
    @pytest.mark.parametrize("n", [100, 1024])
    def test_strided_rows(self, view: str, n: int) -> None:
        m = 198 if n == 100 else 3
        self.check(AddCase(m, n, BF16, F32, x=view, residual_dtype=F32))
        self.check(AddCase(m, n, BF16, F32, residual=view, dy="heads", residual_dtype=F32))
        self.check(AddCase(m, n, BF16, F32, x="heads", residual=view, dy=view))

    # --- what is not wanted ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("n", [100, 4097])
    def test_a_frozen_tensor_costs_nothing_and_changes_nothing(self, n: int) -> None:
        for residual_dtype in (BF16, F32):
            given = Given(AddCase(7, n, BF16, F32, residual_dtype=residual_dtype), self.device)
            _, out, rstd = self.forward(given, given.x, given.residual)
            whole = self.backward(given, given.dy, out, rstd, given.d_out)
            for want in ("dx", "dr", "dw", "dx dw", "dr dw", "dx dr"):
                found = self.backward(given, given.dy, out, rstd, given.d_out if want != "dw" else None, want)
                for name, expected, tensor in zip(("dx", "dr", "dw"), whole, found, strict=True):
                    assert (tensor is None) == (name not in want)
                    if tensor is not None and (residual_dtype == BF16 or self.device == "cpu" or name == "dw"):
                        assert torch.equal(tensor, expected), f"{name} of {want}"
                    elif tensor is not None:
                        # A compiled row sum's order follows from the widest access to a tile: where rows of two dtypes
                        # are written or only the one of them, it may differ.
                        given.exact().check_dx(tensor)

    # --- statistics exchanged between the slices of a row ----------------------------------------------------------

    @pytest.mark.parametrize("parts", [(100,), (33, 67), (5000, 3001)], ids=str)
    @pytest.mark.parametrize("residual_dtype", [BF16, F32], ids=_short)
    def test_slices_of_a_row_that_exchange_their_totals_are_the_row(
        self, parts: tuple[int, ...], residual_dtype: torch.dtype
    ) -> None:
        case = AddCase(6, sum(parts), BF16, F32, "gemma", 1.0, x="heads", residual="transposed")
        case = AddCase(**{**case.__dict__, "residual_dtype": residual_dtype})
        given = Given(case, self.device)
        assert given.weight is not None
        xs, rs, dys, ws = (t.split(parts, -1) for t in (given.x, given.residual, given.dy, given.weight))
        d_outs = given.d_out.split(parts, -1)
        outs = [empty(6, n, dtype=residual_dtype, device=self.device) for n in parts]
        totals = empty(len(parts), 6, dtype=F32, device=self.device)
        for x, r, total, out in zip(xs, rs, totals, outs, strict=True):
            self.kernels.statistic(x, total, r, out)
        assert torch.equal(torch.cat(outs, 1), given.residual_out)
        total, exact = totals.sum(0), given.exact()
        ys = [empty(6, n, dtype=BF16, device=self.device) for n in parts]
        rstd = empty(6, dtype=F32, device=self.device)
        for out, w, y in zip(outs, ws, ys, strict=True):
            self.kernels.apply(out[None], w.contiguous(), total, case.n, case.eps, 1.0, "gemma", y, rstd)
        exact.check_rstd(rstd)
        exact.check_y(torch.cat(ys, 1))

        for dy, out, w, each in zip(dys, outs, ws, totals, strict=True):
            self.kernels.backward_statistic(dy, out[None], w.contiguous(), rstd, 1.0, each)
        total, found = totals.sum(0), []
        for dy, out, w, d_out in zip(dys, outs, ws, d_outs, strict=True):
            dx, dr = (empty(*out.shape, dtype=dtype, device=self.device) for dtype in (BF16, residual_dtype))
            dw = empty(out.shape[1], dtype=F32, device=self.device)
            fixed = (dy, out[None], w.contiguous(), rstd, total, case.n, 1.0)
            self.kernels.backward_apply(*fixed, dx, dw, d_out.contiguous(), dr)
            alone = torch.empty_like(dr)
            self.kernels.backward_apply(*fixed, alone, None, d_out.contiguous())
            assert torch.equal(alone, dr)
            found.append((dx, dr, dw))
        dxs, drs, dws = zip(*found, strict=True)
        exact.check_dx(torch.cat(dxs, 1))
        exact.check_dx(torch.cat(drs, 1))
        exact.check_dw(torch.cat(dws))

    # --- bits ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_threads(self, threads: int | None) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def row_results(self, given: Given, x: Tensor, residual: Tensor, dy: Tensor, d_out: Tensor) -> dict[str, Tensor]:
        y, out, rstd = self.forward(given, x, residual)
        dx, dr, _ = self.backward(given, dy, out, rstd, d_out)
        total, again = torch.empty_like(rstd), torch.empty_like(out)
        self.kernels.statistic(x, total, residual, again)
        assert torch.equal(again, out) and dx is not None and dr is not None
        return {"y": y, "residual_out": out, "rstd": rstd, "dX": dx, "dResidual": dr, "statistic": total}

    @pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16)], ids=lambda pair: _short(pair[1]))
    def test_a_row_s_bits_depend_on_nothing_but_the_row(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        for n in self.bit_widths:
            m = 199 if n < 1000 else 9 if self.device == "cpu" else 600
            given = Given(AddCase(m, n, dtypes[0], F32, residual_dtype=dtypes[1]), self.device)
            inputs = given.x, given.residual, given.dy
            with self.on_threads(self.threads[0] if self.threads else None):
                whole = self.row_results(given, *inputs, given.d_out)
            for threads in self.threads or (None,):
                with self.on_threads(threads):
                    for start, stop in ((0, 1), (m - 1, m), (2, 5), (0, m)):
                        part = [t[:, start:stop] for t in inputs]
                        found = self.row_results(given, *part, given.d_out[start:stop])
                        for name, some in found.items():
                            assert torch.equal(some, whole[name][start:stop]), f"{name} of {start}:{stop}, n={n}"
                    for which in range(3):  # at odd addresses
                        strided = list(inputs)
                        memory = empty(m, n + 1, dtype=inputs[which].dtype, device=self.device)[:, 1:]
                        strided[which] = memory.unsqueeze(0).copy_(inputs[which])
                        for name, some in self.row_results(given, *strided, given.d_out).items():
                            assert torch.equal(some, whole[name]), f"{name} with input {which} at odd addresses, n={n}"

    def test_y_is_the_norm_of_residual_out_bit_for_bit(self) -> None:
        for n in self.bit_widths:
            for dtype in (BF16, F32):
                given = Given(AddCase(9, n, dtype, F32, residual_dtype=dtype), self.device)
                y, out, rstd = self.forward(given, given.x, given.residual)
                plain, plain_rstd = torch.empty_like(y), torch.empty_like(rstd)
                self.kernels.forward(out[None], given.weight, 1e-6, 0.0, "llama", plain, plain_rstd)
                assert torch.equal(plain, y) and torch.equal(plain_rstd, rstd), f"n={n}, {dtype}"

    def test_every_result_is_the_same_each_time(self) -> None:
        for n in (128, 1000, 17001):
            given = Given(AddCase(5, n, BF16, F32, residual_dtype=F32), self.device)
            y, out, rstd = self.forward(given, given.x, given.residual)
            first = (y, out, rstd, *self.backward(given, given.dy, out, rstd, given.d_out))
            for _ in range(2):
                again = self.forward(given, given.x, given.residual)
                found = (*again, *self.backward(given, given.dy, out, rstd, given.d_out))
                assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
