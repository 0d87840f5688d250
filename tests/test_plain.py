"""The norm of plain tensors: right to rounding, careful with its arguments' memory, and bitwise repeatable."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshnorm import rms_norm
from meshnorm.errors import DoubleBackwardError
from meshnorm.formula import accumulation_dtype, reference_backward, reference_forward, reference_rstd

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ("llama", "gemma", "none")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (x, weight)
DTYPES = [
    (F64, None),
    (F64, F64),
    (F64, F32),
    (F32, None),
    (F32, F32),
    (F32, F64),
    (F32, BF16),
    (BF16, None),
    (BF16, BF16),
    (BF16, F32),
    (F16, None),
    (F16, F16),
    (F16, F32),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def _draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=F64).to(device, dtype)


def _gradients(x: Tensor, weight: Tensor | None, dy: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, dX, dW) of leaves with the strides of x and weight."""
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    y = rms_norm(x, weight, **options)
    dx, dw = torch.autograd.grad(y, (x, weight), dy) if weight is not None else (*torch.autograd.grad(y, x, dy), None)
    return y.detach(), dx, dw


def _equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> bool:
    """Bit for bit, but for the sign of a zero."""
    pairs = zip(found, expected, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


def _assert_correct(
    x: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    ndim: int = 1,
) -> None:
    """y, dX and dW within what rounding explains of the float64 result.

    y: one rounding to x's dtype for each cast of the mode. dX: one rounding, and the accumulation dtype's of the two
    terms whose difference it is. dW: one rounding, and that of a sum of M terms. A sum of n terms is off by about √n
    ulp of the sum of their magnitudes.
    """
    shape = x.shape[x.ndim - ndim :]
    y, dx, dw = _gradients(
        x, weight, dy, eps=eps, offset=offset, casting_mode=casting_mode, normalized_shape=tuple(shape)
    )
    assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
    assert (dx.dtype, dx.shape) == (x.dtype, x.shape)

    x64, dy64, w64 = x.double(), dy.double(), None if weight is None else weight.double()
    y64 = reference_forward(x64, w64, eps, offset, "gemma", ndim)
    dx64, dw64 = reference_backward(dy64, x64, w64, eps, offset, ndim)
    info, acc = torch.finfo(x.dtype), torch.finfo(accumulation_dtype(x.dtype)).eps
    columns = math.prod(shape)
    rows = x.numel() // columns
    ulp, subnormal = 0.51 * info.eps, info.smallest_normal * info.eps
    in_row, over_rows = (8 + math.sqrt(columns)) * acc, (8 + math.sqrt(rows)) * acc
    rstd = reference_rstd(x64, eps, ndim)
    x_hat = (x64 * rstd).abs()
    scale = torch.ones_like(x64[(0,) * (x.ndim - ndim)]) if w64 is None else w64.abs() + abs(offset)
    roundings = {"gemma": 1, "llama": 2, "none": 3}[casting_mode]
    bound = roundings * ulp * y64.abs() + in_row * x_hat * scale + 2 * subnormal * (1 + scale)
    _assert_within(y, y64, bound)

    terms = dy64.abs() * scale
    mean = (terms * x_hat).mean(tuple(range(x.ndim - ndim, x.ndim)), keepdim=True)
    _assert_within(dx, dx64, ulp * dx64.abs() + 4 * in_row * (terms + x_hat * mean) * rstd + 2 * subnormal)

    assert (dw is None) == (weight is None)
    if dw is not None and dw64 is not None and weight is not None:
        assert (dw.dtype, dw.shape) == (weight.dtype, weight.shape)
        info = torch.finfo(weight.dtype)
        total = (dy64.abs() * x_hat).sum(tuple(range(x.ndim - ndim))) if x.ndim > ndim else dy64.abs() * x_hat
        bound = 0.51 * info.eps * dw64.abs() + (in_row + over_rows) * total + info.smallest_normal * info.eps
        _assert_within(dw, dw64, bound)


def _assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max().item():.3g} times what rounding explains"


# --- right ---


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_every_dtype_mode_and_weight_is_right_to_rounding(device, dtype, weight_dtype, mode, offset) -> None:
    x, dy = _draw(5, 7, 33, dtype=dtype, device=device), _draw(5, 7, 33, dtype=dtype, device=device)
    weight = None if weight_dtype is None else _draw(33, dtype=weight_dtype, device=device)
    _assert_correct(x, weight, dy, offset=offset, casting_mode=mode)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("hidden", [1, 2, 3, 17, 1000, 4097])
@pytest.mark.parametrize("rows", [(), (1,), (6,), (2, 1, 3, 1, 2), (301,)])
def test_every_shape_is_right_to_rounding(device, dtype, hidden: int, rows: tuple[int, ...]) -> None:
    x, dy = _draw(*rows, hidden, dtype=dtype, device=device), _draw(*rows, hidden, dtype=dtype, device=device)
    _assert_correct(x, _draw(hidden, dtype=dtype, device=device), dy, offset=1.0, casting_mode="gemma")


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize(("rows", "hidden"), [((), (4, 5)), ((3,), (4, 5)), ((2, 3), (1, 7)), ((2, 3), (2, 3, 4))])
@pytest.mark.parametrize("weighted", [True, False])
def test_several_normalized_dims_are_right_to_rounding(device, dtype, rows, hidden, weighted: bool) -> None:
    x, dy = _draw(*rows, *hidden, dtype=dtype, device=device), _draw(*rows, *hidden, dtype=dtype, device=device)
    weight = _draw(*hidden, dtype=dtype, device=device) if weighted else None
    _assert_correct(x, weight, dy, ndim=len(hidden))


@pytest.mark.parametrize("scale", [1e-2, 1.0, 300.0])  # 300²: beyond float16
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-2, 10.0])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_every_eps_is_right_beside_small_and_large_values(device, dtype, eps: float, scale: float) -> None:
    x = (torch.randn(4, 64, dtype=F64) * scale).to(device, dtype)
    _assert_correct(x, _draw(64, dtype=dtype, device=device), _draw(4, 64, dtype=dtype, device=device), eps=eps)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_eps_none_is_the_accumulation_dtypes_machine_epsilon(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64, dtype=F64) * 1e-4).to(dtype)  # x² is about 1e-8: eps counts
    expected = rms_norm(x, eps=torch.finfo(F64 if dtype == F64 else F32).eps)
    assert torch.equal(rms_norm(x, eps=None), expected)
    assert not torch.equal(rms_norm(x), expected)
    torch.testing.assert_close(rms_norm(x, eps=None), torch.nn.functional.rms_norm(x, (64,)))


def test_autocast_changes_nothing() -> None:
    x, weight = _draw(3, 16), _draw(16)
    expected = rms_norm(x, weight)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(rms_norm(x, weight), expected)
        assert rms_norm(x.bfloat16(), weight).dtype == BF16


def test_normalized_shape_defaults_to_the_weights_shape_and_else_to_the_last_dim() -> None:
    x, weight = _draw(3, 4, 5), _draw(4, 5)
    assert torch.equal(rms_norm(x, weight), rms_norm(x, weight, normalized_shape=(4, 5)))
    assert torch.equal(rms_norm(x), rms_norm(x, normalized_shape=5))
    assert torch.equal(rms_norm(x), rms_norm(x, normalized_shape=[5]))
    assert not torch.equal(rms_norm(x), rms_norm(x, normalized_shape=torch.Size([4, 5])))


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x.float()
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (hidden * (1.0 + weight.float())).to(x.dtype)


@pytest.mark.parametrize(("model", "mode", "offset"), [(_llama, "llama", 0.0), (_gemma, "gemma", 1.0)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_casting_mode_is_its_model_family_bit_for_bit(dtype, model: Callable, mode: str, offset: float) -> None:
    # Multiples of 1/8, so that Σ x² is exact in whatever order it is summed.
    x, weight = (torch.randint(-15, 16, (70, 256)) / 8).to(dtype), _draw(256, dtype=dtype)
    assert torch.equal(rms_norm(x, weight, offset=offset, casting_mode=mode), model(x, weight))


@pytest.mark.parametrize(
    "options", [{}, {"offset": 1.0, "casting_mode": "gemma"}, {"eps": 0.0, "casting_mode": "none"}]
)
@pytest.mark.parametrize(("x_shape", "weight_shape"), [((3, 5), (5,)), ((2, 3, 4), (3, 4)), ((4,), None)])
def test_gradcheck_passes_in_float64(x_shape, weight_shape, options: dict) -> None:
    x = _draw(*x_shape, dtype=F64).requires_grad_()
    weight = None if weight_shape is None else _draw(*weight_shape, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: rms_norm(*inputs, **options), (x, weight))


# --- memory layouts ---

N = 24
VIEWS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "rows_transposed": lambda new: new(6, 5, N).transpose(0, 1),
    "a_third_of_a_fused_qkv": lambda new: new(5, 6, 3 * N)[..., N : 2 * N],
    "heads_of_a_fused_qkv": lambda new: new(5, 3, 6, N)[:, 1],
    "every_other_row": lambda new: new(10, 6, N)[::2],
    "expanded_rows": lambda new: new(1, 6, N).expand(5, 6, N),
    "one_row_expanded": lambda new: new(N).expand(5, 6, N),
    "expanded_columns": lambda new: new(5, 6, 1).expand(5, 6, N),
    "every_other_column": lambda new: new(5, 6, 2 * N)[..., ::2],
    "columns_transposed": lambda new: new(N, 5, 6).permute(1, 2, 0),
    "negative_bit": lambda new: torch._neg_view(new(5, 6, N)),
    "negative_bit_and_sliced": lambda new: torch._neg_view(new(5, 6, 2 * N))[..., ::2],
    "unaligned": lambda new: new(5 * 6 * N + 1)[1:].view(5, 6, N),
    "overlapping_windows": lambda new: new(4 * 7 + 5 + N).as_strided((5, 6, N), (7, 1, 1)),
}
WEIGHT_VIEWS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "every_other": lambda new: new(2 * N)[::2],
    "a_column": lambda new: new(N, 3)[:, 1],
    "expanded": lambda new: new(1).expand(N),
    "negative_bit": lambda new: torch._neg_view(new(N)),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["x", "dy", "both"])
def test_a_view_gives_the_bits_of_its_copy(device, dtype, view: str, which: str) -> None:
    def new(*shape: int) -> Tensor:
        return _draw(*shape, dtype=dtype, device=device)

    x = VIEWS[view](new) if which in ("x", "both") else new(5, 6, N)
    dy = VIEWS[view](new) if which in ("dy", "both") else new(5, 6, N)
    weight = new(N)
    copies = [tensor.resolve_neg().clone(memory_format=torch.contiguous_format) for tensor in (x, dy)]
    expected = _gradients(copies[0], weight, copies[1])
    assert _equal(_gradients(x, weight, dy), expected)
    _assert_correct(x, weight, dy)
    assert torch.equal(x, copies[0]) and torch.equal(dy, copies[1])


@pytest.mark.parametrize("view", WEIGHT_VIEWS)
def test_a_weight_that_is_a_view_gives_the_bits_of_its_copy(device, view: str) -> None:
    x, dy = _draw(5, 6, N, device=device), _draw(5, 6, N, device=device)
    weight = WEIGHT_VIEWS[view](lambda *shape: _draw(*shape, device=device))
    assert _equal(_gradients(x, weight, dy), _gradients(x, weight.resolve_neg().clone().contiguous(), dy))


def test_the_imaginary_part_of_a_conjugate_is_normalized_with_its_sign() -> None:
    x = torch.randn(4, N, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(rms_norm(x), rms_norm(x.clone()))
    assert (rms_norm(x).sign() == x.sign()).all()


def test_views_of_several_normalized_dims_give_the_bits_of_their_copies(device: str) -> None:
    x, dy = _draw(4, 5, 3, device=device).permute(2, 1, 0), _draw(3, 5, 8, device=device)[..., ::2]
    weight = _draw(4, 5, device=device).t()
    assert not (x.is_contiguous() or dy.is_contiguous() or weight.is_contiguous())
    assert _equal(_gradients(x, weight, dy), _gradients(x.contiguous(), weight.contiguous(), dy.contiguous()))


@pytest.mark.parametrize("order", [(2, 0, 1), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_row_dims_in_any_order_give_the_bits_of_their_copies(device: str, order: tuple[int, ...]) -> None:
    # Three row dims that no two strides describe, and those that two do.
    x, dy = (_draw(2, 3, 4, N, device=device).permute(*order, 3)[:, ::2] for _ in range(2))
    weight = _draw(N, device=device)
    assert _equal(_gradients(x, weight, dy), _gradients(x.contiguous(), weight, dy.contiguous()))


# --- zero rows, NaN ---


@pytest.mark.parametrize(("rows", "hidden"), [((0,), (8,)), ((3, 0, 2), (8,)), ((0, 4), (2, 3))])
@pytest.mark.parametrize("dtype", [F64, BF16])
def test_zero_rows_give_zero_dw(device, dtype, rows, hidden) -> None:
    x, weight = _draw(*rows, *hidden, dtype=dtype, device=device), _draw(*hidden, dtype=dtype, device=device)
    y, dx, dw = _gradients(x, weight, torch.zeros_like(x))
    assert y.shape == dx.shape == x.shape
    assert y.dtype == dx.dtype == dtype
    assert torch.equal(dw, torch.zeros_like(weight))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_and_inf_stay_in_their_row(device, dtype, value: float) -> None:
    x, weight, dy = (_draw(*shape, dtype=dtype, device=device) for shape in ((6, 33), (33,), (6, 33)))
    spoilt = x.clone()
    spoilt[2, 5] = value
    (y, dx, _), (expected_y, expected_dx, _) = _gradients(spoilt, weight, dy), _gradients(x, weight, dy)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], expected_y[others]) and torch.equal(dx[others], expected_dx[others])
    assert y[2, 5].isnan()
    assert y[2].isnan().all() == math.isnan(value)


# --- who needs a gradient ---


class _Calls(TorchDispatchMode):
    """The meshnorm ops that run: (name, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "meshnorm":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize(("x_needs", "weight_needs"), [(True, False), (False, True), (True, True)])
def test_what_is_frozen_gets_no_gradient_and_the_other_is_unchanged(
    device: str, x_needs: bool, weight_needs: bool, observed: bool
) -> None:
    x, weight, dy = _draw(5, 17, device=device), _draw(17, device=device), _draw(5, 17, device=device)
    _, dx, dw = _gradients(x, weight, dy)
    x.requires_grad_(x_needs)
    weight.requires_grad_(weight_needs)
    if observed:
        with _Calls() as mode:
            rms_norm(x, weight).backward(dy)
        (name, args) = mode.calls[-1]
        assert (name, args[6:8]) == ("backward", (x_needs, weight_needs))  # needs_dx, needs_dw
    else:
        rms_norm(x, weight).backward(dy)
    assert _equal((x.grad, weight.grad), (dx if x_needs else None, dw if weight_needs else None))


def test_nothing_is_saved_where_nothing_needs_a_gradient() -> None:
    x, weight = _draw(5, 17), _draw(17)
    assert not rms_norm(x, weight).requires_grad
    with torch.no_grad():
        assert not rms_norm(x.requires_grad_(), weight).requires_grad
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, weight), rms_norm(x.detach(), weight))


def test_gradients_accumulate_over_backward_calls(device: str) -> None:
    weight = _draw(17, device=device).requires_grad_()
    x = _draw(5, 17, device=device).requires_grad_()
    dys = [_draw(5, 17, device=device) for _ in range(2)]
    (_, dx0, dw0), (_, dx1, dw1) = (_gradients(x, weight, dy) for dy in dys)
    for dy in dys:
        rms_norm(x, weight).backward(dy)
    assert _equal((x.grad, weight.grad), (dx0 + dx1, dw0 + dw1))


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    x, weight, dy = _draw(5, 17).requires_grad_(), _draw(17).requires_grad_(), _draw(5, 17)
    y = rms_norm(x, weight)
    first = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    assert _equal(torch.autograd.grad(y, (x, weight), dy), first)


def test_an_x_that_is_no_leaf_passes_its_gradient_on() -> None:
    x, weight, dy = _draw(5, 17), _draw(17), _draw(5, 17)
    leaf = x.clone().requires_grad_()
    rms_norm(leaf * 2.0, weight).backward(dy)
    assert torch.equal(leaf.grad, 2.0 * _gradients(2.0 * x, weight, dy)[1])


# --- memory ---


def test_arguments_are_not_modified(device: str) -> None:
    tensors = [
        _draw(5, 17, dtype=BF16, device=device),
        _draw(17, device=device),
        _draw(5, 17, dtype=BF16, device=device),
    ]
    copies = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    _gradients(*tensors)
    assert _equal(tuple(tensors), tuple(copies))
    assert [tensor._version for tensor in tensors] == versions


def _saved(x: Tensor, weight: Tensor | None, **options: Any) -> list[Tensor]:
    """What the norm keeps for its backward, but for what shares x's or the weight's memory."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = rms_norm(x, weight, **options)
    assert y.requires_grad
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, weight) if tensor is not None}
    return [tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in own]


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize("view", ["contiguous", "a_third_of_a_fused_qkv", "every_other_column"])
@pytest.mark.parametrize("weight_dtype", [None, BF16, F32])
@pytest.mark.parametrize("options", [{}, {"offset": 1.0, "casting_mode": "gemma"}])
def test_one_number_a_row_is_saved_beside_x_and_weight(device, dtype, view, weight_dtype, options) -> None:
    make = VIEWS.get(view, lambda new: new(5, 6, N))
    x = make(lambda *shape: _draw(*shape, dtype=dtype, device=device)).detach().requires_grad_()
    weight = None if weight_dtype is None else _draw(N, dtype=weight_dtype, device=device).requires_grad_()
    (rstd,) = _saved(x, weight, **options)
    assert (rstd.numel(), rstd.dtype) == (30, accumulation_dtype(dtype))


def test_a_changed_weight_is_noticed_in_the_backward() -> None:
    x, weight = _draw(5, 17).requires_grad_(), _draw(17).requires_grad_()
    y = rms_norm(x, weight)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_changed_x_is_noticed_in_the_backward() -> None:
    x, weight = _draw(5, 17).requires_grad_(), _draw(17).requires_grad_()
    hidden = x * 1.0
    y = rms_norm(hidden, weight)
    hidden.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_y_may_be_changed_in_place() -> None:
    x, weight, dy = _draw(5, 17), _draw(17), _draw(5, 17)
    leaf = x.clone().requires_grad_()
    rms_norm(leaf, weight).mul_(2.0).backward(dy)
    assert torch.equal(leaf.grad, _gradients(x, weight, 2.0 * dy)[1])


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize("weighted", [True, False])
def test_in_place_writes_dx_over_dy(device, dtype, weighted: bool) -> None:
    x, dy = _draw(40, 33, dtype=dtype, device=device), _draw(40, 33, dtype=dtype, device=device)
    weight = _draw(33, dtype=dtype, device=device) if weighted else None
    expected = _gradients(x, weight, dy)
    assert expected[1].untyped_storage().data_ptr() != dy.untyped_storage().data_ptr()  # off by default
    found = _gradients(x, weight, dy, in_place=True)
    assert _equal(found, expected)
    assert found[1].data_ptr() == dy.data_ptr()


@pytest.mark.parametrize("view", [name for name in VIEWS if name != "unaligned"])
def test_in_place_is_right_and_leaves_dy_alone_where_dy_cannot_hold_dx(device: str, view: str) -> None:
    x, weight = _draw(5, 6, N, device=device), _draw(N, device=device)
    dy = VIEWS[view](lambda *shape: _draw(*shape, device=device))
    copy = dy.clone(memory_format=torch.contiguous_format)
    assert _equal(_gradients(x, weight, dy, in_place=True), _gradients(x, weight, copy))
    assert torch.equal(dy, copy)


def test_in_place_is_right_for_a_sum_whose_dy_is_expanded() -> None:
    x, weight = _draw(5, 17).requires_grad_(), _draw(17).requires_grad_()
    rms_norm(x, weight, in_place=True).sum().backward()
    _, dx, dw = _gradients(x, weight, torch.ones(5, 17))
    assert _equal((x.grad, weight.grad), (dx, dw))


# --- double backward ---


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("of", ["x", "weight"])
def test_double_backward_is_refused(of: str, observed: bool) -> None:
    x, weight = _draw(5, 17, dtype=F64).requires_grad_(), _draw(17, dtype=F64).requires_grad_()
    expected = _gradients(x, weight, torch.ones(5, 17, dtype=F64))

    def penalty() -> None:
        y = rms_norm(x, weight)
        dx, dw = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
        assert _equal((dx.detach(), dw.detach()), expected[1:])  # the first gradients themselves are fine
        with pytest.raises(DoubleBackwardError, match=r"create_graph=False.*reference_forward"):
            (dx if of == "x" else dw).square().sum().backward()

    if observed:
        with _Calls():
            penalty()
    else:
        penalty()


def test_double_backward_through_dy_is_refused() -> None:
    x, dy = _draw(5, 17), _draw(5, 17).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x.requires_grad_()), x, dy, create_graph=True)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(dx.sum(), dy)


# --- the same bits ---


@pytest.mark.parametrize(("rows", "hidden"), [(700, 1000), (130, 4097)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_results_are_bitwise_repeatable(device, dtype, rows: int, hidden: int) -> None:
    x, dy = _draw(rows, hidden, dtype=dtype, device=device), _draw(rows, hidden, dtype=dtype, device=device)
    weight = _draw(hidden, dtype=dtype, device=device)
    first = _gradients(x, weight, dy)
    for _ in range(3):
        assert _equal(_gradients(x, weight, dy), first)


@pytest.mark.parametrize(("rows", "hidden"), [(301, 1), (301, 17), (301, 128), (301, 1000), (80, 4097), (5, 70001)])
@pytest.mark.parametrize(("dtype", "mode"), [(F64, "llama"), (F32, "llama"), (BF16, "gemma"), (BF16, "none")])
def test_a_row_is_the_same_alone_as_among_others(device, dtype, mode: str, rows: int, hidden: int) -> None:
    x, dy = _draw(rows, hidden, dtype=dtype, device=device), _draw(rows, hidden, dtype=dtype, device=device)
    weight = _draw(hidden, dtype=dtype, device=device)
    y, dx, _ = _gradients(x, weight, dy, casting_mode=mode)
    third = rows // 3
    for first, last in ((0, 1), (rows - 1, rows), (third, third + 1), (0, 2), (1, 4), (third, 2 * third)):
        found = _gradients(x[first:last], weight, dy[first:last], casting_mode=mode)
        assert _equal(found[:2], (y[first:last], dx[first:last]))
    alone = _gradients(x[third], weight, dy[third], casting_mode=mode)  # without row dims
    assert _equal(alone[:2], (y[third], dx[third]))
