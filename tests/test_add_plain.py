"""The norm behind an addition, on plain tensors: right to rounding, its gradients nobody else's memory."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshnorm import add_rms_norm, rms_norm
from meshnorm.errors import DoubleBackwardError
from meshnorm.formula import accumulation_dtype, reference_add_backward, reference_add_forward, reference_rstd

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (x, residual, weight)
DTYPES = [
    (F64, F64, F64),
    (F64, F64, None),
    (F32, F32, F32),
    (F32, BF16, F32),
    (BF16, BF16, BF16),
    (BF16, BF16, None),
    (BF16, F32, BF16),
    (BF16, F32, F32),
    (BF16, F16, None),
    (F16, F16, F32),
    (F16, F32, None),
]
N = 24


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def _draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=F64).to(device, dtype)


def _given(shape: tuple[int, ...], dtypes: tuple, device: str = "cpu", ndim: int = 1) -> tuple[Any, ...]:
    """x, residual, weight, dY, d(residual_out)."""
    x_dtype, residual_dtype, weight_dtype = dtypes
    hidden = shape[len(shape) - ndim :]
    weight = None if weight_dtype is None else _draw(*hidden, dtype=weight_dtype, device=device)
    x, residual, dy, d_out = (
        _draw(*shape, dtype=dtype, device=device) for dtype in (x_dtype, residual_dtype, x_dtype, residual_dtype)
    )
    return x, residual, weight, dy, d_out


def _results(x: Tensor, residual: Tensor, weight: Tensor | None, dy: Any, d_out: Any, **options: Any) -> tuple:
    """(y, residual_out, dX, dResidual, dW) of leaves with the strides given. dY or d(residual_out) may be None."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight)]
    y, residual_out = add_rms_norm(*leaves, **options)
    outputs = [(out, grad) for out, grad in ((y, dy), (residual_out, d_out)) if grad is not None]
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = torch.autograd.grad([out for out, _ in outputs], wanted, [grad for _, grad in outputs], allow_unused=True)
    return y.detach(), residual_out.detach(), *found, *[None] * (3 - len(found))


def _equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _assert_correct(given: tuple, eps: float = 1e-6, offset: float = 0.0, mode: str = "llama", ndim: int = 1) -> None:
    """residual_out to the bit; the rest within what rounding explains of the float64 result for that residual_out."""
    x, residual, weight, dy, d_out = given
    hidden = tuple(x.shape[x.ndim - ndim :])
    y, out, dx, d_residual, dw = _results(*given, eps=eps, offset=offset, casting_mode=mode, normalized_shape=hidden)
    assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
    assert (dx.dtype, dx.shape, d_residual.dtype, d_residual.shape) == (x.dtype, x.shape, residual.dtype, x.shape)
    acc_dtype = accumulation_dtype(x.dtype)
    assert torch.equal(out, (x.to(acc_dtype) + residual.to(acc_dtype)).to(residual.dtype)) and out.is_contiguous()

    s, dy64, d_out64, w = out.double(), dy.double(), d_out.double(), None if weight is None else weight.double()
    zero = torch.zeros_like(s)
    y64, _ = reference_add_forward(zero, s, w, eps, offset, "gemma", ndim)
    dx64, _, dw64 = reference_add_backward(dy64, d_out64, s, w, eps, offset, ndim)
    acc = torch.finfo(acc_dtype).eps
    rows, columns = x.numel() // math.prod(hidden), math.prod(hidden)
    in_row, over_rows = (8 + math.sqrt(columns)) * acc, (8 + math.sqrt(rows)) * acc
    rstd = reference_rstd(s, eps, ndim)
    x_hat = (s * rstd).abs()
    scale = torch.ones_like(s) if w is None else (w.abs() + abs(offset)).expand_as(s)
    roundings = {"gemma": 1, "llama": 2, "none": 3}[mode]
    _assert_within(y, y64, roundings, in_row * x_hat * scale + acc * scale)
    terms = dy64.abs() * scale
    mean = (terms * x_hat).mean(tuple(range(x.ndim - ndim, x.ndim)), keepdim=True)
    terms = 4 * in_row * (terms + x_hat * mean) * rstd + 2 * acc * d_out64.abs()
    _assert_within(dx, dx64, 1, terms)
    _assert_within(d_residual, dx64, 1, terms)
    assert (dw is None) == (weight is None)
    if weight is not None:
        assert (dw.dtype, dw.shape) == (weight.dtype, weight.shape)
        each = dy64.abs() * x_hat
        total = each.sum(tuple(range(x.ndim - ndim))) if x.ndim > ndim else each
        _assert_within(dw, dw64, 1, (in_row + over_rows) * total)


def _assert_within(found: Tensor, expected: Tensor | None, roundings: int, terms: Tensor) -> None:
    assert expected is not None
    info = torch.finfo(found.dtype)
    bound = roundings * 0.51 * info.eps * expected.abs() + terms + 8 * info.smallest_normal * info.eps
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max().item():.3g} times what rounding explains"


# --- right ---


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_every_dtype_mode_and_weight_is_right_to_rounding(device, dtypes, mode, offset) -> None:
    _assert_correct(_given((5, 7, 33), dtypes, device), offset=offset, mode=mode)


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, BF16)])
@pytest.mark.parametrize("hidden", [1, 17, 1000, 4097])
@pytest.mark.parametrize("rows", [(), (1,), (2, 1, 3), (301,)])
def test_every_shape_is_right_to_rounding(device, dtypes, hidden: int, rows: tuple[int, ...]) -> None:
    _assert_correct(_given((*rows, hidden), dtypes, device), offset=1.0, mode="gemma")


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4, 5)])
def test_several_normalized_dims_are_right_to_rounding(device, shape) -> None:
    _assert_correct(_given(shape, (BF16, F32, F32), device, ndim=2), ndim=2)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("n", [33, 1000, 4097])
def test_y_is_the_norm_of_residual_out_bit_for_bit(device, dtype, n: int) -> None:
    x, residual, weight, *_ = _given((70, n), (dtype, dtype, dtype), device)
    y, residual_out = add_rms_norm(x, residual, weight)
    assert torch.equal(residual_out, x + residual)
    assert torch.equal(y, rms_norm(residual_out, weight))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_it_is_what_a_llama_block_computes_bit_for_bit(dtype) -> None:
    # Multiples of 1/8, so that Σ x² is exact in whatever order it is summed; but sums of them do not fit the dtype.
    x, residual = ((torch.randint(-(2**9), 2**9, (70, 256)) / 8).to(dtype) for _ in range(2))
    residual += 512 if dtype == BF16 else 0
    weight = _draw(256, dtype=dtype)
    y, residual_out = add_rms_norm(x, residual, weight)
    hidden = residual + x
    assert torch.equal(residual_out, hidden)
    wide = hidden.float()
    assert torch.equal(y, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype))


@pytest.mark.parametrize("weighted", [True, False])
def test_gradcheck_passes_in_float64(weighted: bool) -> None:
    leaves = [_draw(3, 5, dtype=F64).requires_grad_() for _ in range(2)]
    weight = _draw(5, dtype=F64).requires_grad_() if weighted else None
    assert torch.autograd.gradcheck(lambda *t: add_rms_norm(*t, offset=1.0), (*leaves, weight))


@pytest.mark.parametrize("rows", [(0,), (3, 0, 2)])
def test_zero_rows_give_zero_dw(device, rows) -> None:
    given = _given((*rows, 8), (BF16, F32, BF16), device)
    y, out, dx, d_residual, dw = _results(*given)
    assert y.shape == out.shape == dx.shape == d_residual.shape == (*rows, 8)
    assert torch.equal(dw, torch.zeros_like(dw))


@pytest.mark.parametrize("rows_and_width", [(301, 17), (301, 128), (301, 1000), (80, 4097), (5, 70001)])
@pytest.mark.parametrize("dtypes", [(F64, F64, F64), (BF16, BF16, F32), (BF16, F32, BF16), (F32, BF16, None)])
def test_a_row_is_the_same_alone_as_among_others(device, dtypes, rows_and_width) -> None:
    x, residual, weight, dy, d_out = _given(rows_and_width, dtypes, device)
    whole = _results(x, residual, weight, dy, d_out)
    rows = rows_and_width[0]
    for first, last in ((0, 1), (rows - 1, rows), (1, 4), (rows // 3, 2 * rows // 3)):
        part = slice(first, last)
        found = _results(x[part], residual[part], weight, dy[part], d_out[part])
        assert _equal(found[:4], tuple(each[part] for each in whole[:4]))
    assert _equal(_results(x, residual, weight, dy, d_out), whole)


# --- memory layouts ---

VIEWS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "rows_transposed": lambda new: new(6, 5, N).transpose(0, 1),
    "heads_of_a_fused_qkv": lambda new: new(5, 3, 6, N)[:, 1],
    "one_row_expanded": lambda new: new(N).expand(5, 6, N),
    "expanded_columns": lambda new: new(5, 6, 1).expand(5, 6, N),
    "every_other_column": lambda new: new(5, 6, 2 * N)[..., ::2],
    "negative_bit": lambda new: torch._neg_view(new(5, 6, N)),
    "unaligned": lambda new: new(5 * 6 * N + 1)[1:].view(5, 6, N),
}


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F32)])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_a_view_gives_the_bits_of_its_copy(device, dtypes, view: str, which: int) -> None:
    given = list(_given((5, 6, N), dtypes, device))
    dtype = given[which].dtype
    given[which] = VIEWS[view](lambda *shape: _draw(*shape, dtype=dtype, device=device))
    found = _results(*given)
    copied = given[which].resolve_neg().clone(memory_format=torch.contiguous_format)
    assert torch.equal(given[which], copied)
    given[which] = copied
    assert _equal(found, _results(*given))


# --- who needs a gradient, and of what ---


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
@pytest.mark.parametrize("dtypes", [(BF16, BF16, F32), (BF16, F32, F32)])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_what_is_frozen_gets_no_gradient_and_the_others_are_unchanged(dtypes, needs, observed: bool) -> None:
    *leaves, dy, d_out = _given((5, 17), dtypes)
    expected = _results(*leaves, dy, d_out)[2:]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)

    def run() -> None:
        y, residual_out = add_rms_norm(*leaves)
        assert residual_out.requires_grad == (needs[0] or needs[1])
        torch.autograd.backward(*zip(*[(y, dy), (residual_out, d_out)][: 1 + residual_out.requires_grad], strict=True))

    if observed:
        with _Calls() as mode:
            run()
        name, args = mode.calls[-1]
        wanted = (needs[0] or needs[1], needs[0] and needs[1], needs[2])  # two of leaves, in whichever dtypes
        assert name == "add_backward" and tuple(dtype is not None for dtype in args[7:10]) == wanted
    else:
        run()
    found = tuple(leaf.grad for leaf in leaves)
    assert _equal(found, tuple(grad if need else None for grad, need in zip(expected, needs, strict=True)))


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F32)])
def test_an_unused_residual_out_costs_no_gradient(dtypes, observed: bool) -> None:
    x, residual, weight, dy, d_out = _given((5, 17), dtypes)
    expected = _results(x, residual, weight, dy, torch.zeros_like(d_out))
    if observed:
        with _Calls() as mode:
            found = _results(x, residual, weight, dy, None)
        name, args = mode.calls[-1]
        assert name == "add_backward" and args[4] is None  # no zeros made, none read
    else:
        found = _results(x, residual, weight, dy, None)
    assert _equal(found, expected)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F32)])
def test_an_unused_y_passes_the_gradient_on_and_runs_no_kernel(dtypes, observed: bool) -> None:
    x, residual, weight, _, d_out = _given((5, 17), dtypes)
    if observed:
        with _Calls() as mode:
            found = _results(x, residual, weight, None, d_out)
        assert [name for name, _ in mode.calls] == ["add_forward"]
    else:
        found = _results(x, residual, weight, None, d_out)
    assert _equal(found[2:], (d_out.to(dtypes[0]), d_out, None))
    assert not _share(found[2], found[3]) and not _share(found[2], d_out) and not _share(found[3], d_out)


def test_nothing_is_saved_where_nothing_needs_a_gradient() -> None:
    x, residual, weight, *_ = _given((5, 17), (BF16, F32, BF16))
    expected = add_rms_norm(x, residual, weight)
    assert not any(out.requires_grad for out in expected)
    with torch.no_grad():
        assert _equal(add_rms_norm(x.requires_grad_(), residual, weight), expected)


def test_a_stream_through_several_blocks_has_the_gradients_of_one_that_adds_and_normalizes() -> None:
    """residual_out of each is the residual of the next, as in a model: gradients arrive at both outputs."""
    x0, weights = _draw(6, 16, dtype=F64), [_draw(16, dtype=F64) for _ in range(3)]

    def stream(fused: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x0, *weights)]
        hidden, residual = leaves[0] * 1.0, leaves[0] * 2.0
        for weight in leaves[1:]:
            if fused:
                normed, residual = add_rms_norm(hidden, residual, weight)
            else:
                residual = hidden + residual
                normed = rms_norm(residual, weight)
            hidden = normed.sin()
        (hidden * residual).sum().backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    for found, expected in zip(stream(True), stream(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- memory ---


def _gradients_of_leaves(x_is_leaf: bool, residual_is_leaf: bool, through: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    x, residual, weight, dy, d_out = _given((5, 17), (F32, F32, F32))
    leaves = [t.requires_grad_() for t in (x, residual)]
    used = [
        leaf if is_leaf else leaf * 1.0 for leaf, is_leaf in zip(leaves, (x_is_leaf, residual_is_leaf), strict=True)
    ]
    for tensor in used:
        tensor.retain_grad()
    torch.autograd.backward(through(*used, weight), (dy, d_out))
    return used[0].grad, used[1].grad  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["direct", "op", "aot_eager"])
@pytest.mark.parametrize("x_is_leaf", [True, False])
@pytest.mark.parametrize("residual_is_leaf", [True, False])
def test_gradients_that_a_caller_sees_share_no_memory(x_is_leaf: bool, residual_is_leaf: bool, how: str) -> None:
    """.grad of leaves, and of tensors inside a graph that retain it."""
    through = add_rms_norm if how != "aot_eager" else torch.compile(add_rms_norm, backend="aot_eager", fullgraph=True)
    if how == "op":
        with _Calls():
            dx, d_residual = _gradients_of_leaves(x_is_leaf, residual_is_leaf, through)
    else:
        dx, d_residual = _gradients_of_leaves(x_is_leaf, residual_is_leaf, through)
    assert torch.equal(dx, d_residual) and not _share(dx, d_residual)


def test_gradients_of_leaves_share_no_memory_when_asked_for_by_grad() -> None:
    x, residual, weight, dy, d_out = _given((5, 17), (F32, F32, F32))
    _, _, dx, d_residual, _ = _results(x, residual, weight, dy, d_out)
    assert torch.equal(dx, d_residual) and not _share(dx, d_residual)
    assert not _share(dx, dy) and not _share(dx, d_out)


def test_inside_a_graph_one_tensor_serves_both() -> None:
    """No second tensor is written, nor copied: both get the same object, as from torch's own addition."""
    x, residual, weight, dy, d_out = _given((5, 17), (F32, F32, F32))
    used = [t.requires_grad_() * 1.0 for t in (x, residual)]
    dx, d_residual = torch.autograd.grad(add_rms_norm(*used, weight), used, (dy, d_out))
    assert dx is d_residual


def test_a_residual_stream_writes_one_gradient_a_block() -> None:
    """Linears in 3 dims before the additions, an embedding before the first."""
    table, projection = torch.nn.Embedding(7, 16), torch.nn.Linear(16, 16, bias=False)
    residual = table(torch.arange(6).view(2, 3))
    hidden = projection(residual)
    with _Calls() as mode:
        for _ in range(3):
            hidden, residual = add_rms_norm(hidden, residual)
            hidden = projection(hidden)
        (hidden * residual).sum().backward()
    dtypes = [args[7:9] for name, args in mode.calls if name == "add_backward"]
    assert dtypes == [(F32, None)] * 3


@pytest.mark.parametrize("how", ["direct", "aot_eager"])
def test_leaves_behind_views_and_additions_share_no_memory(how: str) -> None:
    """Where those of torch's own addition do."""

    def views(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(a.view(2, 3, 8).transpose(0, 1), b.view(3, 2, 8))

    def additions(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm((a + 1.0).view(3, 16), b.clone().view(3, 16))

    def one_leaf(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm((a * 2.0).view(3, 16), b.view(3, 16))

    for function in (views, additions, one_leaf):
        a, b = _draw(6, 8).requires_grad_(), _draw(6, 8).requires_grad_()
        call = function if how == "direct" else torch.compile(function, fullgraph=True, backend="aot_eager")
        y, residual_out = call(a, b)
        (y.sum() + residual_out.sum()).backward()
        assert a.grad is not None and b.grad is not None and not _share(a.grad, b.grad), function.__name__


def test_a_norm_that_writes_over_its_gradient_leaves_the_residual_s_alone() -> None:
    def gradients(in_place: bool) -> tuple[Tensor | None, ...]:
        torch.manual_seed(0)
        leaves = [_draw(5, 17).requires_grad_() for _ in range(2)]
        y, residual_out = add_rms_norm(rms_norm(leaves[0], in_place=in_place), leaves[1] * 1.0)
        (y.sin() + residual_out.cos()).sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    assert _equal(gradients(True), gradients(False))


def test_gradients_accumulate_over_backward_calls(device: str) -> None:
    given = [_given((5, 17), (F32, F32, F32), device) for _ in range(2)]
    x, residual, weight = (t.detach().requires_grad_() for t in given[0][:3])
    expected = [_results(x, residual, weight, *each[3:])[2:] for each in given]
    for each in given:
        torch.autograd.backward(add_rms_norm(x, residual, weight), each[3:])
    assert _equal((x.grad, residual.grad, weight.grad), tuple(a + b for a, b in zip(*expected, strict=True)))


def test_arguments_and_gradients_are_not_modified(device: str) -> None:
    given = _given((5, 17), (BF16, BF16, F32), device)
    copies, versions = [t.clone() for t in given], [t._version for t in given]
    _results(*given)
    assert _equal(tuple(given), tuple(copies)) and [t._version for t in given] == versions


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, BF16)])
def test_residual_out_and_one_number_a_row_are_saved_and_neither_x_nor_the_residual(device, dtypes) -> None:
    x, residual, weight, *_ = _given((5, 6, N), dtypes, device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, residual_out = add_rms_norm(x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_())
    assert len(saved) == 3
    (rstd,) = [t for t in saved if not _share(t, residual_out) and not _share(t, weight)]
    assert (rstd.numel(), rstd.dtype) == (30, accumulation_dtype(dtypes[0]))


def test_a_changed_residual_out_is_noticed_in_the_backward() -> None:
    x, residual, weight, *_ = _given((5, 17), (F32, F32, F32))
    y, residual_out = add_rms_norm(x.requires_grad_(), residual, weight)
    with torch.no_grad():
        residual_out.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_x_and_the_residual_may_be_changed_before_the_backward() -> None:
    """Neither is read again."""
    given = _given((5, 17), (F32, F32, F32))
    expected = _results(*given)
    x, residual, weight = (t.clone().requires_grad_() for t in given[:3])
    used = x * 1.0, residual * 1.0
    outputs = add_rms_norm(*used, weight)
    with torch.no_grad():
        for each in used:
            each.zero_()
    torch.autograd.backward(outputs, given[3:])
    assert _equal((x.grad, residual.grad, weight.grad), expected[2:])


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("of", [0, 1, 2])
def test_double_backward_is_refused(of: int, observed: bool) -> None:
    leaves = [t.requires_grad_() for t in _given((5, 17), (F64, F64, F64))[:3]]

    def penalty() -> None:
        y, residual_out = add_rms_norm(*leaves)
        found = torch.autograd.grad(y.sum() + residual_out.sum(), leaves, create_graph=True)
        with pytest.raises(DoubleBackwardError, match=r"create_graph=False.*reference_add_forward"):
            found[of].square().sum().backward()

    if observed:
        with _Calls():
            penalty()
    else:
        penalty()
