"""What the tests of the public function on large tensors share: inputs, gradients, and the distance from float64.

The exact result is the formula in float64 on the same inputs, a block of rows at a time, so that 4096 rows of 131072
columns fit beside other tests. The tolerance is the one that ``kernel_cases`` derives: with u = eps/2 of the output's
dtype, e = eps of the accumulation dtype, k = 8 + log2 of the number of terms in a sum::

    y    2 · u · |y|  +  k · e · |x̂·(w + offset)|                  (casting mode "llama": two roundings)
    dX   u · |dX|     +  k · e · (|s| + |x̂| · mean|s·x̂|) · rstd    s = dY · (w + offset)
    dW   u · |dW|     +  k · e · Σ|dY·x̂|
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from meshnorm import rms_norm
from meshnorm.formula import accumulation_dtype, reference_backward, reference_forward, reference_rstd

WIDTHS = (128, 512, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536, 131072)
WIDTHS += (2560, 2880, 3072, 3584, 6144, 7168, 18432, 1000, 4097)
GPU = pytest.mark.gpu
BLOCK = 2**24  # elements in float64 at a time: 128 MiB a tensor


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seed(request: pytest.FixtureRequest) -> None:
    """Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them."""
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def draw(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def inputs(m: int, n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, dY."""
    x, dy = (draw(m, n, dtype=dtype, device=device) for _ in range(2))
    return x, draw(n, dtype=dtype, device=device) + 1, dy


def gradients(
    x: Tensor, weight: Tensor, dy: Tensor, norm: Callable[..., Tensor] = rms_norm, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dX, dW) through autograd."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns holds NaN: what a kernel does not write is seen."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # torch's default
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_right(
    given: tuple[Tensor, Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor],
    eps: float = 1e-6,
    offset: float = 0.0,
) -> None:
    """y, dX and dW of 2-dim tensors are within what rounding explains of the float64 results."""
    (x, weight, dy), (y, dx, dw) = given, found
    (m, n), acc, w = x.shape, torch.finfo(accumulation_dtype(x.dtype)).eps, weight.double()
    assert y.shape == dx.shape == x.shape and dw.shape == weight.shape
    assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, weight.dtype)
    exact_dw, terms_dw = torch.zeros_like(w), torch.zeros_like(w)
    in_row, over_rows = (8 + math.log2(n)) * acc, (8 + math.log2(m * n)) * acc
    for start in range(0, m, max(1, BLOCK // n)):
        part = slice(start, start + max(1, BLOCK // n))
        x64, dy64 = x[part].double(), dy[part].double()
        rstd = reference_rstd(x64, eps)
        x_hat = (x64 * rstd).abs()
        scale = w.abs() + abs(offset)
        _assert_within("y", y[part], reference_forward(x64, w, eps, offset), 2, in_row * x_hat * scale, start)
        dx64, dw64 = reference_backward(dy64, x64, w, eps, offset)
        scaled = dy64.abs() * scale
        terms = (scaled + x_hat * (scaled * x_hat).mean(1, keepdim=True)) * rstd
        _assert_within("dX", dx[part], dx64, 1, in_row * terms, start)
        assert dw64 is not None
        exact_dw += dw64
        terms_dw += (dy64.abs() * x_hat).sum(0)
    _assert_within("dW", dw, exact_dw, 1, over_rows * terms_dw, 0)


def _assert_within(name: str, got: Tensor, exact: Tensor, roundings: int, terms: Tensor, start: int) -> None:
    info = torch.finfo(got.dtype)
    bound = roundings * info.eps / 2 * exact.abs() + terms + 8 * info.smallest_normal * info.eps
    wrong = ~((got.double() - exact).abs() <= bound)  # NaN, where nothing was written, is wrong too
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        worst = ((got.double() - exact).abs() / bound).nan_to_num(math.inf).max().item()
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} off, the worst by {worst:.3g} times the tolerance, the "
            f"first at {[place[0] + start, *place[1:]]}: {got[place].item():.6g}, not {exact[place].item():.6g}"
        )


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
