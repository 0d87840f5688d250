"""The definition of the norm, held to torch's own RMSNorm, to torch's autograd, and to the models it was read from."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from torch import Tensor

from meshnorm.formula import (
    CASTING_MODES,
    accumulation_dtype,
    reference_add_backward,
    reference_add_forward,
    reference_backward,
    reference_forward,
    reference_rstd,
)

EPS64 = torch.finfo(torch.float64).eps
# (x's shape, how many dims are normalized)
SHAPES = [((6, 1), 1), ((7,), 1), ((3, 17), 1), ((2, 3, 5, 64), 1), ((3, 4, 5), 2), ((4, 5), 2), ((2, 3, 4, 5), 3)]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def _double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _hidden_shape(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return shape[len(shape) - ndim :]


def _summing(terms: int) -> float:
    """The relative error of a float64 result that sums so many terms: some roundings, and the sum's own."""
    return (8 + math.sqrt(terms)) * EPS64


@pytest.mark.parametrize(("shape", "ndim"), SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_modes_are_one_function_in_float64(
    shape: tuple[int, ...], ndim: int, weighted: bool, offset: float
) -> None:
    x = _double(*shape)
    weight = _double(*_hidden_shape(shape, ndim)) if weighted else None
    first, *others = [reference_forward(x, weight, 1e-6, offset, mode, ndim) for mode in CASTING_MODES]
    assert len(others) == 2
    assert first.dtype == torch.float64
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("shape", "ndim"), SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_forward_is_that_of_torch(shape: tuple[int, ...], ndim: int, weighted: bool, offset: float) -> None:
    hidden = _hidden_shape(shape, ndim)
    x = _double(*shape)
    weight = _double(*hidden) if weighted else None
    scale = None if weight is None else weight + offset
    expected = torch.nn.functional.rms_norm(x, hidden, scale, 1e-3)
    found = reference_forward(x, weight, 1e-3, offset, "llama", ndim)
    torch.testing.assert_close(found, expected, rtol=_summing(math.prod(hidden)), atol=0.0)


@pytest.mark.parametrize(("shape", "ndim"), SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_backward_is_the_derivative_of_forward(
    shape: tuple[int, ...], ndim: int, weighted: bool, offset: float
) -> None:
    hidden = _hidden_shape(shape, ndim)
    x = _double(*shape).requires_grad_()
    weight = _double(*hidden).requires_grad_() if weighted else None
    dy = _double(*shape)
    y = reference_forward(x, weight, 1e-3, offset, "gemma", ndim)
    inputs = (x,) if weight is None else (x, weight)
    expected = torch.autograd.grad(y, inputs, dy)
    with torch.no_grad():
        dx, dw = reference_backward(dy, x, weight, 1e-3, offset, ndim)
        # dX is a difference: its error is that of the larger of its terms.
        scale = 1.0 if weight is None else (weight.abs() + offset).max()
        largest = (dy.abs().max() * scale * reference_rstd(x, 1e-3, ndim).max()).item()
    terms = math.prod(hidden)
    torch.testing.assert_close(dx, expected[0], rtol=0.0, atol=4 * _summing(terms) * largest * math.sqrt(terms))
    if weight is None:
        assert dw is None
    else:
        assert dw is not None and dw.shape == weight.shape
        rows = math.prod(shape) // terms
        largest = dy.abs().max().item() * math.sqrt(terms)  # |x̂| is at most √H
        torch.testing.assert_close(dw, expected[1], rtol=0.0, atol=4 * _summing(terms) * rows * largest)


def _llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LlamaRMSNorm.forward of Transformers."""
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(x.dtype)


def _gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """GemmaRMSNorm.forward of Transformers."""
    output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def _olmo(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Olmo2RMSNorm.forward of Transformers."""
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return (weight * hidden_states).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("model", "mode", "offset"), [(_llama, "llama", 0.0), (_gemma, "gemma", 1.0), (_olmo, "gemma", 0.0)]
)
def test_a_casting_mode_is_its_model_family_bit_for_bit(dtype, model, mode: str, offset: float) -> None:
    x, weight = torch.randn(64, 96).to(dtype), torch.randn(96).to(dtype)
    expected = model(x, weight, 1e-6)
    assert expected.dtype == dtype
    assert torch.equal(reference_forward(x, weight, 1e-6, offset, mode), expected)
    if dtype != torch.float32:  # so the comparison can tell the modes apart
        other = "gemma" if mode == "llama" else "llama"
        assert not torch.equal(reference_forward(x, weight, 1e-6, offset, other), expected)


def test_none_rounds_the_weight_too() -> None:
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96)
    rounded = reference_forward(x, weight.bfloat16(), 1e-6, 0.0, "llama")
    assert torch.equal(reference_forward(x, weight, 1e-6, 0.0, "none"), rounded)
    assert not torch.equal(reference_forward(x, weight, 1e-6, 0.0, "llama"), rounded)


def test_offset_is_added_in_the_accumulation_dtype() -> None:
    # In bfloat16 0.0039 + 1 is 1, and the weight would be lost.
    x = torch.randn(8, 32).bfloat16()
    weight = torch.full((32,), 2.0**-8, dtype=torch.bfloat16)
    expected = (x.float() * reference_rstd(x, 1e-6) * (1.0 + 2.0**-8)).bfloat16()
    assert torch.equal(reference_forward(x, weight, 1e-6, 1.0, "gemma"), expected)
    assert not torch.equal(reference_forward(x, torch.zeros_like(weight), 1e-6, 1.0, "gemma"), expected)


def test_offset_does_nothing_without_a_weight() -> None:
    x, dy = _double(4, 9), _double(4, 9)
    assert torch.equal(reference_forward(x, None, 1e-6, 3.0), reference_forward(x, None, 1e-6, 0.0))
    assert torch.equal(reference_backward(dy, x, None, 1e-6, 3.0)[0], reference_backward(dy, x, None, 1e-6)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtypes_of_their_tensors(dtype: torch.dtype) -> None:
    x, dy, weight = torch.randn(4, 8).to(dtype), torch.randn(4, 8).to(dtype), torch.randn(8)
    for mode in CASTING_MODES:
        assert reference_forward(x, weight, 1e-6, 0.0, mode).dtype == dtype
    dx, dw = reference_backward(dy, x, weight, 1e-6)
    assert dw is not None
    assert (dx.dtype, dw.dtype) == (dtype, weight.dtype)
    assert reference_rstd(x, 1e-6).dtype == accumulation_dtype(dtype)


def test_statistics_of_half_precision_do_not_overflow() -> None:
    x = torch.full((2, 16), 1000.0, dtype=torch.float16)  # 1000² is beyond float16
    assert torch.equal(reference_forward(x, None, 0.0), torch.ones_like(x))


@pytest.mark.parametrize(("shape", "ndim"), SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_backward_behind_an_addition_is_the_derivative_of_forward(
    shape: tuple[int, ...], ndim: int, weighted: bool
) -> None:
    hidden = _hidden_shape(shape, ndim)
    x, residual = (_double(*shape).requires_grad_() for _ in range(2))
    weight = _double(*hidden).requires_grad_() if weighted else None
    dys = _double(*shape), _double(*shape)
    outputs = reference_add_forward(x, residual, weight, 1e-3, 1.0, "llama", ndim)
    assert torch.equal(outputs[1], x + residual)
    assert torch.equal(outputs[0], reference_forward(x + residual, weight, 1e-3, 1.0, "llama", ndim))
    leaves = (x, residual) if weight is None else (x, residual, weight)
    expected = torch.autograd.grad(outputs, leaves, dys)
    found = reference_add_backward(*dys, outputs[1].detach(), weight, 1e-3, 1.0, ndim)
    for mine, theirs in zip(found, expected, strict=False):
        assert mine is not None
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-12)
    assert (found[2] is None) == (weight is None)


def test_a_sum_is_rounded_to_the_residuals_dtype_and_y_to_xs() -> None:
    x, residual = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    y, residual_out = reference_add_forward(x, residual, None, 1e-6)
    assert (y.dtype, residual_out.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(residual_out, x.float() + residual)
    assert torch.equal(y, reference_forward(residual_out, None, 1e-6).bfloat16())
    y, residual_out = reference_add_forward(residual, x, None, 1e-6)
    assert (y.dtype, residual_out.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(residual_out, (x.float() + residual).bfloat16())
    assert torch.equal(y, reference_forward(residual_out.float(), None, 1e-6))
