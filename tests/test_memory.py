"""What the norm allocates, what it saves for its backward, and how many kernels it launches, on a GPU.

Figures are the bytes asked of torch's allocator, not those that it rounds them to.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from norm_cases import WIDTHS, draw, equal, gradients, inputs, name_of, seed
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshnorm import gated_rms_norm, rms_norm

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
PARTIALS = 0.03  # of x: what the backward may need beside dX and dW
# A width for each kind of kernel. Backward: many rows a program, one in chunks, one whole, one over a cluster, the last
# two split over programs. Forward: many rows a program, then rows read twice, of the widest a part; the last one split.
KINDS = (128, 2880, 8192, 18432, 131072, 262144)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest):
    seed(request)
    yield
    torch.cuda.empty_cache()  # tests run beside one another


@pytest.fixture(autouse=True)
def _backward_in_this_thread():
    """Autograd's own thread lets go of a gradient some time after it was returned, as much as another test later."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def rows_of(n: int, dtype: torch.dtype) -> int:
    """About 2²⁷ elements in bf16, so many bytes in any dtype."""
    return 2**28 // n // dtype.itemsize


def peak(call: Callable[[], object]) -> int:
    """Bytes asked for during the call at the most, beyond what was there before; its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("n", WIDTHS)
def test_the_forward_saves_x_and_the_weight_and_one_number_a_row(n: int, dtype: torch.dtype) -> None:
    m = rows_of(n, dtype)
    x, weight, _ = inputs(m, n, dtype, "cuda")
    x.requires_grad_(), weight.requires_grad_()
    rms_norm(x, weight)  # workspaces
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = rms_norm(x, weight)
    own = [tensor for tensor in saved if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert len(saved) == 3 and [(each.dtype, each.numel()) for each in own] == [(F32, m)]
    own.clear(), saved.clear()
    del y
    # y, and what is saved beside the inputs: nothing else is there at any moment, and nothing else stays
    asked: list[int] = []

    def forward() -> Tensor:
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = rms_norm(x, weight)
        asked.append(torch.cuda.memory_stats()["requested_bytes.all.current"] - before)
        return y

    assert peak(forward) == x.nbytes + 4 * m
    assert asked == [x.nbytes + 4 * m]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("n", WIDTHS)
def test_the_backward_needs_3_percent_of_the_tensor_beside_its_results(n: int, dtype: torch.dtype) -> None:
    x, weight, dy = inputs(rows_of(n, dtype), n, dtype, "cuda")
    x.requires_grad_(), weight.requires_grad_()
    y = rms_norm(x, weight)

    def backward(*wanted: Tensor) -> int:
        return peak(lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True))

    backward(x, weight)  # workspaces
    assert backward(x, weight) <= x.nbytes + weight.nbytes + PARTIALS * x.nbytes
    weight.requires_grad_(False)
    y = rms_norm(x, weight)
    assert backward(x) == x.nbytes  # nothing for a frozen weight


# --- inputs are read where they are ---


def _fused_qkv(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(m, 3 * n)[:, n : 2 * n]


def _heads(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(m // 4, 6, n)[:, 1:5]


def _transposed(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(4, m // 4, n).transpose(0, 1)


def _expanded(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(m // 4, 1, n).expand(m // 4, 4, n)


def _one_row(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(n).expand(m, n)


def _every_other_row(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(2 * m, n)[1::2]


def _odd_addresses(new: Callable[..., Tensor], m: int, n: int) -> Tensor:
    return new(m, n + 1)[:, 1:]


VIEWS = (_fused_qkv, _heads, _transposed, _expanded, _one_row, _every_other_row, _odd_addresses)


@pytest.mark.parametrize("n", KINDS)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__.strip("_"))
def test_rows_of_any_stride_are_read_in_place(view: Callable[..., Tensor], n: int) -> None:
    m = 2**25 // n // 4 * 4
    x, other = (view(lambda *shape: draw(*shape, dtype=BF16, device="cuda"), m, n) for _ in range(2))
    weight = draw(n, dtype=BF16, device="cuda").requires_grad_()
    plain_x, plain_dy = x.contiguous(), other.contiguous()
    assert not x.is_contiguous() and x.stride(-1) == 1
    expected = gradients(plain_x, weight, plain_dy)
    for given_x, given_dy in ((x, plain_dy), (plain_x, other), (x, other)):
        assert equal(gradients(given_x, weight, given_dy), expected)  # also: workspaces
        leaf = given_x.detach().requires_grad_()
        size = plain_x.nbytes
        assert peak(lambda leaf=leaf: rms_norm(leaf, weight)) == size + 4 * m
        y = rms_norm(leaf, weight)
        # A copy would be as large as x. Few rows may need more than 3% of it for partial rows of dW, but no half.
        limit = 1.5 * size + weight.nbytes
        assert peak(lambda y=y, leaf=leaf, dy=given_dy: torch.autograd.grad(y, (leaf, weight), dy)) < limit


def test_other_strides_are_copied_once() -> None:
    m, n = 8192, 2048
    x, dy = draw(n, m, dtype=BF16, device="cuda").t(), draw(m, 2 * n, dtype=BF16, device="cuda")[:, ::2]
    weight = draw(n, dtype=BF16, device="cuda")
    assert equal(gradients(x, weight, dy), gradients(x.contiguous(), weight, dy.contiguous()))
    assert peak(lambda: rms_norm(x, weight)) <= 2 * m * n * BF16.itemsize + 4 * m


# --- launches ---


def launches(call: Callable[[], object]) -> list[str]:
    """The names of what runs on the GPU during a call: kernels, copies, fills."""
    call()  # compiled, workspaces there
    marker = torch.zeros(1, device="cuda")
    for _ in range(4):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            marker.sin_()
            call()
            torch.cuda.synchronize()
        found = [event.name for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
        mine = [name for name in found if "sin_kernel" not in name]
        if len(mine) < len(found):  # else it has only just started, and misses events
            return mine
    pytest.skip("torch's profiler records no kernels here")


@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("n", KINDS)
def test_one_launch_forward_two_backward_and_one_where_the_weight_is_frozen(n: int, m: int) -> None:
    x, weight, dy = inputs(m, n, BF16, "cuda")
    assert len(found := launches(lambda: rms_norm(x, weight))) == 1, found
    x.requires_grad_(), weight.requires_grad_()
    assert len(found := launches(lambda: rms_norm(x, weight))) == 1, found
    y = rms_norm(x, weight)
    assert 1 <= len(found := launches(lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True))) <= 2, found
    weight.requires_grad_(False)
    y = rms_norm(x, weight)
    assert len(found := launches(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))) == 1, found


# --- beside a gate ---

GROUPS = ((128, 128), (8192, 1024), (8192, 8192), (12288, 12288), (16384, 16384))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("n", "group"), GROUPS)
def test_a_gated_forward_saves_its_inputs_and_one_number_a_row_and_group(n: int, group: int, before: bool) -> None:
    m = rows_of(n, BF16) // 2
    x, weight, gate = inputs(m, n, BF16, "cuda")
    leaves = x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()

    def forward() -> Tensor:
        return gated_rms_norm(*leaves, norm_before_gate=before, group_size=group)

    forward(), forward()  # recorded, then replayed
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = forward()
    own = [tensor for tensor in saved if tensor.data_ptr() not in [leaf.data_ptr() for leaf in leaves]]
    assert len(saved) == 4 and [(each.dtype, each.numel()) for each in own] == [(F32, m * n // group)]
    own.clear(), saved.clear()
    del y
    asked: list[int] = []

    def kept() -> Tensor:
        before_it = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = forward()
        asked.append(torch.cuda.memory_stats()["requested_bytes.all.current"] - before_it)
        return y

    assert peak(kept) == x.nbytes + 4 * m * (n // group)
    assert asked == [x.nbytes + 4 * m * (n // group)]
    with torch.no_grad():
        assert peak(forward) == x.nbytes


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("n", "group"), GROUPS)
def test_a_gated_backward_needs_3_percent_of_a_tensor_beside_its_results(n: int, group: int, before: bool) -> None:
    m = rows_of(n, BF16)
    x, weight, gate = inputs(m, n, BF16, "cuda")
    dy = draw(m, n, dtype=BF16, device="cuda")
    leaves = x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()
    y = gated_rms_norm(*leaves, norm_before_gate=before, group_size=group)

    def backward(*wanted: Tensor) -> int:
        return peak(lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True))

    for _ in range(2):  # recorded, then replayed
        assert backward(*leaves) <= 2 * x.nbytes + weight.nbytes + PARTIALS * x.nbytes


@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("n", "group"), GROUPS)
def test_a_gated_norm_is_one_launch_forward_and_two_backward(n: int, group: int, before: bool, m: int) -> None:
    x, weight, gate = inputs(m, n, BF16, "cuda")
    dy = draw(m, n, dtype=BF16, device="cuda")
    leaves = x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()

    def forward() -> Tensor:
        return gated_rms_norm(*leaves, norm_before_gate=before, group_size=group)

    assert len(found := launches(forward)) == 1, found
    y = forward()
    assert 1 <= len(found := launches(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))) <= 2, found
    weight.requires_grad_(False)
    y = forward()
    assert len(found := launches(lambda: torch.autograd.grad(y, leaves[:2], dy, retain_graph=True))) == 1, found
