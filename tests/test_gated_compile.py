"""The gated norm under all that looks at ops: torch.compile, meta tensors, torch.func, checkpointing, autocast."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from meshnorm import GatedRMSNorm, gated_rms_norm
from meshnorm.formula_gated import Gated, reference_gated_forward

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
GROUPED = {"norm_before_gate": False, "group_size": 8}


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))
    torch._dynamo.reset()


def _given(rows: int, x_dtype: torch.dtype, gate_dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """x, gate, weight, dY."""
    shapes = [(rows, 3, 16), (rows, 3, 16), (16,), (rows, 3, 16)]
    dtypes = [x_dtype, gate_dtype, F32, x_dtype]
    return tuple(torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes, strict=True))


def _results(norm: Callable[..., Any], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    y = norm(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, given[3])


def _assert_same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtypes", [(F64, F64), (BF16, BF16), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("options", [{}, {"activation": "sigmoid", "casting_mode": "gemma", "offset": 1.0}, GROUPED])
def test_compiled_it_gives_the_bits_of_eager(dtypes, options: dict) -> None:
    def norm(*tensors: Tensor) -> Tensor:
        return gated_rms_norm(*tensors, **options)

    given = _given(4, *dtypes)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    _assert_same_bits(_results(compiled, given), _results(norm, given))


def test_another_number_of_rows_compiles_nothing() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def grouped(*tensors: Tensor) -> Tensor:
        return gated_rms_norm(*tensors, **GROUPED)

    norm = torch.compile(grouped, fullgraph=True, backend=counter)
    counts = []
    for rows in (5, 8, 13, 2):
        given = _given(rows, BF16, F32)
        _assert_same_bits(_results(norm, given), _results(grouped, given))
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]  # the first change makes the number of rows a symbol


def test_the_module_compiles_with_and_without_a_gate() -> None:
    norm = GatedRMSNorm(16, **GROUPED)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x, gate, *_ = _given(4, BF16, BF16)
    assert torch.equal(compiled(x, gate), norm(x, gate)) and torch.equal(compiled(x), norm(x))


@pytest.mark.parametrize("with_gradients", [True, False])
def test_opcheck_passes_with_gradients(with_gradients: bool) -> None:
    for dtypes, before in (((F32, F32), True), ((BF16, F32), False)):
        x, gate, weight, _ = _given(4, *dtypes)
        inputs = [t.requires_grad_(with_gradients) for t in (x, gate, weight)]
        how = (1e-6, 0.0, "llama", before, "silu", 8, 1)
        torch.library.opcheck(torch.ops.meshnorm.gated_forward.default, (*inputs, *how))


def test_opcheck_passes_for_parts_of_groups() -> None:
    x, gate, weight, dy = _given(4, BF16, F32)
    segments = [0, 4, 0, 4, 4, 16, 1, 6]  # 4 columns of group 0, 6 of groups 1 and 2
    ops = torch.ops.meshnorm
    total = ops.gated_statistic(x, gate, "silu", segments, 3, 1)
    _, rstd = ops.gated_apply(x, gate, weight, total, 8, 1e-6, 0.0, "llama", False, "silu", segments, 1)
    torch.library.opcheck(ops.gated_statistic.default, (x, gate, "silu", segments, 3, 1))
    how = (1e-6, 0.0, "llama", False, "silu", segments, 1)
    torch.library.opcheck(ops.gated_apply.default, (x, gate, weight, total, 8, *how))
    given = dy, x, gate, weight, rstd
    torch.library.opcheck(ops.gated_backward_statistic.default, (*given, 0.0, False, "silu", segments, 1))
    needs = (True, True, F32)
    torch.library.opcheck(ops.gated_backward_apply.default, (*given, total, 8, 0.0, False, "silu", segments, 1, *needs))


def test_meta_tensors_have_the_metadata_of_real_ones() -> None:
    real = _results(gated_rms_norm, _given(4, BF16, F32))
    meta = _results(gated_rms_norm, _given(4, BF16, F32, "meta"))
    for a, b in zip(meta, real, strict=True):
        assert (a.device.type, a.shape, a.dtype, a.stride()) == ("meta", b.shape, b.dtype, b.stride())


def test_checkpointing_gives_the_same_gradients() -> None:
    given = _given(4, BF16, F32)
    again = _results(lambda *t: checkpoint(gated_rms_norm, *t, use_reentrant=False), given)
    _assert_same_bits(again, _results(gated_rms_norm, given))


def test_autocast_changes_nothing() -> None:
    given = _given(4, F32, F32)
    expected = _results(gated_rms_norm, given)
    with torch.autocast("cpu", torch.bfloat16):
        _assert_same_bits(_results(gated_rms_norm, given), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("options", [{}, GROUPED])
def test_under_torch_func_it_is_the_formula(options: dict) -> None:
    x, gate, weight, v = (t.double() for t in _given(4, F64, F64))
    how = Gated(1e-6, 0.0, "llama", options.get("norm_before_gate", True), "silu", options.get("group_size", 16))

    def ours(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, weight, **options)

    def formula(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return reference_gated_forward(x, gate, weight, how)

    def check(transformed: Callable[..., Any]) -> None:
        torch.testing.assert_close(transformed(ours), transformed(formula), rtol=1e-12, atol=1e-12)

    check(lambda norm: torch.func.vmap(norm, in_dims=(0, 0, None))(x, gate, weight))
    check(lambda norm: torch.func.grad(lambda g: (norm(x, g, weight) * v).sum())(gate))
    check(lambda norm: torch.func.jvp(lambda x: norm(x, gate, weight), (x,), (v,))[1])
    check(lambda norm: torch.func.hessian(lambda w: (norm(x, gate, w) * v).sum())(weight))


def test_batched_gradients_are_those_of_each() -> None:
    x, gate, weight, v = (t.double() for t in _given(4, F64, F64))
    leaves = [t.requires_grad_() for t in (x, gate, weight)]
    y = gated_rms_norm(*leaves)
    both = torch.stack([v, 2 * v])
    batched = torch.autograd.grad(y, leaves, both, is_grads_batched=True, retain_graph=True)
    for place in range(2):
        for a, b in zip(batched, torch.autograd.grad(y, leaves, both[place], retain_graph=True), strict=True):
            torch.testing.assert_close(a[place], b, rtol=1e-12, atol=1e-12)
