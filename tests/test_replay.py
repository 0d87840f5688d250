"""Calls of a signature seen before: they launch what the first one launched, and give its bits.

On a CPU with a driver made up of Triton's interpreter; tests marked gpu with the real one.
"""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import FakeDriver, with_driver
from test_kernels_triton import interpreter_does_as_the_hardware  # noqa: F401
from triton import knobs

from meshnorm import errors, functional, ops, replayed, rms_norm
from meshnorm.kernels import launching, raw_launch, replay

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
N = 64


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    if CUDA:
        pytest.skip("Triton's kernels are compiled here, and the driver is a real one: see the tests marked gpu")
    functional._known.clear()
    yield with_driver(monkeypatch)
    functional._known.clear()


def ordinary(x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, mode: str = "llama") -> Tensor:
    return ops.forward.direct(x, weight, eps, offset, mode, 1 if weight is None else weight.dim())[0]  # type: ignore[attr-defined]


def with_gradients(x: Tensor, weight: Tensor | None, dy: Tensor, **options: Any) -> list[Tensor]:
    """y and the gradients of what requires one."""
    y = rms_norm(x, weight, **options)
    wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        assert torch.equal(one, other)


# --- what is replayed ---


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_second_call_is_one_launch_forward_and_gives_the_bits_of_the_first(driver, dtype, weight) -> None:
    weight = None if weight is None else torch.randn(N).to(weight)
    for shape in ((7, N), (2, 3, N), (N,)):
        x = torch.randn(shape).to(dtype)
        first = rms_norm(x, weight)
        assert driver.counts() == (1, 0)
        second = rms_norm(x, weight)
        assert driver.counts() == (0, 1)
        assert_same([second, second], [first, ordinary(x, weight)])
        other = torch.randn(shape).to(dtype)
        driver.counts()
        assert_same([rms_norm(other, weight)], [ordinary(other, weight)])
        assert driver.counts() == (1, 1)


@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("rows", [3, 300])
def test_a_second_call_is_two_launches_backward_and_gives_the_bits_of_the_first(driver, rows, frozen) -> None:
    x = torch.randn(rows, N, requires_grad=frozen != "x")
    weight = torch.randn(N, requires_grad=frozen != "weight")
    dy = torch.randn(rows, N)
    first = with_gradients(x, weight, dy)
    ordinary_launches, replayed_launches = driver.counts()
    partials = frozen != "weight" and rows > 64  # few rows are one program's, which writes dW itself
    assert (ordinary_launches, replayed_launches) == (2 + partials, 0)
    assert_same(with_gradients(x, weight, dy), first)
    assert driver.counts() == (0, ordinary_launches)
    x2 = torch.randn(rows, N, requires_grad=frozen != "x")
    again = with_gradients(x2, weight, dy)
    functional._known.clear()
    assert_same(again, with_gradients(x2, weight, dy))


def test_y_has_the_same_bits_without_a_gradient_and_rstd_is_not_allocated(driver) -> None:
    x, weight = torch.randn(5, N), torch.randn(N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "empty_per_row", lambda *a: pytest.fail("rstd is allocated"))
        ys = [rms_norm(x, weight) for _ in range(2)]
    assert_same(ys, [ordinary(x, weight)] * 2)


def test_several_normalized_dims_and_strided_rows_are_replayed(driver) -> None:
    qkv = torch.randn(4, 6, 3 * N)
    for x, weight in ((torch.randn(4, 3, 8), torch.randn(3, 8)), (qkv[..., N : 2 * N], torch.randn(N))):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        dy = torch.randn(x.shape)
        first = with_gradients(x, weight, dy)
        driver.counts()
        assert_same(with_gradients(x, weight, dy), first)
        assert driver.counts()[0] == 0


def test_a_replay_launches_on_the_current_stream(driver, monkeypatch) -> None:
    made = replay.Replay.__init__

    def on_a_gpu(self: replay.Replay, *args: Any) -> None:
        made(self, *args)
        self._device = 0

    monkeypatch.setattr(replay.Replay, "__init__", on_a_gpu)
    x = torch.randn(3, N)
    rms_norm(x)
    driver.counts()
    for stream in (11, 2**40):
        driver.stream = stream
        rms_norm(x)
        assert driver.launches[-1].stream == stream and driver.launches[-1].is_replayed
    driver.counts()
    driver.device = 1  # another one is the current device: launches switch to x's and back
    assert_same([rms_norm(x)], [ordinary(x, None)])
    assert driver.counts() == (2, 0)


# --- what is not ---


def test_what_is_copied_first_is_never_replayed(driver) -> None:
    weight = torch.randn(2 * N)[::2]
    odd_strides = torch.randn(N, 5).t()
    for x, w in ((torch.randn(5, N), weight), (odd_strides, None), (torch.randn(3, 2, 4, N).permute(1, 0, 2, 3), None)):
        for _ in range(3):
            other = torch.empty_strided(x.shape, x.stride()).normal_()
            assert torch.equal(rms_norm(other, w), ordinary(other, w))
        assert driver.counts()[1] == 0


def test_other_alignments_take_the_ordinary_way_and_come_back(driver) -> None:
    weight = torch.randn(N)
    memory = torch.randn(5 * N + 4)
    even, odd = memory[: 5 * N].view(5, N), memory[1 : 5 * N + 1].view(5, N)
    for x, launches in ((odd, (1, 0)), (even, (1, 0)), (odd, (1, 0)), (even, (0, 1))):
        driver.counts()
        y = rms_norm(x, weight)
        assert driver.counts() == launches
        assert torch.equal(y, ordinary(x, weight))


def test_a_negative_view_is_not_taken_for_its_memory(driver) -> None:
    z = torch.randn(5, N, dtype=torch.complex64)
    x = torch.view_as_real(z)[..., 1].contiguous()
    weight = torch.randn(N)
    for _ in range(2):
        rms_norm(x, weight)
    negative = torch._neg_view(x)
    assert negative.is_neg() and negative.stride() == x.stride()
    assert torch.equal(rms_norm(negative, weight), ordinary(-x, weight))
    assert torch.equal(rms_norm(x, torch._neg_view(weight)), ordinary(x, -weight))
    xg = x.clone().requires_grad_()
    dy = torch.randn(5, N)
    for _ in range(2):
        with_gradients(xg, weight, dy)
    assert_same(with_gradients(xg, weight, torch._neg_view(dy)), with_gradients(xg, weight, -dy))


def test_a_tensor_that_outlived_its_transform_is_looked_into(driver) -> None:
    """It is a wrapper without memory, and of the type of a plain tensor."""
    leaked: list[Tensor] = []

    def leaking(x: Tensor) -> Tensor:
        leaked.append(x)
        return x.sum()

    value, weight = torch.randn(5, N), torch.randn(N, requires_grad=True)
    torch.func.grad(leaking)(value)
    y, dw = with_gradients(value, weight, value)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(rms_norm(leaked[0], weight), weight, value)[0], dw)
        with torch.no_grad():
            assert torch.equal(rms_norm(leaked[0], weight), y)


def test_two_tensors_that_share_their_memory_are_told_apart_when_they_no_longer_do(driver) -> None:
    weight = torch.randn(N)
    for _ in range(2):
        rms_norm(weight, weight)
    x = torch.randn(N)
    for _ in range(2):
        assert torch.equal(rms_norm(x, weight), ordinary(x, weight))


def test_watched_launches_are_triton_s_own(driver) -> None:
    x = torch.randn(3, N)
    rms_norm(x)
    watch: Callable[..., None] = lambda *a, **k: None  # noqa: E731
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        driver.counts()
        hook.add(watch)
        rms_norm(x)
        assert driver.counts() == (1, 0)
        hook.remove(watch)
        rms_norm(x)
        assert driver.counts() == (0, 1)


def test_in_place_is_replayed_into_dy(driver) -> None:
    x, weight = torch.randn(5, N, requires_grad=True), torch.randn(N, requires_grad=True)
    for _ in range(3):
        dy = torch.randn(5, N)
        expected = with_gradients(x, weight, dy)
        version = dy._version
        got = with_gradients(x, weight, dy, in_place=True)
        assert_same(got, expected)
        assert got[1].data_ptr() == dy.data_ptr() and dy._version > version
    assert driver.counts() == (4, 8)


def test_autograd_refuses_a_gradient_that_was_written_over_and_an_inference_tensor_is_not(driver) -> None:
    x = torch.randn(5, N, requires_grad=True)
    for _ in range(3):
        dy, scale = torch.randn(5, N), torch.randn(5, N, requires_grad=True)
        other = (dy * scale).sum()  # saves dY
        rms_norm(x, in_place=True).backward(dy)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
        with torch.inference_mode():
            dy = torch.randn(5, N)
        before = dy.clone()
        rms_norm(x, in_place=True).backward(dy)
        assert torch.equal(dy, before)


@pytest.mark.parametrize("version, is_short", [("3.6.0", True), ("3.6.1", True), ("3.7.0", False), ("3.9.0", False)])
def test_each_release_of_triton_gets_the_arguments_that_its_launcher_takes(monkeypatch, version, is_short) -> None:
    """As read in ``triton/backends/nvidia/driver.py``: 3.6's ``launch`` parses "iiiKKppOOOOOO" and the kernel's own."""

    class CudaLauncher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = True, False

        def launch(self, *args: Any) -> None:
            called.append(("launch", *args))

        def __call__(self, *args: Any) -> None:
            called.append(("run", *args))

    called: list[tuple] = []
    ready = types.SimpleNamespace(run=CudaLauncher(), function=4711, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(raw_launch.triton, "__version__", version)
    for scratch_size in (0, 128):  # a kernel that needs memory of Triton's is launched by what allocates it
        ready.run.global_scratch_size = scratch_size
        launch, fixed = raw_launch.launcher(ready)
        launch(5, 2, 1, 11, *fixed, 16, None, 3)
    long = ("run", 5, 2, 1, 11, 4711, (4, 1, 0), None, None, None, 16, None, 3)
    short = ("launch", 5, 2, 1, 11, 4711, True, False, None, None, (4, 1, 0), None, None, None, 16, None, 3)
    assert called == [short if is_short else long, long]


# --- everything that distinguishes calls ---

_BASE: dict[str, Any] = {"x": torch.randn(6, N), "weight": torch.randn(N), "eps": 1e-6}
_OTHERS: dict[str, dict[str, Any]] = {
    "rows": {"x": torch.randn(5, N)},
    "row_dims": {"x": torch.randn(2, 3, N)},
    "strides": {"x": torch.randn(6, 2 * N)[:, :N]},
    "expanded": {"x": torch.randn(1, N).expand(6, N)},
    "dtype": {"x": torch.randn(6, N).double()},
    "half": {"x": torch.randn(6, N).half()},
    "weight_dtype": {"weight": torch.randn(N).double()},
    "weight_stride": {"weight": torch.randn(2 * N)[::2]},
    "no_weight": {"weight": None},
    "parameter": {"weight": torch.nn.Parameter(torch.randn(N))},
    "eps": {"eps": 0.5},
    "no_eps": {"eps": None},
    "int_eps": {"eps": 1},
    "tensor_eps": {"eps": torch.tensor(0.25)},
    "offset": {"offset": 1.0},
    "tensor_offset": {"offset": torch.tensor(2.0)},
    "gemma": {"casting_mode": "gemma", "x": torch.randn(6, N).half()},
    "none": {"casting_mode": "none", "x": torch.randn(6, N).half()},
    "normalized_shape": {"normalized_shape": (N,)},
    "normalized_shape_list": {"normalized_shape": [N]},
}
# These differ from one another where a call without a weight does.
_WITHOUT_WEIGHT: dict[str, Any] = {"x": torch.randn(6, N), "weight": None}
_OTHERS_WITHOUT_WEIGHT: dict[str, dict[str, Any]] = {
    "two_dims": {"normalized_shape": (6, N)},
    "strides_alone": {"x": torch.randn(12, N)[:, : N // 2]},  # as many elements, and the same strides
}
_PAIRS = {
    **{name: (_BASE, {**_BASE, **other}) for name, other in _OTHERS.items()},
    **{name: (_WITHOUT_WEIGHT, {**_WITHOUT_WEIGHT, **other}) for name, other in _OTHERS_WITHOUT_WEIGHT.items()},
}


@pytest.mark.parametrize("pair", _PAIRS)
def test_a_call_is_not_taken_for_another_one(driver, pair: str) -> None:
    """Interleaved, twice: each gives what it gives when nothing is remembered."""
    calls = _PAIRS[pair]
    expected = []
    for call in calls:
        functional._known.clear()
        expected.append(rms_norm(**call).detach())
    functional._known.clear()
    for _ in range(3):
        for call, y in zip(calls, expected, strict=True):
            assert torch.equal(rms_norm(**call).detach(), y)


def test_a_list_of_dims_is_remembered_as_a_tuple_of_them_is(driver) -> None:
    x, weight = torch.randn(6, N), torch.randn(N)
    for dims in ((N,), [N], [N]):
        assert torch.equal(rms_norm(x, weight, normalized_shape=dims), ordinary(x, weight))
    assert driver.counts() == (4, 2)


def test_values_are_read_at_each_call(driver) -> None:
    x, weight, eps = torch.randn(6, N), torch.nn.Parameter(torch.randn(N)), torch.tensor(1e-6)
    for step in range(3):
        weight.data = torch.randn(N)
        eps += step
        with torch.no_grad():
            assert torch.equal(rms_norm(x, weight, eps), ordinary(x, weight, float(eps)))  # type: ignore[arg-type]
        x = torch.randn(6, N)
        gc.collect()


def test_a_gradient_is_computed_where_it_is_asked_for(driver) -> None:
    x, weight = torch.randn(6, N), torch.randn(N)
    assert not rms_norm(x, weight).requires_grad
    x.requires_grad_()
    assert rms_norm(x, weight).requires_grad
    with torch.no_grad():
        assert not rms_norm(x, weight).requires_grad
    x.requires_grad_(False)
    assert not rms_norm(x, weight).requires_grad
    weight.requires_grad_()
    for _ in range(2):
        assert torch.autograd.grad(rms_norm(x, weight).sum(), weight)[0].shape == (N,)


def test_saved_tensors_that_hooks_changed_are_looked_at_again(driver) -> None:
    x, weight, dy = torch.randn(6, N, requires_grad=True), torch.randn(N, requires_grad=True), torch.randn(6, N)
    expected = with_gradients(x, weight, dy)

    def strided(t: Tensor) -> Tensor:
        return t.detach().repeat_interleave(2, -1)[..., ::2] if t.dim() == 2 else t.detach().clone()

    for unpack in (strided, lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)):
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                assert_same(with_gradients(x, weight, dy), expected)


def test_another_gradient_is_not_taken_for_an_earlier_one(driver) -> None:
    x, weight = torch.randn(6, N, requires_grad=True), torch.randn(N, requires_grad=True)
    gradients = [
        torch.randn(6, N),
        torch.randn(N, 6).t(),
        torch.ones(1).expand(6, N),
        torch.randn(6, 2 * N)[:, 1 : N + 1],
    ]
    expected = []
    for dy in gradients:
        functional._known.clear()
        expected.append(with_gradients(x, weight, dy))
    functional._known.clear()
    for _ in range(3):
        for dy, each in zip(gradients, expected, strict=True):
            assert_same(with_gradients(x, weight, dy), each)
    functional._known.clear()
    driver.counts()
    for needs_dx, needs_dw in ((False, True), (True, True), (True, False), (False, True), (True, True), (True, False)):
        found = with_gradients(x.requires_grad_(needs_dx), weight.requires_grad_(needs_dw), gradients[0])
        y, dx, dw = expected[0]
        assert_same(found, [y, *[dx] * needs_dx, *[dw] * needs_dw])
    assert [launch.is_replayed for launch in driver.launches[1::2]] == [False] * 3 + [True] * 3


# --- errors, sizes, threads ---


def test_an_error_is_raised_again_and_after_a_good_call(driver) -> None:
    x, weight = torch.randn(6, N), torch.randn(N)
    bad: list[tuple[type[Exception], dict[str, Any]]] = [
        (errors.DTypeError, {"x": [1.0]}),
        (errors.DTypeError, {"x": None}),
        (errors.DTypeError, {"x": torch.ones(6, N, dtype=torch.int32)}),
        (errors.TensorLayoutError, {"x": torch.ones(6, N).to_sparse()}),
        (errors.WeightShapeError, {"weight": torch.ones(N + 1)}),
        (errors.DeviceError, {"weight": torch.ones(N, device="meta")}),
        (errors.EpsError, {"eps": -1.0}),
        (errors.EpsError, {"eps": float("nan")}),
        (errors.EpsError, {"eps": "x"}),
        (errors.OffsetError, {"offset": float("inf")}),
        (errors.CastingModeError, {"casting_mode": "Llama"}),
        (errors.OptionError, {"hidden": "sum"}),
        (errors.OptionError, {"output_placements": ()}),
        (errors.NormalizedShapeError, {"normalized_shape": (6,), "weight": None}),
        (errors.NormalizedShapeError, {"normalized_shape": {}, "weight": None}),
        (errors.NormalizedShapeError, {"normalized_shape": float(N)}),
        (errors.NormalizedShapeError, {"normalized_shape": (float(N),)}),
        (errors.EpsError, {"eps": complex(1e-6, 0)}),
    ]
    for error, change in bad:
        messages = set()
        for _ in range(2):
            rms_norm(x, weight)
            rms_norm(x, weight, normalized_shape=N)
            with pytest.raises(error) as caught:
                rms_norm(**{"x": x, "weight": weight, **change})
            messages.add(str(caught.value))
        assert len(messages) == 1
    assert len(functional._known) == 2


def test_what_is_remembered_is_bounded(driver, monkeypatch) -> None:
    monkeypatch.setattr(functional, "MOST_KNOWN", 4)
    monkeypatch.setattr(replayed, "MOST_GRADIENTS", 2)
    weight = torch.randn(N)
    for rows in range(1, 12):
        x = torch.randn(rows, N)
        assert torch.equal(rms_norm(x, weight), ordinary(x, weight))
        assert len(functional._known) <= 4
    x = torch.randn(6, N, requires_grad=True)
    for width in range(N, N + 6):
        with_gradients(x, weight, torch.randn(6, width)[:, :N])
        assert all(len(norm._gradients) <= 2 for norm in functional._known.values())  # type: ignore[attr-defined]


def test_no_tensor_is_kept_alive(driver) -> None:
    import weakref

    x, weight = torch.randn(6, N, requires_grad=True), torch.randn(N, requires_grad=True)
    y = rms_norm(x, weight)
    y.backward(torch.ones_like(y))
    rms_norm(x.detach(), weight.detach())
    size = torch.tensor(N)
    rms_norm(x.detach(), weight.detach(), normalized_shape=(size,))  # type: ignore[arg-type]
    gone = [weakref.ref(x), weakref.ref(weight), weakref.ref(y), weakref.ref(size)]
    del x, weight, y, size
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    assert launching.tape.launches is None and not launching.tape.scratch


def test_threads_do_not_mix_up_their_calls(driver) -> None:
    """Each its own tensors, of a signature that all share, from its first call on."""
    weight = torch.randn(N)
    xs = [torch.randn(4, N) for _ in range(6)]
    expected = [ordinary(x, weight) for x in xs]
    wrong: list[int] = []
    start = threading.Barrier(len(xs))

    def work(mine: int) -> None:
        start.wait()
        for _ in range(6):
            if not torch.equal(rms_norm(xs[mine], weight), expected[mine]):
                wrong.append(mine)

    lock, run = threading.Lock(), FakeDriver.run_kernel
    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(len(xs))]
    with pytest.MonkeyPatch.context() as patch:  # the interpreter is not for several threads; all around it is

        def one_at_a_time(*args: Any) -> None:
            with lock:
                run(*args)

        patch.setattr(FakeDriver, "run_kernel", staticmethod(one_at_a_time))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert driver.counts()[1] >= 20


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 17, 64, 128, 1000, 1024, 4096, 5120, 8192, 12288, 16384, 40000])
def test_replays_and_calls_without_rstd_give_the_bits_of_the_op(n: int, dtype: torch.dtype) -> None:
    functional._known.clear()
    for m in (1, 64, 1000):
        weight = torch.randn(n, device="cuda").to(dtype).requires_grad_()
        for _ in range(3):
            x = torch.randn(m, n, device="cuda").to(dtype).requires_grad_()
            dy = torch.randn(m, n, device="cuda").to(dtype)
            y, rstd = torch.ops.meshnorm.forward(x.detach(), weight.detach(), 1e-6, 0.0, "llama", 1)
            dx, dw = torch.ops.meshnorm.backward(
                dy, x.detach(), weight.detach(), rstd, 0.0, 1, True, True, weight.dtype
            )
            assert_same(with_gradients(x, weight, dy), [y, dx, dw])
            assert torch.equal(rms_norm(x.detach(), weight.detach()), y)


@pytest.mark.gpu
def test_a_second_call_is_replayed_on_its_stream_and_in_graphs(monkeypatch) -> None:
    functional._known.clear()
    x, weight = torch.randn(64, 4096, device="cuda"), torch.randn(4096, device="cuda")
    expected = rms_norm(x, weight)
    monkeypatch.setattr(launching, "launch", lambda *a, **k: pytest.fail("not replayed"))
    from meshnorm.kernels import tiles

    monkeypatch.setattr(tiles, "launch", launching.launch)
    assert torch.equal(rms_norm(x, weight), expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        other = torch.randn_like(x)
        y = rms_norm(other, weight)
    stream.synchronize()
    assert torch.allclose(y, torch.nn.functional.rms_norm(other, (4096,), weight, 1e-6), atol=1e-5)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        captured = rms_norm(static, weight)
    static.copy_(other)
    graph.replay()
    assert torch.equal(captured, y)


@pytest.mark.gpu
def test_another_current_device_is_no_obstacle() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    xs = [torch.randn(64, 4096, device=f"cuda:{index}", requires_grad=True) for index in (0, 1)]
    results = []
    for current in (0, 1, 1, 0):
        with torch.cuda.device(current):
            results.append([with_gradients(x, None, torch.ones_like(x)) for x in xs])
    for each in results[1:]:
        for some, others in zip(each, results[0], strict=True):
            assert_same(some, others)


@pytest.mark.gpu
def test_a_cpu_and_a_gpu_are_told_apart() -> None:
    x, weight = torch.randn(64, 256), torch.randn(256)
    for _ in range(3):
        for device in ("cuda", "cpu"):
            y = rms_norm(x.to(device), weight.to(device))
            assert y.device.type == device
            torch.testing.assert_close(y.cpu(), torch.nn.functional.rms_norm(x, (256,), weight, 1e-6))


@pytest.mark.gpu
def test_a_profiler_of_triton_s_sees_every_launch() -> None:
    x = torch.randn(64, 4096, device="cuda")
    rms_norm(x)
    seen: list[str] = []

    def watch(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        rms_norm(x)
        rms_norm(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    rms_norm(x)
    assert seen == ["forward_wide_kernel"] * 2
