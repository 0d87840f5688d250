"""What both kernel modules of a gated norm promise, as one class of tests.

The exact results are the formula's in float64; tolerances are those of ``kernel_cases``, with the activation's own
part: its exponential is off by as many roundings of the accumulation dtype as the gate is large.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from kernel_cases import Case, _short, empty, rows
from torch import Tensor

from meshnorm.formula import CASTING_MODES, accumulation_dtype
from meshnorm.formula_gated import (
    Gated,
    activated,
    reference_gated_backward,
    reference_gated_forward,
    reference_gated_rstd,
    rounds_product,
)

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (x, gate)
PAIRS = [(F64, F64), (F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F16, BF16)]
KINDS = [(before, activation) for before in (True, False) for activation in ("silu", "sigmoid")]


@dataclass(frozen=True)
class GatedCase(Case):
    """``n`` columns in groups of ``group``, 0 for one group; ``gate`` names the gate's row view, "" for no gate."""

    gate_dtype: torch.dtype = torch.bfloat16
    gate: str = "contiguous"
    before: bool = True  # the norm before the gate
    activation: str = "silu"
    group: int = 0

    @property
    def how(self) -> Gated:
        return Gated(self.eps, self.offset, self.mode, self.before, self.activation, self.group or self.n)

    def __str__(self) -> str:
        kind = "norm-first" if self.before else "gate-first"
        return f"{super().__str__()}-{kind}-{self.activation}-{_short(self.gate_dtype)}-{self.gate}-of-{self.group}"


class Given:
    """A case's inputs, the exact results, and how far from them a kernel may be."""

    def __init__(self, case: GatedCase, device: str) -> None:
        self.case, self.acc = case, accumulation_dtype(case.dtype)
        self.x = rows(case.x, case.m, case.n, case.dtype, device)
        self.dy = rows(case.dy, case.m, case.n, case.dtype, device)
        self.gate = rows(case.gate, case.m, case.n, case.gate_dtype, device) * 2 if case.gate else None
        if case.gate in ("fused_qkv", "heads", "odd"):  # the product above has strides of its own
            self.gate = rows(case.gate, case.m, case.n, case.gate_dtype, device)
        self.weight = None
        if case.weight is not None:
            self.weight = (torch.randn(case.n, device=device) + 1 - case.offset).to(case.weight)
        self.exact()

    def exact(self) -> None:
        case, how = self.case, self.case.how
        x, dy = (t.reshape(case.m, case.n).double() for t in (self.x, self.dy))
        gate = None if self.gate is None else self.gate.reshape(case.m, case.n).double()
        weight = None if self.weight is None else self.weight.double()
        self.y = reference_gated_forward(x, gate, weight, how)
        self.dx, self.d_gate, self.dw = reference_gated_backward(dy, x, gate, weight, how)
        one = torch.ones_like(x)
        act, slope, size = one, one, 0.0
        if gate is not None:
            sigmoid = torch.sigmoid(gate)
            act, slope = activated(gate, case.activation), sigmoid * torch.sigmoid(-gate)
            slope = sigmoid + gate.abs() * slope if case.activation == "silu" else slope
            size = gate.abs().max().item()
        first, last = (one, act) if case.before else (act, one)
        rstd = reference_gated_rstd(x * first, how)
        self.rstd = rstd[:, :: how.group_size]
        x_hat = (x * first * rstd).abs()
        scale = one if weight is None else (weight.abs() + abs(case.offset)).expand_as(x)
        e = (dy * last).abs()
        groups = (e * scale * x_hat).view(case.m, -1, how.group_size)
        mean = groups.mean(-1, keepdim=True).expand_as(groups).reshape(x.shape)
        dv = (e * scale + x_hat * mean) * rstd
        d_gate = dy.abs() * x_hat * scale if case.before else dv * x.abs()
        self.terms = {
            "y": x_hat * scale * last.abs(),
            "rstd": self.rstd,
            "dX": dv * first.abs(),
            "dGate": d_gate * slope,
            "dW": (e * x_hat).sum(0),
        }
        roundings = {"llama": 2, "gemma": 1, "none": 3}[case.mode]
        if gate is not None and case.before and case.mode == "none":
            roundings += 2
        elif gate is not None and case.before and case.weight is not None:
            roundings += rounds_product(case.mode, case.dtype, case.weight)
        self.roundings = {"y": roundings}
        self.activation_roundings = 3 * (4 + size)

    def check(self, name: str, got: Tensor | None) -> None:
        exact = {"y": self.y, "rstd": self.rstd, "dX": self.dx, "dGate": self.d_gate, "dW": self.dw}[name]
        assert got is not None and exact is not None and got.shape == exact.shape
        info = torch.finfo(got.dtype)
        length = self.case.n * (self.case.m if name == "dW" else 1)
        k = 8 + math.log2(length) + self.activation_roundings
        bound = self.roundings.get(name, 1) * info.eps / 2 * exact.abs()
        bound += k * torch.finfo(self.acc).eps * self.terms[name] + 16 * info.smallest_normal * info.eps
        error = (got.double() - exact).abs()
        wrong = ~(error <= bound)  # NaN, where nothing was written, is wrong too
        worst = (error / bound).nan_to_num(math.inf).max()
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} off, the worst by {worst:.3g} times the tolerance, "
            f"the first at {wrong.nonzero()[0].tolist()}: {self.case}"
        )


class GatedRunner:
    """Runs a case on the subclass's ``kernels`` and ``device``."""

    kernels: ModuleType
    device: str

    def forward(
        self, given: Given, x: Tensor, gate: Tensor | None, with_rstd: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        case, m = given.case, x.shape[0] * x.shape[1]
        y = empty(m, case.n, dtype=case.dtype, device=self.device)
        rstd = empty(m, case.n // case.how.group_size, dtype=given.acc, device=self.device) if with_rstd else None
        self.kernels.forward(x, gate, given.weight, case.how, y, rstd)
        return y, rstd

    def backward(
        self, given: Given, dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, want: str = "dX dGate dW"
    ) -> dict[str, Tensor]:
        """What is wanted and exists, by name."""
        case, m = given.case, x.shape[0] * x.shape[1]
        found = {}
        for name, shape, dtype in (
            ("dX", (m, case.n), case.dtype),
            ("dGate", (m, case.n), None if gate is None else gate.dtype),
            ("dW", (case.n,), case.dw or case.weight),
        ):
            if name in want and dtype is not None:
                found[name] = empty(*shape, dtype=dtype, device=self.device)
        outputs = [found.get(name) for name in ("dX", "dGate", "dW")]
        self.kernels.backward(dy, x, gate, given.weight, rstd, case.how, *outputs)
        return found

    def check(self, case: GatedCase) -> None:
        given = Given(case, self.device)
        y, rstd = self.forward(given, given.x, given.gate)
        assert rstd is not None
        assert torch.equal(self.forward(given, given.x, given.gate, with_rstd=False)[0], y)
        given.check("y", y)
        given.check("rstd", rstd)
        for name, tensor in self.backward(given, given.dy, given.x, given.gate, rstd).items():
            given.check(name, tensor)


class GatedPromises(GatedRunner):
    """``threads`` lists the numbers of threads that no bit may depend on; ``bit_widths`` are (columns, group)."""

    threads: tuple[int, ...] = ()
    bit_widths: tuple[tuple[int, int], ...] = ((1, 0), (17, 0), (102, 34), (128, 64), (1002, 0), (4097, 0))

    # --- correctness -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize(
        ("n", "group"), [(1, 0), (3, 1), (128, 0), (96, 24), (1000, 500), (2048, 1024), (2500, 0), (4097, 0)]
    )
    def test_every_width_group_and_number_of_rows(self, n: int, group: int, kind: tuple[bool, str]) -> None:
        for m in (1, 70) if n < 1000 else (2,):
            self.check(GatedCase(m, n, before=kind[0], activation=kind[1], group=group))

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-by-".join(map(_short, pair)))
    def test_every_dtype_of_x_and_the_gate(self, pair: tuple[torch.dtype, torch.dtype], kind: tuple) -> None:
        case = GatedCase(7, 96, pair[0], pair[0], gate_dtype=pair[1], before=kind[0], activation=kind[1], group=48)
        self.check(case)
        self.check(replace(case, weight=F32, offset=1.0, mode="gemma"))

    @pytest.mark.parametrize("before", [True, False])
    def test_groups_wider_than_one_block(self, before: bool) -> None:
        self.check(GatedCase(2, 9000, before=before))  # in chunks
        self.check(GatedCase(2, 17001, before=before))
        self.check(GatedCase(1, 2 * 9000, F32, F32, gate_dtype=F32, before=before, group=9000))

    @pytest.mark.parametrize("mode", CASTING_MODES)
    @pytest.mark.parametrize("weight", [F32, BF16, None], ids=_short)
    def test_every_casting_mode_and_weight(self, mode: str, weight: torch.dtype | None) -> None:
        for before, activation in KINDS:
            case = GatedCase(7, 96, BF16, weight, mode, before=before, activation=activation, group=32)
            self.check(replace(case, offset=1.0))
            self.check(replace(case, eps=1e-2))

    @pytest.mark.parametrize("mode", CASTING_MODES)
    @pytest.mark.parametrize("weight", [F32, BF16], ids=_short)
    def test_a_casting_mode_rounds_where_the_formula_does(self, mode: str, weight: torch.dtype) -> None:
        """Nearly every bit is the formula's own in this mode, which the other modes miss in one element of ten."""
        for before in (True, False):
            case = GatedCase(7, 1000, BF16, weight, mode, before=before, group=500)
            given = Given(case, self.device)
            y, _ = self.forward(given, given.x, given.gate)
            assert given.gate is not None
            for other in CASTING_MODES:
                how = case.how._replace(casting_mode=other)
                expected = reference_gated_forward(given.x[0], given.gate[0], given.weight, how)
                same = (y == expected).double().mean().item()
                if other == mode:
                    assert same > 0.99, f"{mode}: {same:.2%} equal"
                elif before or weight == F32 or "gemma" in (mode, other):  # else both round alike
                    assert same < 0.95, f"{mode} beside {other}: {same:.2%} equal"

    def test_without_a_gate_it_is_the_norm_in_groups(self) -> None:
        for mode in CASTING_MODES:
            for before in (True, False):
                self.check(GatedCase(7, 96, BF16, F32, mode, gate="", group=24, before=before))

    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize("activation", ["silu", "sigmoid"])
    def test_gates_of_any_size(self, before: bool, activation: str) -> None:
        """Neither an overflow nor a cancellation: tiny and huge gates are as exact as others."""
        for dtype in (BF16, F32):
            case = GatedCase(4, 64, dtype, dtype, before=before, activation=activation, gate_dtype=dtype, mode="gemma")
            given = Given(case, self.device)
            sizes = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 20.0, -20.0, 80.0, -80.0, 1e4, -1e4], device=self.device)
            gate = torch.empty(1, 4, 64, device=self.device).uniform_(-85, -60)
            gate[..., : len(sizes)] = sizes
            given.gate = gate.to(dtype)
            given.exact()
            given.activation_roundings = 3 * 84 if dtype == BF16 else 0  # float32 shows what the exponential is off by
            y, rstd = self.forward(given, given.x, given.gate)
            assert rstd is not None
            found = {"y": y, **self.backward(given, given.dy, given.x, given.gate, rstd)}
            for name, tensor in found.items():
                assert tensor.isfinite().all(), name
                given.check(name, tensor)

    @pytest.mark.parametrize("view", ["fused_qkv", "heads", "odd"])
    @pytest.mark.parametrize("n", [96, 1024])
    def test_strided_rows(self, view: str, n: int) -> None:
        m = 66 if n == 96 else 3
        for before in (True, False):
            case = GatedCase(m, n, BF16, F32, before=before, group=n // 2)
            self.check(replace(case, x=view))
            self.check(replace(case, gate=view, gate_dtype=F32))
            self.check(replace(case, x="heads", gate=view, dy=view))

    # --- what is not wanted ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize(("n", "group"), [(96, 48), (2500, 0), (17001, 0)])
    def test_a_frozen_tensor_costs_nothing_and_changes_nothing(self, n: int, group: int, before: bool) -> None:
        for gate_dtype in (BF16, F32) if n < 10000 else (BF16,):
            given = Given(GatedCase(2, n, BF16, F32, before=before, gate_dtype=gate_dtype, group=group), self.device)
            _, rstd = self.forward(given, given.x, given.gate)
            assert rstd is not None
            inputs = given.dy, given.x, given.gate, rstd
            whole = self.backward(given, *inputs)
            for want in ("dX", "dGate", "dW", "dX dW", "dGate dW", "dX dGate"):
                found = self.backward(given, *inputs, want)
                assert set(found) == set(want.split())
                for name, tensor in found.items():
                    assert torch.equal(tensor, whole[name]), f"{name} of {want}"

    # --- statistics exchanged between the slices of a group --------------------------------------------------------

    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize("parts", [(96,), (33, 63), (5000, 3001)], ids=str)
    def test_slices_of_a_group_that_exchange_their_totals_are_the_group(
        self, parts: tuple[int, ...], before: bool
    ) -> None:
        n = sum(parts)
        case = GatedCase(6, n, BF16, F32, "gemma", 1.0, x="heads", gate="transposed", before=before)
        given, how = Given(case, self.device), case.how
        assert given.weight is not None and given.gate is not None
        y = empty(6, n, dtype=BF16, device=self.device)
        dx, d_gate = (empty(6, n, dtype=BF16, device=self.device) for _ in range(2))
        rstd, dw = empty(6, 1, dtype=F32, device=self.device), empty(n, dtype=F32, device=self.device)
        totals = empty(len(parts), 6, 1, dtype=F32, device=self.device)
        slices, start = [], 0
        for each in parts:
            columns = slice(start, start + each)
            slices.append((columns, how._replace(group_size=each)))
            start += each
        inputs = [[t[..., columns] for t in (given.x, given.gate, given.weight)] for columns, _ in slices]
        for (x, gate, _), total, (_, part) in zip(inputs, totals, slices, strict=True):
            self.kernels.statistic(x, gate, part, total)
        total = totals.sum(0)
        for (x, gate, w), (columns, part) in zip(inputs, slices, strict=True):
            self.kernels.apply(x, gate, w, total, n, part, y[:, columns], rstd)
        given.check("y", y)
        given.check("rstd", rstd)
        for (x, gate, w), each, (columns, part) in zip(inputs, totals, slices, strict=True):
            self.kernels.backward_statistic(given.dy[..., columns], x, gate, w, rstd, part, each)
        total = totals.sum(0)
        for (x, gate, w), (columns, part) in zip(inputs, slices, strict=True):
            outputs = dx[:, columns], d_gate[:, columns], dw[columns]
            self.kernels.backward_apply(given.dy[..., columns], x, gate, w, rstd, total, n, part, *outputs)
        for name, tensor in (("dX", dx), ("dGate", d_gate), ("dW", dw)):
            given.check(name, tensor)

    def test_whole_groups_beside_others_in_wider_tensors(self) -> None:
        """Statistics and outputs of some of a tensor's groups, at strides of their own."""
        case = GatedCase(5, 96, BF16, F32, before=False, group=32)
        given = Given(case, self.device)
        assert given.gate is not None and given.weight is not None
        y, rstd = self.forward(given, given.x, given.gate)
        assert rstd is not None
        again, total, again_rstd = torch.full_like(y, math.nan), torch.empty_like(rstd), torch.empty_like(rstd)
        columns, groups = slice(32, 96), slice(1, 3)
        x, gate = given.x[..., columns], given.gate[..., columns]
        self.kernels.statistic(x, gate, case.how, total[:, groups])
        weight = given.weight[columns]
        outputs = again[:, columns], again_rstd[:, groups]
        self.kernels.apply(x, gate, weight, total[:, groups], 32, case.how, *outputs)
        torch.testing.assert_close(again_rstd[:, groups], rstd[:, groups], rtol=1e-5, atol=0.0)
        torch.testing.assert_close(again[:, columns], y[:, columns], rtol=2**-7, atol=0.0)
        assert again[:, :32].isnan().all()

    # --- bits ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_threads(self, threads: int | None) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def row_results(self, given: Given, x: Tensor, gate: Tensor, dy: Tensor) -> dict[str, Tensor]:
        y, rstd = self.forward(given, x, gate)
        assert rstd is not None
        found = {"y": y, "rstd": rstd, **self.backward(given, dy, x, gate, rstd, "dX dGate")}
        found["statistic"], found["backward_statistic"] = torch.empty_like(rstd), torch.empty_like(rstd)
        self.kernels.statistic(x, gate, given.case.how, found["statistic"])
        self.kernels.backward_statistic(dy, x, gate, given.weight, rstd, given.case.how, found["backward_statistic"])
        return found

    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16)], ids=lambda pair: _short(pair[1]))
    def test_a_row_s_bits_depend_on_nothing_but_the_row(self, dtypes: tuple, before: bool) -> None:
        for n, group in self.bit_widths:
            m = 99 if n < 1000 else 9
            case = GatedCase(m, n, dtypes[0], F32, gate_dtype=dtypes[1], before=before, group=group)
            given = Given(case, self.device)
            assert given.gate is not None
            inputs = given.x, given.gate, given.dy
            with self.on_threads(self.threads[0] if self.threads else None):
                whole = self.row_results(given, *inputs)
            for threads in self.threads or (None,):
                with self.on_threads(threads):
                    for start, stop in ((0, 1), (m - 1, m), (2, 5), (0, m)):
                        for name, some in self.row_results(given, *(t[:, start:stop] for t in inputs)).items():
                            assert torch.equal(some, whole[name][start:stop]), f"{name} of {start}:{stop}, {case}"
                    for which in range(3):  # at odd addresses
                        strided = list(inputs)
                        memory = empty(m, n + 1, dtype=inputs[which].dtype, device=self.device)[:, 1:]
                        strided[which] = memory.unsqueeze(0).copy_(inputs[which])
                        for name, some in self.row_results(given, *strided).items():
                            assert torch.equal(some, whole[name]), f"{name}, input {which} at odd addresses, {case}"

    def test_every_result_is_the_same_each_time(self) -> None:
        for n, group in ((128, 64), (2500, 0), (17001, 0)):
            given = Given(GatedCase(5, n, BF16, F32, gate_dtype=F32, before=False, group=group), self.device)
            results = []
            for _ in range(3):
                y, rstd = self.forward(given, given.x, given.gate)
                assert rstd is not None
                gradients = self.backward(given, given.dy, given.x, given.gate, rstd)
                results.append((y, rstd, *gradients.values()))
            assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
