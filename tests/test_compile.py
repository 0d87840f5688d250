"""The norm under all that looks at ops: torch.compile, fake and meta tensors, tracing, modes, checkpointing."""

from __future__ import annotations

import functools
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshnorm
from meshnorm import ops, ops_add, rms_norm

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
OPTIONS = [
    {},
    {"offset": 1.0, "casting_mode": "gemma"},
    {"casting_mode": "none", "eps": None},
    {"in_place": True},
]
FORWARD, BACKWARD = torch.ops.meshnorm.forward.default, torch.ops.meshnorm.backward.default


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))
    torch._dynamo.reset()


def _results(
    norm: Callable[..., Tensor], x: Tensor, weight: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, dX, dW)."""
    x = x.detach().requires_grad_()
    if weight is None:
        y = norm(x)
        return y.detach(), torch.autograd.grad(y, x, dy)[0], None
    weight = weight.detach().requires_grad_()
    y = norm(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def _assert_same_bits(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b))


# --- torch.compile ---


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(F64, F64), (F32, BF16), (BF16, BF16), (BF16, F32), (BF16, None)])
def test_a_compiled_norm_gives_the_bits_of_eager(dtype, weight_dtype, options: dict) -> None:
    x, dy = torch.randn(6, 7, 33).to(dtype), torch.randn(6, 7, 33).to(dtype)
    weight = None if weight_dtype is None else torch.randn(33).to(weight_dtype)

    def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return rms_norm(x, weight, **options)

    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    _assert_same_bits(_results(compiled, x, weight, dy), _results(norm, x, weight, dy))


@pytest.mark.parametrize(
    "view",
    [
        lambda new: new(4, 5, 24).transpose(0, 1),
        lambda new: new(5, 4, 72)[..., 24:48],
        lambda new: new(5, 4, 48)[..., ::2],
        lambda new: new(1, 4, 24).expand(5, 4, 24),
        lambda new: torch._neg_view(new(5, 4, 24)),
    ],
    ids=["transposed", "fused_qkv", "every_other_column", "expanded", "negative_bit"],
)
def test_a_compiled_norm_of_a_view_gives_the_bits_of_eager(view: Callable) -> None:
    x, dy, weight = view(torch.randn), view(torch.randn), torch.randn(24)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    _assert_same_bits(_results(compiled, x, weight, dy), _results(rms_norm, x, weight, dy))


def test_a_compiled_norm_of_zero_rows_works() -> None:
    x, weight = torch.randn(0, 8), torch.randn(8)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    y, dx, dw = _results(compiled, x, weight, torch.randn(0, 8))
    assert y.shape == dx.shape == (0, 8)
    assert torch.equal(dw, torch.zeros(8))


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler, which inductor calls on a CPU"
)
def test_inductor_gives_the_bits_of_eager_in_the_middle_of_a_model() -> None:
    x, weight, dy = torch.randn(3, 5, 48), torch.randn(48), torch.randn(3, 5, 48)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return x + rms_norm(x.transpose(0, 1), weight, offset=1.0, casting_mode="gemma").transpose(0, 1)

    compiled = torch.compile(block, fullgraph=True, backend="inductor")
    _assert_same_bits(_results(compiled, x, weight, dy), _results(block, x, weight, dy))


ROWS = [5, 8, 13, 64, 2, 21]


def _graphs_after_each(
    norm: Callable[..., Tensor], counter: CompileCounterWithBackend, mark: bool = False
) -> list[int]:
    """How many graphs there are after a forward and backward with each number of rows, all compared with eager."""
    weight, counts = torch.randn(16).requires_grad_(), []
    for rows in ROWS:
        x, dy = torch.randn(rows, 3, 16), torch.randn(rows, 3, 16)
        expected = _results(rms_norm, x, weight, dy)
        x.requires_grad_()
        if mark:
            torch._dynamo.mark_dynamic(x, 0)  # an error where a guard would pin the size
        y = norm(x, weight)
        _assert_same_bits((y, *torch.autograd.grad(y, (x, weight), dy)), expected)
        counts.append(counter.frame_count)
    return counts


def test_a_norm_with_dynamic_rows_is_compiled_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(rms_norm, fullgraph=True, backend=counter)
    assert _graphs_after_each(norm, counter, mark=True) == [1] * len(ROWS)


def test_a_norm_compiled_as_dynamic_does_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(rms_norm, fullgraph=True, backend=counter, dynamic=True)
    # The first call may take two tries: dynamo begins with eps and offset as symbols, and an op's floats are constants.
    first, *others = _graphs_after_each(norm, counter)
    assert first <= 2
    assert others == [first] * len(others)


def test_the_first_change_of_the_number_of_rows_is_the_only_one_that_recompiles() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(rms_norm, fullgraph=True, backend=counter)
    assert _graphs_after_each(norm, counter) == [1] + [2] * (len(ROWS) - 1)


@pytest.mark.parametrize("arguments", [{}, {"eps": 1e-5, "offset": 1.0, "casting_mode": "gemma"}])
def test_a_compiled_module_gives_the_bits_of_eager_and_is_compiled_once(arguments: dict) -> None:
    module = meshnorm.RMSNorm(16, **arguments)
    torch.nn.init.normal_(module.weight)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for rows in (3, 9, 40):
        x, dy = torch.randn(rows, 16), torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        found, expected = [], []
        for norm, into in ((compiled, found), (module, expected)):
            y = norm(x.requires_grad_())
            into += [y, *torch.autograd.grad(y, (x, module.weight), dy)]
        _assert_same_bits(tuple(found), tuple(expected))
    assert counter.frame_count == 1


def test_a_bad_argument_is_refused_under_compile_too() -> None:
    # Inside the frame the error would become dynamo's own; a compiled caller lets it through.
    compiled = torch.compile(rms_norm, backend="aot_eager")
    with pytest.raises(Exception, match="weight has shape"):
        compiled(torch.randn(3, 16), torch.randn(8))


def test_export_keeps_the_op_and_the_number_of_rows_free() -> None:
    module = meshnorm.RMSNorm(16)
    torch.nn.init.normal_(module.weight)
    rows = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(module, (torch.randn(5, 16),), dynamic_shapes=rows)
    assert FORWARD in [node.target for node in exported.graph.nodes]
    x = torch.randn(11, 16)
    assert torch.equal(exported.module()(x), module(x))


def test_double_backward_of_a_compiled_norm_is_refused() -> None:
    x = torch.randn(3, 16).requires_grad_()
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    (dx,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):  # torch's own words
        dx.sum().backward()


# --- the ops ---


def _samples() -> dict[str, list[tuple]]:
    """Arguments of each op, several ways."""
    x, dy = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    weight, rstd, total = torch.randn(8), torch.rand(4, 3), torch.rand(4, 3)
    view, half = torch.randn(3, 4, 16)[..., ::2].transpose(0, 1), torch.randn(4, 3, 8).bfloat16()
    empty, no_rows = torch.randn(0, 3, 8), torch.empty(0, 3)
    both, two = torch.randn(3, 8), torch.rand(4)  # two normalized dims: their weight, one number a row
    return {
        "forward": [
            (x, weight, 1e-6, 0.0, "llama", 1),
            (view, None, 1e-6, 0.0, "none", 1),
            (half, weight, 1e-6, 1.0, "gemma", 1),
            (x.double(), both.double(), 1e-6, 0.0, "llama", 2),
            (empty, weight, 1e-6, 0.0, "llama", 1),
        ],
        "backward": [
            (dy, x, weight, rstd, 0.0, 1, True, True, F32),
            (view, x, None, rstd, 0.0, 1, True, False, F32),
            (dy.bfloat16(), half, weight, rstd, 1.0, 1, False, True, BF16),
            (dy, view, both, two, 0.0, 2, True, True, F32),
            (empty, empty, weight, no_rows, 0.0, 1, True, True, F32),
        ],
        "statistic": [(x, 1), (view, 2), (half, 1), (empty, 1)],
        "apply": [
            (x, weight, total, 16, 1e-6, 0.0, "llama", 1),
            (view, None, total, 8, 1e-6, 0.0, "none", 1),
            (half, both, two, 48, 1e-6, 1.0, "gemma", 2),
            (empty, weight, no_rows, 16, 1e-6, 0.0, "llama", 1),
            (x, weight, total, 16, 1e-6, 0.0, "llama", 1, BF16),
        ],
        "backward_statistic": [
            (dy, x, weight, rstd, 0.0, 1),
            (view, half, None, rstd, 0.0, 1),
            (dy, x, both, two, 1.0, 2),
            (empty, empty, weight, no_rows, 0.0, 1),
        ],
        "backward_apply": [
            (dy, x, weight, rstd, total, 16, 0.0, 1, True, True, F32),
            (view, x, None, rstd, total, 8, 0.0, 1, True, False, F32),
            (dy.bfloat16(), half, weight, rstd, total, 16, 1.0, 1, False, True, F32),
            (empty, empty, weight, no_rows, no_rows, 16, 0.0, 1, True, True, F32),
        ],
        "add_forward": [
            (x, dy, weight, 1e-6, 0.0, "llama", 1),
            (half, view, None, 1e-6, 0.0, "none", 1),
            (view, half, both, 1e-6, 1.0, "gemma", 2),
            (empty, empty.bfloat16(), weight, 1e-6, 0.0, "llama", 1),
        ],
        "add_statistic": [(x, dy, 1), (view, half, 2), (half, x, 1), (empty, empty, 1)],
        "add_backward": [
            (dy, x, weight, rstd, None, 0.0, 1, F32, None, F32),
            (half, x, None, rstd, view, 0.0, 1, BF16, F32, None),
            (dy.bfloat16(), half, both, two, half, 1.0, 2, None, None, BF16),
            (empty, empty, weight, no_rows, empty, 0.0, 1, F32, BF16, F32),
        ],
        "add_backward_apply": [
            (dy, x, weight, rstd, None, total, 16, 0.0, 1, F32, None, F32),
            (half, x, None, rstd, view, total, 8, 0.0, 1, BF16, F32, None),
            (empty, empty, weight, no_rows, empty, no_rows, 16, 0.0, 1, F32, BF16, F32),
        ],
    }


OPS = ["forward", "backward", "statistic", "apply", "backward_statistic", "backward_apply"]
OPS += ["add_forward", "add_statistic", "add_backward", "add_backward_apply"]


@pytest.mark.parametrize("name", OPS)
def test_opcheck_passes(name: str) -> None:
    for arguments in _samples()[name]:
        torch.library.opcheck(getattr(torch.ops.meshnorm, name).default, arguments)


def test_opcheck_passes_with_gradients() -> None:
    for x, weight, *rest in _samples()["forward"]:
        inputs = [None if t is None else t.detach().requires_grad_() for t in (x, weight)]
        torch.library.opcheck(FORWARD, (*inputs, *rest))


def test_every_op_is_checked() -> None:
    names = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if "meshnorm::" in name and "::gated_" not in name and "::qk_" not in name  # have files of their own
    }
    assert names == set(OPS) == set(_samples())


@pytest.mark.parametrize("name", OPS)
def test_a_direct_call_gives_the_bits_of_the_op(name: str) -> None:
    call = getattr(ops_add if name.startswith("add_") else ops, name)
    for arguments in _samples()[name]:
        direct, through_op = call.direct(*arguments), getattr(torch.ops.meshnorm, name)(*arguments)
        if isinstance(direct, Tensor):
            direct, through_op = (direct,), (through_op,)
        _assert_same_bits(direct, through_op)


# --- fake and meta tensors, tracing, modes ---


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize("weight_dtype", [None, F32, BF16])
def test_fake_tensors_have_the_metadata_of_real_ones(dtype, weight_dtype) -> None:
    x, dy = torch.randn(5, 48).to(dtype)[:, ::2], torch.randn(5, 24).to(dtype)
    weight = None if weight_dtype is None else torch.randn(24).to(weight_dtype)
    expected = _results(rms_norm, x, weight, dy)
    with FakeTensorMode() as mode:
        found = _results(rms_norm, *(None if t is None else mode.from_tensor(t) for t in (x, weight, dy)))
    for fake, real in zip(found, expected, strict=True):
        assert (fake is None) == (real is None)
        if fake is not None and real is not None:
            assert isinstance(fake, FakeTensor)
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_meta_tensors_work_and_cost_no_memory() -> None:
    x = torch.empty(2**20, 2**15, dtype=BF16, device="meta")  # 64 GiB
    weight = torch.empty(2**15, dtype=F32, device="meta")
    y, dx, dw = _results(rms_norm, x, weight, torch.empty_like(x))
    assert [t.device.type for t in (y, dx, dw)] == ["meta"] * 3
    assert (y.shape, y.dtype, dx.shape, dx.dtype) == (x.shape, BF16, x.shape, BF16)
    assert (dw.shape, dw.dtype) == (weight.shape, F32)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_both_ops(tracing_mode: str) -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = rms_norm(x, weight)
        return y, *torch.autograd.grad(y.square().sum(), (x, weight))

    x, weight = torch.randn(5, 16).requires_grad_(), torch.randn(16).requires_grad_()
    graph = make_fx(step, tracing_mode=tracing_mode)(x, weight)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(FORWARD) == targets.count(BACKWARD) == 1
    x, weight = torch.randn(5, 16).requires_grad_(), torch.randn(16).requires_grad_()
    _assert_same_bits(graph(x, weight), step(x, weight))


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_ops_and_nothing_inside_them() -> None:
    x, weight, dy = torch.randn(5, 16), torch.randn(16), torch.randn(5, 16)
    expected = _results(rms_norm, x, weight, dy)
    with _Seen() as seen:
        found = _results(rms_norm, x, weight, dy)
    _assert_same_bits(found, expected)
    assert seen.ops.count(FORWARD) == seen.ops.count(BACKWARD) == 1
    assert {op.namespace for op in seen.ops} - {"meshnorm"} <= {"aten"}
    assert not any(op._opname in ("mul", "rsqrt", "rsqrt_", "sum") for op in seen.ops)


def test_a_mode_entered_for_the_backward_alone_sees_it() -> None:
    x = torch.randn(5, 16).requires_grad_()
    y = rms_norm(x)
    with _Seen() as seen:
        y.backward(torch.randn(5, 16))
    assert BACKWARD in seen.ops


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_norm() -> None:
    weight = torch.randn(16)
    x = torch.randn(5, 16)
    traced = torch.jit.trace(lambda x: rms_norm(x, weight), x)
    other = torch.randn(5, 16)
    assert torch.equal(traced(other), rms_norm(other, weight))
    assert "meshnorm::forward" in str(traced.graph)


# --- checkpointing ---


def test_checkpointing_gives_the_same_gradients() -> None:
    x, weight, dy = torch.randn(5, 16), torch.randn(16), torch.randn(5, 16)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(rms_norm, x, weight, use_reentrant=False)  # type: ignore[return-value]

    _assert_same_bits(_results(norm, x, weight, dy), _results(rms_norm, x, weight, dy))


def test_checkpointing_gives_the_same_gradients_under_create_graph() -> None:
    # A checkpointed tensor can be unpacked once only.
    x, weight = torch.randn(5, 16).requires_grad_(), torch.randn(16).requires_grad_()
    y = checkpoint(rms_norm, x, weight, use_reentrant=False)
    found = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    _assert_same_bits(found, torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight)))


@pytest.mark.parametrize(("keep", "runs"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_may_keep_the_norm(keep: bool, runs: int, compiled: bool) -> None:
    x, weight, dy = torch.randn(5, 16), torch.randn(16), torch.randn(5, 16)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keep and op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.sin(), weight).cos()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    if compiled:
        norm = torch.compile(norm, backend="aot_eager", fullgraph=True)
    expected = _results(block, x, weight, dy)
    _assert_same_bits(_results(norm, x, weight, dy), expected)
    if not compiled:
        with _Seen() as seen:
            _results(norm, x, weight, dy)
        assert seen.ops.count(FORWARD) == runs


# --- torch.func ---


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_gives_what_a_loop_gives() -> None:
    x, weight = torch.randn(4, 5, 16, dtype=F64), torch.randn(4, 16, dtype=F64)
    each = torch.stack([rms_norm(x[i], weight[i]) for i in range(4)])
    pairs = [
        (torch.func.vmap(rms_norm, in_dims=(0, None))(x, weight[0]), rms_norm(x, weight[0])),
        (torch.func.vmap(rms_norm)(x, weight), each),
        (torch.func.vmap(rms_norm, in_dims=1, out_dims=1)(x), rms_norm(x)),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=16 * torch.finfo(F64).eps, atol=0.0)


def _reference(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-6)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda norm, x, v: torch.func.grad(lambda x: (norm(x) * v).sum())(x),
    "vjp": lambda norm, x, v: torch.func.vjp(norm, x)[1](v)[0],
    "jvp": lambda norm, x, v: torch.func.jvp(norm, (x,), (v,))[1],
    "jacrev": lambda norm, x, v: torch.func.jacrev(norm)(x),
    "jacfwd": lambda norm, x, v: torch.func.jacfwd(norm)(x),
    "hessian": lambda norm, x, v: torch.func.hessian(lambda x: (norm(x) * v).sum())(x),
    "functionalize": lambda norm, x, v: torch.func.functionalize(norm)(x),
    "batched_grad": lambda norm, x, v: torch.autograd.grad(
        norm(y := x.clone().requires_grad_()), y, torch.stack([v, x]), is_grads_batched=True
    )[0],
    "vectorized_jacobian": lambda norm, x, v: torch.autograd.functional.jacobian(norm, x, vectorize=True),
    "forward_ad": lambda norm, x, v: _forward_ad(norm, x, v),
    "forward_ad_of_a_leaf": lambda norm, x, v: _forward_ad(norm, x.clone().requires_grad_(), v),
}


def _forward_ad(norm: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        found = torch.autograd.forward_ad.unpack_dual(norm(torch.autograd.forward_ad.make_dual(x, v))).tangent
    assert found is not None, "the tangent was lost without a word"
    return found


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_right_or_refused_but_never_wrong(name: str) -> None:
    x, v = torch.randn(3, 8, dtype=F64), torch.randn(3, 8, dtype=F64)
    try:
        found = TRANSFORMS[name](rms_norm, x, v)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError; meshnorm's and torch's refusals alike
        assert name not in ("batched_grad", "vectorized_jacobian"), "that is what autograd itself offers"
        return
    torch.testing.assert_close(found, TRANSFORMS[name](_reference, x, v))
