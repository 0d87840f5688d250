"""The norms of q and k on plain tensors: each right to rounding and bit for bit the norm alone, one pass each way."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_cases import poisoned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshnorm import qk_rms_norm, rms_norm
from meshnorm.errors import DoubleBackwardError
from meshnorm.formula import accumulation_dtype, reference_backward, reference_forward

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (q and k, weight of q, weight of k)
DTYPES = [
    *((F64, F64, F64), (F32, F32, F32), (F32, BF16, None), (F32, None, F32)),
    *((BF16, BF16, BF16), (BF16, F32, BF16), (BF16, None, None), (F16, F16, None)),
]
# (q, k): heads, heads with as many rows, all heads, all heads of fewer keys, unlike in every way, one row.
SHAPES = [
    ((2, 5, 8, 16), (2, 5, 2, 16)),
    ((2, 3, 3, 64), (2, 3, 3, 64)),
    ((2, 5, 128), (2, 5, 128)),
    ((2, 5, 600), (2, 5, 96)),
    ((7, 17), (2, 3, 1, 33)),
    ((24,), (24,)),
]
Q, K = (2, 5, 8, 16), (2, 5, 2, 16)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def _draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=F64).to(device, dtype)


def _given(q: tuple[int, ...], k: tuple[int, ...], dtypes: tuple, device: str = "cpu") -> tuple[Any, ...]:
    """q, k, the weights, and a gradient for each output."""
    dtype, *weights = dtypes
    xs, dys = ([_draw(*shape, dtype=dtype, device=device) for shape in (q, k)] for _ in range(2))
    scales = [
        None if w is None else _draw(shape[-1], dtype=w, device=device)
        for shape, w in zip((q, k), weights, strict=True)
    ]
    return *xs, *scales, *dys


def _leaves(given: tuple[Any, ...]) -> list[Any]:
    return [None if t is None else t.detach().requires_grad_() for t in given[:4]]


def _gradients(ys: tuple[Tensor, Tensor], leaves: list[Any], dys: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    torch.autograd.backward(ys, dys)
    return *(y.detach() for y in ys), *(None if leaf is None else leaf.grad for leaf in leaves)


def _both(given: tuple[Any, ...], **options: Any) -> tuple[Tensor | None, ...]:
    """(y of q, y of k, dQ, dK, dW of q, dW of k) of leaves with the strides given."""
    leaves = _leaves(given)
    with poisoned():
        return _gradients(qk_rms_norm(*leaves, **options), leaves, given[4:])


def _each(given: tuple[Any, ...], **options: Any) -> tuple[Tensor | None, ...]:
    """The same by two norms."""
    leaves = _leaves(given)
    ys = tuple(rms_norm(leaves[place], leaves[place + 2], **options) for place in range(2))
    return _gradients(ys, leaves, given[4:])  # type: ignore[arg-type]


def _equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


# --- right ---


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_it_is_right_to_rounding_and_has_the_bits_of_two_norms(device, shapes, dtypes, mode, offset) -> None:
    given = _given(*shapes, dtypes, device)
    options = {"offset": offset, "casting_mode": mode}
    found = _both(given, **options)
    assert _equal(found, _each(given, **options))
    for place, x in enumerate(given[:2]):
        wide = x.double(), None if given[place + 2] is None else given[place + 2].double()
        y = reference_forward(*wide, 1e-6, offset, "gemma")
        dx, dw = reference_backward(given[place + 4].double(), *wide, 1e-6, offset)
        for name, a, b in zip(("y", "dX", "dW"), found[place::2], (y, dx, dw), strict=True):
            assert (a is None) == (b is None), name
            if a is None or b is None:
                continue
            unit = torch.finfo(a.dtype).eps + 32 * torch.finfo(accumulation_dtype(a.dtype)).eps
            if name == "y":
                unit *= {"gemma": 1, "llama": 1.5, "none": 2.5}[mode]
            assert a.is_contiguous() and (a.double() - b).abs().max() <= unit * b.abs().max(), name


@pytest.mark.parametrize("weighted", [(True, True), (True, False), (False, False)])
def test_gradcheck_passes_in_float64(weighted: tuple[bool, bool]) -> None:
    leaves = [_draw(3, 2, 6, dtype=F64).requires_grad_(), _draw(3, 6, dtype=F64).requires_grad_()]
    weights = [_draw(6, dtype=F64).requires_grad_() if is_there else None for is_there in weighted]
    assert torch.autograd.gradcheck(lambda *t: qk_rms_norm(*t, offset=1.0), (*leaves, *weights))


@pytest.mark.parametrize("shapes", [((0, 8), (3, 8)), ((3, 8), (2, 0, 8)), ((0, 8), (0, 4))])
def test_zero_rows_give_zero_dw(device: str, shapes: tuple) -> None:
    given = _given(*shapes, (BF16, F32, BF16), device)
    found = _both(given)
    assert _equal(found, _each(given))
    for place in range(2):
        dw = found[place + 4]
        assert given[place].numel() or (dw is not None and torch.equal(dw, torch.zeros_like(dw)))


def test_several_dims_are_normalized_where_the_weight_or_the_shape_says_so(device: str) -> None:
    q, k, dq, dk = (_draw(*shape, device=device) for shape in (Q, K) * 2)
    weights = _draw(8, 16, device=device), _draw(2, 16, device=device)
    given = (q, k, *weights, dq, dk)
    assert _equal(_both(given), _each(given))
    found = qk_rms_norm(q, k, q_normalized_shape=(8, 16), k_normalized_shape=(2, 16))
    assert torch.equal(found[0], rms_norm(q, normalized_shape=(8, 16)))
    assert torch.equal(found[1], rms_norm(k, normalized_shape=(2, 16)))


@pytest.mark.parametrize("dtypes", [(F64, F64, F64), (BF16, BF16, F32), (BF16, None, BF16)])
@pytest.mark.parametrize("widths", [(64, 64), (600, 96)])
def test_a_row_is_the_same_alone_as_among_others(device: str, dtypes: tuple, widths: tuple[int, int]) -> None:
    given = _given((301, widths[0]), (70, widths[1]), dtypes, device)
    whole = _both(given)
    for first, last in ((0, 1), (69, 70), (3, 40)):
        part = slice(first, last)
        found = _both(tuple(t[part] if t is not None and t.dim() > 1 else t for t in given))
        assert _equal(found[:4], tuple(each[part] for each in whole[:4]))  # type: ignore[index]
    assert _equal(_both(given), whole)


# --- memory layouts ---

N = 24
VIEWS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "heads_of_a_fused_qkv": lambda new: new(5, 6, 12 * N)[..., 2 * N : 6 * N].unflatten(-1, (4, N)),
    "heads_of_a_fused_qkv_transposed": lambda new: (
        new(5, 6, 12 * N)[..., : 4 * N].unflatten(-1, (4, N)).transpose(1, 2)
    ),
    "transposed": lambda new: new(5, 4, 6, N).transpose(1, 2),
    "one_head_expanded": lambda new: new(5, 6, 1, N).expand(5, 6, 4, N),
    "every_other_column": lambda new: new(5, 6, 4, 2 * N)[..., ::2],
    "negative_bit": lambda new: torch._neg_view(new(5, 6, 4, N)),
    "unaligned": lambda new: new(5 * 6 * 4 * N + 1)[1:].view(5, 6, 4, N),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", [0, 1, 4, 5])
def test_a_view_gives_the_bits_of_its_copy(device: str, dtype: torch.dtype, view: str, which: int) -> None:
    given = list(_given((5, 6, 4, N), (5, 6, 4, N), (dtype, dtype, F32), device))
    lies = VIEWS[view](lambda *shape: _draw(*shape, dtype=dtype, device=device))
    if lies.shape != given[0].shape:
        given = list(_given(tuple(lies.shape), tuple(lies.shape), (dtype, dtype, F32), device))
    given[which] = lies
    found = _both(tuple(given))
    given[which] = given[which].resolve_neg().clone(memory_format=torch.contiguous_format)
    expected = _both(tuple(given))
    assert _equal(found[:4], expected[:4])
    for a, b in zip(found[4:], expected[4:], strict=True):  # of transposed rows in another order
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("transposed", [False, True])
def test_slices_of_a_fused_projection_are_read_in_place(transposed: bool) -> None:
    """Nothing as large as k is made beside the results: forward and backward, dY as it lies behind a rotation."""
    fused = _draw(4, 64, (8 + 2 + 2) * 64, dtype=F32)
    q, k = fused[..., : 8 * 64].unflatten(-1, (8, 64)), fused[..., 8 * 64 : 10 * 64].unflatten(-1, (2, 64))
    if transposed:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    leaves = [q.requires_grad_(), k.detach().requires_grad_(), torch.ones(64), torch.ones(64)]
    with _Calls() as mode:
        ys = qk_rms_norm(*leaves)
        torch.autograd.grad(ys, leaves[:2], [y.detach().clone() for y in ys])
    ours = [args for namespace, name, args in mode.calls if namespace == "meshnorm"]
    from meshnorm.rows import row_view

    for tensor in ours[0][:2] + ours[1][:4]:
        assert row_view(tensor, 1).data_ptr() == tensor.data_ptr()  # no copy: two strides say where its rows lie
    for y, x in zip(ys, leaves[:2], strict=True):
        order = sorted(range(3), key=lambda dim: -x.stride(dim))  # rows stay in the order in which they lie
        assert y.permute(*order, 3).is_contiguous()


# --- who needs a gradient ---


class _Calls(TorchDispatchMode):
    """The ops that run: (namespace, name, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, tuple]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls.append((func.namespace, func._opname, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=4) if any(n)])
def test_what_is_frozen_or_not_used_gets_no_gradient_and_the_others_are_unchanged(needs, used, observed: bool) -> None:
    *leaves, dq, dk = _given(Q, K, (BF16, F32, F32))
    expected = _both((*leaves, dq, dk))[2:]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    mode = _Calls()

    def run() -> None:
        ys = qk_rms_norm(*leaves)
        assert [y.requires_grad for y in ys] == [needs[0] or needs[2], needs[1] or needs[3]]
        for y, dy, use in zip(ys, (dq, dk), used, strict=True):
            if use and y.requires_grad:
                y.backward(dy, retain_graph=True)

    if observed:
        with mode:
            run()
    else:
        run()
    wanted = [need and used[place % 2] for place, need in enumerate(needs)]
    found = tuple(leaf.grad for leaf in leaves)
    assert _equal(found, tuple(grad if want else None for grad, want in zip(expected, wanted, strict=True)))
    if observed:
        asked = [args[-4:] for _, name, args in mode.calls if name == "qk_backward"]
        for place in range(4):
            assert any(bool(each[place]) for each in asked) == wanted[place]


def test_nothing_is_saved_where_nothing_needs_a_gradient() -> None:
    q, k, *weights = _given(Q, K, (BF16, F32, BF16))[:4]
    expected = qk_rms_norm(q, k, *weights)
    assert not any(y.requires_grad for y in expected)
    with torch.no_grad():
        assert _equal(qk_rms_norm(q.requires_grad_(), k, *weights), expected)


# --- memory ---


def test_q_k_the_weights_and_one_number_a_row_are_saved(device: str) -> None:
    leaves = _leaves(_given(Q, K, (BF16, BF16, F32), device))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        qk_rms_norm(*leaves)
    known = {t.untyped_storage().data_ptr() for t in leaves}
    rstds = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert len(saved) == 6 and [(t.numel(), t.dtype) for t in rstds] == [(80, F32), (20, F32)]


def test_arguments_and_gradients_are_not_modified(device: str) -> None:
    given = _given(Q, K, (F32, F32, F32), device)
    copies, versions = [t.clone() for t in given], [t._version for t in given]
    _both(given)
    assert _equal(tuple(given), tuple(copies)) and [t._version for t in given] == versions


@pytest.mark.parametrize("which", range(4))
def test_a_change_before_the_backward_is_noticed(which: int) -> None:
    used = [leaf * 1.0 for leaf in _leaves(_given(Q, K, (F32, F32, F32)))]
    ys = qk_rms_norm(*used)
    with torch.no_grad():
        used[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (ys[0].sum() + ys[1].sum()).backward()


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("of", range(4))
def test_double_backward_is_refused(of: int, observed: bool) -> None:
    leaves = _leaves(_given((5, 6), (3, 6), (F64, F64, F64)))

    def penalty() -> None:
        ys = qk_rms_norm(*leaves)
        found = torch.autograd.grad(ys[0].sum() + ys[1].sum(), leaves, create_graph=True)
        with pytest.raises(DoubleBackwardError, match=r"create_graph=False"):
            found[of].square().sum().backward()

    if observed:
        with _Calls():
            penalty()
    else:
        penalty()


def test_q_and_k_may_be_one_tensor() -> None:
    x, _, weight, _, dq, dk = _given((5, 6), (5, 6), (F64, F64, F64))
    x.requires_grad_()
    torch.autograd.backward(qk_rms_norm(x, x, weight), (dq, dk))
    expected = reference_backward(dq, x.detach(), weight, 1e-6)[0] + reference_backward(dk, x.detach(), None, 1e-6)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)
