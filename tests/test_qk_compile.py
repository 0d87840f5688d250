"""The norms of q and k under all that looks at ops: torch.compile, export, meta tensors, torch.func, checkpointing."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from meshnorm import QKRMSNorm, qk_rms_norm
from meshnorm.formula import reference_forward

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))
    torch._dynamo.reset()


def _given(rows: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """q, k, the weights, and a gradient for each output."""
    q, k = (2, rows, 4, 16), (2, rows, 2, 16)
    dtypes = dtype, dtype, F64 if dtype == F64 else F32, dtype, dtype, dtype
    shapes = q, k, (16,), (16,), q, k
    return tuple(torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes, strict=True))


def _results(norm: Callable[..., Any], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in given[:4]]
    ys = norm(*leaves)
    return *(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, given[4:])


def _assert_same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def _fused(rows: int) -> tuple[Tensor, Tensor]:
    """(batch, heads, sequence, head_dim): slices of a fused projection, transposed."""
    fused = torch.randn(2, rows, 8, 16)
    return fused[:, :, :4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)


@pytest.mark.parametrize("dtype", [F64, BF16, F32], ids=str)
@pytest.mark.parametrize("options", [{}, {"casting_mode": "gemma", "offset": 1.0}], ids=str)
def test_compiled_it_gives_the_bits_of_eager(dtype: torch.dtype, options: dict) -> None:
    def norm(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return qk_rms_norm(*tensors, **options)

    given = _given(4, dtype)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    _assert_same_bits(_results(compiled, given), _results(norm, given))


@pytest.mark.parametrize("transposed", [False, True])
def test_another_number_of_rows_compiles_nothing(transposed: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(qk_rms_norm, fullgraph=True, backend=counter)
    counts = []
    for rows in (5, 8, 13, 3):
        given = _given(rows, F32)
        if transposed:
            q, k = _fused(rows)
            given = q, k, *given[2:4], torch.randn_like(q), torch.randn_like(k)
        _assert_same_bits(_results(norm, given), _results(qk_rms_norm, given))
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]  # the first change makes the number of rows a symbol


def test_one_output_alone_compiles() -> None:
    def norm(*tensors: Tensor) -> Tensor:
        return qk_rms_norm(*tensors)[1]

    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    q, k, q_weight, k_weight, _, dy = _given(4, BF16)
    leaves = [t.requires_grad_() for t in (q, k, q_weight, k_weight)]
    grads = [torch.autograd.grad(call(*leaves), leaves, dy, allow_unused=True) for call in (compiled, norm)]
    for a, b in zip(*grads, strict=True):
        assert (a is None or not a.any()) if b is None else torch.equal(a, b)
    assert grads[1][0] is None and grads[1][2] is None


def test_the_module_compiles_and_exports() -> None:
    norm = QKRMSNorm(16)
    q, k, *_ = _given(4, BF16)
    expected = norm(q, k)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(norm, (q, k), dynamic_shapes={name: {1: torch.export.Dim.AUTO} for name in "qk"})
    for call in (compiled, exported.module()):
        assert all(torch.equal(a, b) for a, b in zip(call(q, k), expected, strict=True))
    q, k, *_ = _given(9, BF16)
    assert all(torch.equal(a, b) for a, b in zip(exported.module()(q, k), norm(q, k), strict=True))


@pytest.mark.parametrize("with_gradients", [True, False])
def test_opcheck_passes_with_gradients(with_gradients: bool) -> None:
    q, k, *weights = _given(4, BF16)[:4]
    inputs = [t.requires_grad_(with_gradients) for t in (q, k, *weights)]
    torch.library.opcheck(torch.ops.meshnorm.qk_forward.default, (*inputs, 1e-6, 0.0, "llama", 1, 1))


def test_opcheck_passes_for_the_other_ops() -> None:
    q, k, q_weight, k_weight, dq, dk = _given(4, BF16)
    ops = torch.ops.meshnorm
    totals = ops.qk_statistic(q, k, 1, 1)
    torch.library.opcheck(ops.qk_statistic.default, (q, k, 1, 1))
    applying = (q, k, q_weight, k_weight, totals, 16, 16, 1e-6, 0.0, "llama", 1, 1)
    torch.library.opcheck(ops.qk_apply.default, applying)
    rstds = ops.qk_apply(*applying)[2:]
    given, needs = (dq, dk, q, k, q_weight, k_weight, *rstds), (True, False, F32, None)
    torch.library.opcheck(ops.qk_backward.default, (*given, 0.0, 1, 1, *needs))
    torch.library.opcheck(ops.qk_backward.default, (None, dk, *given[2:], 0.0, 1, 1, False, True, None, F32))
    torch.library.opcheck(ops.qk_backward_statistic.default, (*given, 0.0, 1, 1))
    torch.library.opcheck(ops.qk_backward_apply.default, (*given, totals, 16, 16, 0.0, 1, 1, *needs))


def test_meta_tensors_have_the_metadata_of_real_ones() -> None:
    real, meta = (_results(qk_rms_norm, _given(4, BF16, device)) for device in ("cpu", "meta"))
    for a, b in zip(meta, real, strict=True):
        assert (a.device.type, a.shape, a.dtype, a.stride()) == ("meta", b.shape, b.dtype, b.stride())


def test_checkpointing_gives_the_same_gradients() -> None:
    given = _given(4, BF16)
    again = _results(lambda *t: checkpoint(qk_rms_norm, *t, use_reentrant=False), given)
    _assert_same_bits(again, _results(qk_rms_norm, given))


def test_autocast_changes_nothing() -> None:
    given = _given(4, F32)
    expected = _results(qk_rms_norm, given)
    with torch.autocast("cpu", torch.bfloat16):
        _assert_same_bits(_results(qk_rms_norm, given), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_torch_func_it_is_the_formula() -> None:
    q, k, q_weight, k_weight, dq, dk = _given(4, F64)

    def formula(q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return reference_forward(q, weights[0], 1e-6), reference_forward(k, weights[1], 1e-6)

    def loss(norm: Callable[..., Any], *tensors: Tensor) -> Tensor:
        ys = norm(*tensors)
        return (ys[0] * dq).sum() + (ys[1] * dk).sum()

    def check(transformed: Callable[..., Any]) -> None:
        torch.testing.assert_close(transformed(qk_rms_norm), transformed(formula), rtol=1e-12, atol=1e-12)

    check(lambda norm: torch.func.vmap(norm, in_dims=(0, 0, None, None))(q, k, q_weight, k_weight))
    check(lambda norm: torch.func.grad(lambda k: loss(norm, q, k, q_weight, k_weight))(k))
    check(lambda norm: torch.func.jvp(lambda q: norm(q, k, q_weight, k_weight), (q,), (dq,))[1])


def test_batched_gradients_are_those_of_each() -> None:
    given = _given(4, F64)
    leaves = [t.requires_grad_() for t in given[:4]]
    ys = qk_rms_norm(*leaves)
    both = [torch.stack([dy, 2 * dy]) for dy in given[4:]]
    batched = torch.autograd.grad(ys, leaves, both, is_grads_batched=True, retain_graph=True)
    for place in range(2):
        each = torch.autograd.grad(ys, leaves, [dy[place] for dy in both], retain_graph=True)
        for a, b in zip(batched, each, strict=True):
            torch.testing.assert_close(a[place], b, rtol=1e-12, atol=1e-12)
