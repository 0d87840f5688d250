"""The norm behind an addition under all that looks at ops: torch.compile, meta tensors, torch.func, checkpointing."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from meshnorm import add_rms_norm
from meshnorm.formula import reference_add_forward

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))
    torch._dynamo.reset()


def _given(rows: int, x_dtype: torch.dtype, residual_dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """x, residual, weight, dY, d(residual_out)."""
    shapes = [(rows, 3, 16), (rows, 3, 16), (16,), (rows, 3, 16), (rows, 3, 16)]
    dtypes = [x_dtype, residual_dtype, F32, x_dtype, residual_dtype]
    return tuple(torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes, strict=True))


def _results(norm: Callable[..., Any], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    outputs = norm(*leaves)
    return *(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, given[3:])


def _assert_same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtypes", [(F64, F64), (BF16, BF16), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("options", [{}, {"offset": 1.0, "casting_mode": "gemma"}])
def test_compiled_it_gives_the_bits_of_eager(dtypes, options: dict) -> None:
    def norm(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(*tensors, **options)

    given = _given(4, *dtypes)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    _assert_same_bits(_results(compiled, given), _results(norm, given))


@pytest.mark.parametrize("unused", [0, 1])
def test_compiled_with_an_unused_output_it_gives_the_bits_of_eager(unused: int) -> None:
    x, residual, weight, *grads = _given(4, BF16, F32)

    def gradients(norm: Callable[..., Any]) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        norm(*leaves)[1 - unused].backward(grads[1 - unused])
        return tuple(torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves)

    compiled = torch.compile(lambda *t: add_rms_norm(*t), fullgraph=True, backend="aot_eager")
    _assert_same_bits(gradients(compiled)[:2], gradients(add_rms_norm)[:2])


def test_another_number_of_rows_compiles_nothing() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(add_rms_norm, fullgraph=True, backend=counter)
    counts = []
    for rows in (5, 8, 13, 2):
        given = _given(rows, BF16, F32)
        _assert_same_bits(_results(norm, given), _results(add_rms_norm, given))
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]  # the first change makes the number of rows a symbol


@pytest.mark.parametrize("with_gradients", [True, False])
def test_opcheck_passes_with_gradients(with_gradients: bool) -> None:
    for dtypes in ((F32, F32), (BF16, F32)):
        x, residual, weight, *_ = _given(4, *dtypes)
        inputs = [t.requires_grad_(with_gradients) for t in (x, residual, weight)]
        torch.library.opcheck(torch.ops.meshnorm.add_forward.default, (*inputs, 1e-6, 0.0, "llama", 1))


def test_meta_tensors_have_the_metadata_of_real_ones() -> None:
    real = _results(add_rms_norm, _given(4, BF16, F32))
    meta = _results(add_rms_norm, _given(4, BF16, F32, "meta"))
    for a, b in zip(meta, real, strict=True):
        assert (a.device.type, a.shape, a.dtype, a.stride()) == ("meta", b.shape, b.dtype, b.stride())


def test_checkpointing_gives_the_same_gradients() -> None:
    given = _given(4, BF16, F32)
    again = _results(lambda *t: checkpoint(add_rms_norm, *t, use_reentrant=False), given)
    _assert_same_bits(again, _results(add_rms_norm, given))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("of", [0, 1])
def test_under_torch_func_it_is_the_formula(of: int) -> None:
    x, residual, weight, v, _ = (t.double() for t in _given(4, F64, F64))

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm(x, residual, weight)[of]

    def formula(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return reference_add_forward(x, residual, weight, 1e-6)[of]

    def check(transformed: Callable[..., Any]) -> None:
        torch.testing.assert_close(transformed(ours), transformed(formula), rtol=1e-12, atol=1e-12)

    check(lambda norm: torch.func.vmap(norm, in_dims=(0, 0, None))(x, residual, weight))
    check(lambda norm: torch.func.grad(lambda r: (norm(x, r, weight) * v).sum())(residual))
    check(lambda norm: torch.func.jvp(lambda x: norm(x, residual, weight), (x,), (v,))[1])
    check(lambda norm: torch.func.hessian(lambda w: (norm(x, residual, w) * v).sum())(weight))
