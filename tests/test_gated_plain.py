"""The gated norm on plain tensors: right to rounding, little saved, one pass each way."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from norm_cases import poisoned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshnorm import gated_rms_norm, rms_norm
from meshnorm.errors import DoubleBackwardError
from meshnorm.formula import accumulation_dtype
from meshnorm.formula_gated import (
    Gated,
    activated,
    reference_gated_backward,
    reference_gated_forward,
    reference_gated_rstd,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# (x, gate, weight)
DTYPES = [
    (F64, F64, F64),
    (F32, F32, F32),
    (F32, BF16, None),
    (BF16, BF16, BF16),
    (BF16, BF16, F32),
    (BF16, F32, None),
    (F16, F16, F16),
    (F16, F32, F32),
]
KINDS = [(before, activation) for before in (True, False) for activation in ("silu", "sigmoid")]
N = 24


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # tests run beside one another


def _draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=F64).to(device, dtype)


def _given(shape: tuple[int, ...], dtypes: tuple, device: str = "cpu", ndim: int = 1) -> tuple[Any, ...]:
    """x, gate, weight, dY."""
    x_dtype, gate_dtype, weight_dtype = dtypes
    weight = None if weight_dtype is None else _draw(*shape[-ndim:], dtype=weight_dtype, device=device)
    x, gate, dy = (_draw(*shape, dtype=dtype, device=device) for dtype in (x_dtype, gate_dtype, x_dtype))
    return x, gate, weight, dy


def _results(x: Tensor, gate: Tensor, weight: Tensor | None, dy: Tensor, **options: Any) -> tuple:
    """(y, dX, dGate, dW) of leaves with the strides given."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, gate, weight)]
    with poisoned():
        y = gated_rms_norm(*leaves, **options)  # type: ignore[arg-type]
        found = torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)
    return y.detach(), *found, *[None] * (3 - len(found))


def _equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)


def _assert_near(given: tuple, found: tuple, how: Gated, ndim: int = 1) -> None:
    """Each result within a few roundings of its largest number, or of dX's and dGate's largest term: of few numbers the
    sum of the terms may nearly vanish. (The kernels' tests have tight bounds.)"""
    x, gate, weight, dy = given
    wide = [None if t is None else t.double() for t in (x, gate, weight)]
    exact = (
        reference_gated_forward(*wide, how, ndim),  # type: ignore[arg-type]
        *reference_gated_backward(dy.double(), *wide, how, ndim),  # type: ignore[arg-type]
    )
    for name, a, b, like in zip(("y", "dX", "dGate", "dW"), found, exact, (x, x, gate, weight), strict=True):
        assert (a is None) == (b is None) == (like is None), name
        if a is None or b is None:
            continue
        assert (a.dtype, a.shape, a.is_contiguous()) == (like.dtype, like.shape, True), name
        unit = torch.finfo(a.dtype).eps + 32 * torch.finfo(accumulation_dtype(a.dtype)).eps
        if name == "y":
            unit *= {"gemma": 1, "llama": 1.5, "none": 2.5}[how.casting_mode]
        if a.numel():
            bound = unit * b.abs().max()
            if name in ("dX", "dGate"):
                bound += 8 * torch.finfo(accumulation_dtype(a.dtype)).eps * _largest_term(name, dy, *wide, how, ndim)
            assert (a.double() - b).abs().max() <= bound, name


def _largest_term(name: str, dy: Tensor, x: Any, gate: Any, weight: Any, how: Gated, ndim: int) -> Tensor:
    """Of what is added up to dV, times what that is multiplied with."""
    dy, x = dy.double().flatten(-ndim), x.flatten(-ndim)
    act = torch.ones_like(x) if gate is None else activated(gate.flatten(-ndim), how.activation)
    scale = 1.0 if weight is None else weight.flatten() + how.offset
    if how.norm_before_gate:
        return (dy * act * scale * reference_gated_rstd(x, how)).abs().max()
    largest = (dy * scale * reference_gated_rstd(x * act, how)).abs().amax(-1, keepdim=True)
    return (largest * (x if name == "dGate" else act)).abs().max()


# --- right ---


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_every_dtype_kind_and_mode_is_right_to_rounding(device, dtypes, kind, mode, offset) -> None:
    given = _given((5, 7, N), dtypes, device)
    how = Gated(1e-6, offset, mode, *kind, 8)
    options = how._asdict()
    _assert_near(given, _results(*given, **options), how)


@pytest.mark.parametrize("rows", [(), (1,), (2, 1, 3), (301,)])
@pytest.mark.parametrize(("hidden", "group"), [(3, 3), (34, 17), (4096, 1024), (17001, 17001)])
def test_every_shape_is_right_to_rounding(device, hidden: int, group: int, rows: tuple[int, ...]) -> None:
    for before in (True, False):
        given = _given((*rows, hidden), (F32, F32, F32), device)
        how = Gated(1e-6, 0.0, "llama", before, "silu", group)
        _assert_near(given, _results(*given, norm_before_gate=before, group_size=group), how)


@pytest.mark.parametrize("group", [3, 6, 12, 24])
def test_several_normalized_dims_are_cut_into_groups_as_one(device, group: int) -> None:
    given = _given((2, 5, 4, 6), (F32, F32, F32), device, ndim=2)
    found = _results(*given, group_size=group)
    x, gate, weight, dy = given
    flat = _results(x.flatten(2), gate.flatten(2), weight.flatten(), dy.flatten(2), group_size=group)
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(found, flat, strict=True))
    _assert_near(given, found, Gated(1e-6, 0.0, "llama", True, "silu", group), 2)


def test_without_a_gate_and_groups_it_is_the_norm(device: str) -> None:
    for mode, dtype in itertools.product(["llama", "gemma", "none"], [BF16, F32]):
        x, _, weight, dy = _given((5, 7, N), (dtype, dtype, F32), device)
        leaves = [t.requires_grad_() for t in (x, weight)]
        y, expected = (
            norm(leaves[0], *gate, leaves[1], casting_mode=mode, offset=1.0)  # type: ignore[operator]
            for norm, gate in ((gated_rms_norm, (None,)), (rms_norm, ()))
        )
        torch.testing.assert_close(y, expected, rtol=torch.finfo(dtype).eps, atol=0.0)
        for a, b in zip(*(torch.autograd.grad(out, leaves, dy) for out in (y, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_gradcheck_passes_in_float64(kind, weighted: bool) -> None:
    leaves = [_draw(3, 6, dtype=F64).requires_grad_() for _ in range(2)]
    weight = _draw(6, dtype=F64).requires_grad_() if weighted else None
    options = {"norm_before_gate": kind[0], "activation": kind[1], "group_size": 3, "offset": 1.0}
    assert torch.autograd.gradcheck(lambda *t: gated_rms_norm(*t, **options), (*leaves, weight))


@pytest.mark.parametrize("rows", [(0,), (3, 0, 2)])
def test_zero_rows_give_zero_dw(device, rows) -> None:
    y, dx, d_gate, dw = _results(*_given((*rows, 8), (BF16, F32, BF16), device), group_size=4)
    assert y.shape == dx.shape == d_gate.shape == (*rows, 8) and d_gate.dtype == F32
    assert torch.equal(dw, torch.zeros_like(dw))


@pytest.mark.parametrize("rows_and_width", [(301, 17, 17), (301, 128, 64), (80, 4096, 1024), (5, 20001, 20001)])
@pytest.mark.parametrize("dtypes", [(F64, F64, F64), (BF16, BF16, F32), (BF16, F32, BF16)])
def test_a_row_is_the_same_alone_as_among_others(device, dtypes, rows_and_width) -> None:
    rows, width, group = rows_and_width
    x, gate, weight, dy = _given((rows, width), dtypes, device)
    for before in (True, False):
        options = {"norm_before_gate": before, "group_size": group}
        whole = _results(x, gate, weight, dy, **options)
        for first, last in ((0, 1), (rows - 1, rows), (1, 4), (rows // 3, 2 * rows // 3)):
            part = slice(first, last)
            found = _results(x[part], gate[part], weight, dy[part], **options)
            assert _equal(found[:3], tuple(each[part] for each in whole[:3]))
        assert _equal(_results(x, gate, weight, dy, **options), whole)


# --- memory layouts ---

VIEWS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "rows_transposed": lambda new: new(6, 5, N).transpose(0, 1),
    "slice_of_a_fused_projection": lambda new: new(5, 6, 3 * N)[..., N : 2 * N],
    "heads_of_a_fused_qkv": lambda new: new(5, 3, 6, N)[:, 1],
    "one_row_expanded": lambda new: new(N).expand(5, 6, N),
    "every_other_column": lambda new: new(5, 6, 2 * N)[..., ::2],
    "negative_bit": lambda new: torch._neg_view(new(5, 6, N)),
    "unaligned": lambda new: new(5 * 6 * N + 1)[1:].view(5, 6, N),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F32)])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_view_gives_the_bits_of_its_copy(device, dtypes, view: str, which: int, before: bool) -> None:
    given = list(_given((5, 6, N), dtypes, device))
    dtype = given[which].dtype
    given[which] = VIEWS[view](lambda *shape: _draw(*shape, dtype=dtype, device=device))
    options = {"norm_before_gate": before, "group_size": 12}
    found = _results(*given, **options)
    given[which] = given[which].resolve_neg().clone(memory_format=torch.contiguous_format)
    assert _equal(found, _results(*given, **options))


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
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_what_is_frozen_gets_no_gradient_and_the_others_are_unchanged(needs, before: bool, observed: bool) -> None:
    *leaves, dy = _given((5, N), (BF16, F32, F32))
    expected = _results(*leaves, dy, norm_before_gate=before)[1:]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    if observed:
        with _Calls() as mode:
            gated_rms_norm(*leaves, norm_before_gate=before).backward(dy)
        ours = [(name, args) for namespace, name, args in mode.calls if namespace == "meshnorm"]
        assert [name for name, _ in ours] == ["gated_forward", "gated_backward"]
        assert (*ours[1][1][10:12], ours[1][1][12] is not None) == needs
    else:
        gated_rms_norm(*leaves, norm_before_gate=before).backward(dy)
    found = tuple(leaf.grad for leaf in leaves)
    assert _equal(found, tuple(grad if need else None for grad, need in zip(expected, needs, strict=True)))


def test_nothing_is_saved_where_nothing_needs_a_gradient() -> None:
    x, gate, weight, _ = _given((5, N), (BF16, F32, BF16))
    expected = gated_rms_norm(x, gate, weight)
    assert not expected.requires_grad
    with torch.no_grad():
        assert torch.equal(gated_rms_norm(x.requires_grad_(), gate, weight), expected)


# --- memory ---


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group", [None, 8])
def test_x_the_gate_and_one_number_a_row_and_group_are_saved(device, before: bool, group: int | None) -> None:
    x, gate, weight, _ = _given((5, 6, N), (BF16, BF16, F32), device)
    saved: list[Tensor] = []
    leaves = [t.requires_grad_() for t in (x, gate, weight)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_rms_norm(*leaves, norm_before_gate=before, group_size=group)
    known = {t.untyped_storage().data_ptr() for t in leaves}
    (rstd,) = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert len(saved) == 4 and (rstd.numel(), rstd.dtype) == (30 * N // (group or N), F32)


@pytest.mark.parametrize("before", [True, False])
def test_nothing_larger_than_a_block_is_made_beside_the_results(before: bool) -> None:
    x, gate, weight, dy = _given((1 << 13, 512), (BF16, BF16, BF16))
    leaves = [t.requires_grad_() for t in (x, gate, weight)]

    def allocated(call: Callable[[], Any]) -> tuple[list[int], Any]:
        with torch.profiler.profile(profile_memory=True) as profiler:
            result = call()
        sizes = [event.self_cpu_memory_usage for event in profiler.events() or ()]
        return [size for size in sizes if size > 1 << 21], result

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a block is 1 MiB for each thread
    try:
        sizes, y = allocated(lambda: gated_rms_norm(*leaves, norm_before_gate=before, group_size=128))
        assert sizes == [x.nbytes]
        sizes, _ = allocated(lambda: torch.autograd.grad(y, leaves, dy))
        assert sizes == [x.nbytes] * 2
    finally:
        torch.set_num_threads(threads)


def test_arguments_and_gradients_are_not_modified(device: str) -> None:
    given = _given((5, N), (F32, F32, F32), device)
    copies, versions = [t.clone() for t in given], [t._version for t in given]
    for before in (True, False):
        _results(*given, norm_before_gate=before)
    assert _equal(tuple(given), tuple(copies)) and [t._version for t in given] == versions


def test_gradients_accumulate_over_backward_calls(device: str) -> None:
    given = [_given((5, N), (F32, F32, F32), device) for _ in range(2)]
    leaves = [t.detach().requires_grad_() for t in given[0][:3]]
    expected = [_results(*leaves, each[3])[1:] for each in given]  # type: ignore[arg-type]
    for each in given:
        gated_rms_norm(*leaves).backward(each[3])
    assert _equal(tuple(leaf.grad for leaf in leaves), tuple(a + b for a, b in zip(*expected, strict=True)))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_change_before_the_backward_is_noticed(which: int) -> None:
    leaves = [t.requires_grad_() for t in _given((5, N), (F32, F32, F32))[:3]]
    used = [leaf * 1.0 for leaf in leaves]
    y = gated_rms_norm(*used)
    with torch.no_grad():
        used[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("of", [0, 1, 2])
def test_double_backward_is_refused(of: int, observed: bool) -> None:
    leaves = [t.requires_grad_() for t in _given((5, N), (F64, F64, F64))[:3]]

    def penalty() -> None:
        found = torch.autograd.grad(gated_rms_norm(*leaves).sum(), leaves, create_graph=True)
        with pytest.raises(DoubleBackwardError, match=r"create_graph=False.*reference_gated_forward"):
            found[of].square().sum().backward()

    if observed:
        with _Calls():
            penalty()
    else:
        penalty()


def test_x_may_be_its_own_gate() -> None:
    x, _, weight, dy = _given((5, N), (F64, F64, F64))
    x.requires_grad_()
    gated_rms_norm(x, x, weight).backward(dy)
    how = Gated(1e-6, 0.0, "llama", True, "silu", N)
    dx, d_gate, _ = reference_gated_backward(dy, x.detach(), x.detach(), weight, how)
    torch.testing.assert_close(x.grad, dx + d_gate, rtol=1e-12, atol=1e-12)


# --- what models compute ---


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight_dtype", [F32, None])
def test_before_the_gate_it_is_the_norm_s_rounded_product_times_the_activation(dtype, weight_dtype) -> None:
    """Multiples of 1/8, so that Σ x² is exact in whatever order it is summed."""
    x, gate = (torch.randint(-(2**5), 2**5, (70, 256)) / 8).to(dtype), _draw(70, 256, dtype=dtype)
    weight = _draw(256, dtype=weight_dtype or dtype)
    x_hat = rms_norm(x).float()
    product = (x_hat * weight.float()).to(torch.promote_types(dtype, weight.dtype))
    expected = (product * activated(gate.float(), "silu")).to(dtype)
    y = gated_rms_norm(x, gate, weight)
    assert (y == expected).double().mean() > 0.999  # silu itself is torch's but for its last bit
    torch.testing.assert_close(y, expected, rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    m, n = (1 << 31) // 8192 + 3, 8192
    x = torch.zeros(m, n, dtype=BF16, device="cuda")
    gate, dy = x.clone(), x.clone()
    tail = [_draw(5, n, dtype=BF16, device="cuda") for _ in range(3)]
    for whole, part in zip((x, gate, dy), tail, strict=True):
        whole[-5:] = part
    weight = _draw(n, dtype=BF16, device="cuda")
    options = {"norm_before_gate": False, "group_size": 1024}
    found = _results(x, gate, weight, dy, **options)
    expected = _results(tail[0], tail[1], weight, tail[2], **options)
    assert _equal(tuple(t[-5:] for t in found[:3]), expected[:3])
    assert math.isfinite(found[3].double().sum().item())
