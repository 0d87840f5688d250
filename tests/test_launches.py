"""Where the norm's kernels run, on a GPU: on x's device, on its current stream, in a CUDA graph; and on how much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from norm_cases import assert_right, draw, equal, gradients, inputs, seed
from torch import Tensor

from meshnorm import rms_norm
from meshnorm.formula import reference_backward, reference_forward

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# A width for each kind of kernel. Backward: many rows a program, one in chunks, one whole, one over a cluster, the last
# two split over programs. Forward: many rows a program, then rows read twice, of the widest a part; the last one split.
KINDS = (128, 2880, 8192, 18432, 131072, 262144)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest):
    seed(request)
    yield
    torch.cuda.empty_cache()  # tests run beside one another


# --- devices and streams ---


@pytest.mark.parametrize("n", KINDS)
def test_the_norm_runs_on_the_current_stream(n: int) -> None:
    x, weight, dy = inputs(64, n, BF16, "cuda")
    expected = gradients(x, weight, dy)
    late_x, late_dy = torch.zeros_like(x), torch.zeros_like(dy)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read zeros
        late_x.copy_(x)
        late_dy.copy_(dy)
        found = gradients(late_x, weight, late_dy)
    torch.cuda.synchronize()
    assert equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one machine")
@pytest.mark.parametrize("n", KINDS)
def test_the_norm_runs_on_x_s_device_and_its_stream_whatever_is_current(n: int) -> None:
    given = inputs(64, n, BF16, "cuda:1")
    x, weight, dy = given
    late = torch.zeros_like(x)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        with torch.cuda.device(0):
            found = gradients(x, weight, dy)
            assert torch.cuda.current_device() == 0
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        with torch.cuda.device(0):
            behind = gradients(late, weight, dy)
    torch.cuda.synchronize(1)
    assert all(each.device == x.device for each in found)
    assert_right(given, found)
    assert equal(behind, found)


# --- CUDA graphs ---


class Graph:
    """Forward and backward, captured once on inputs of its own."""

    def __init__(self, m: int, n: int) -> None:
        self.x, self.weight, self.dy = inputs(m, n, BF16, "cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            gradients(self.x, self.weight, self.dy)  # compiled
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = gradients(self.x, self.weight, self.dy)

    def replay(self, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip((self.x, self.weight, self.dy), (x, weight, dy), strict=True):
            mine.copy_(given)
        for each in self.results:
            each.fill_(torch.nan)
        self.graph.replay()
        return tuple(each.clone() for each in self.results)


@pytest.mark.parametrize("n", KINDS)
def test_a_graph_gives_the_bits_of_eager_calls_and_mixes_with_them(n: int) -> None:
    """Two graphs, and eager calls between their replays and behind them in the queue."""
    graphs = [Graph(300, n), Graph(41, n)]
    batches = [[inputs(m, n, BF16, "cuda") for _ in range(3)] for m in (300, 41)]
    expected = [[gradients(*given) for given in mine] for mine in batches]
    for _ in range(3):
        found = [
            (graph.replay(*given), gradients(*given), result)
            for graph, mine, results in zip(graphs, batches, expected, strict=True)
            for given, result in zip(mine, results, strict=True)
        ]
        for replayed, eager, result in found:
            assert equal(replayed, result) and equal(eager, result)


@pytest.mark.parametrize("n", [18432, 262144])
def test_graphs_of_split_rows_replay_beside_one_another(n: int) -> None:
    """On two streams at once, with eager calls on a third: none may read what another's programs exchange."""
    graphs = [Graph(300, n), Graph(200, n)]
    given = inputs(100, n, BF16, "cuda")
    expected = gradients(*given)
    for graph in graphs:
        graph.graph.replay()
    torch.cuda.synchronize()
    first = [tuple(each.clone() for each in graph.results) for graph in graphs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.graph.replay()
        assert equal(gradients(*given), expected)
    torch.cuda.synchronize()
    for graph, results in zip(graphs, first, strict=True):
        assert equal(graph.results, results)


@pytest.mark.parametrize(("n", "dtype"), [(131072, BF16), (131072, torch.float32), (262144, BF16)], ids=str)
def test_compiled_into_graphs_split_rows_exchange_beside_eager_ones(n: int, dtype: torch.dtype) -> None:
    """torch.compile's own graphs, whose memory is that of one pool: what programs exchange through must be nobody
    else's while a graph runs, and be as the next replay expects it."""
    torch.compiler.reset()

    def two_norms(x: Tensor, weight: Tensor) -> Tensor:
        between = rms_norm(x, weight).sin()  # memory that the pool may hand on
        return rms_norm(between + x, weight) * 2 - between

    compiled = torch.compile(two_norms, mode="reduce-overhead", dynamic=False)

    def results(norms: Callable[[Tensor, Tensor], Tensor], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves = tuple(each.detach().clone().requires_grad_() for each in given[:2])
        torch.compiler.cudagraph_mark_step_begin()
        y = norms(*leaves)
        found = torch.autograd.grad(y, leaves, given[2])
        return tuple(each.detach().clone() for each in (y, *found))

    batches = [inputs(m, n, dtype, "cuda") for m in (40, 40, 40)]
    eager = [results(two_norms, given) for given in batches]
    alone = [gradients(*given) for given in batches]
    for _ in range(4):  # the first warms up, the second captures, the others replay
        for given, expected, norm in zip(batches, eager, alone, strict=True):
            found = results(compiled, given)
            assert equal(gradients(*given), norm)  # an eager exchange, behind the graph's in the queue
            for got, right, eps in zip(found, expected, (8, 16, 16), strict=True):
                off = (got.double() - right.double()).norm() / right.double().norm()
                assert off <= eps * torch.finfo(dtype).eps  # what is fused is rounded less often
    y, dx, dw = eager[0]
    x, weight, dy = (each.double().requires_grad_(i < 2) for i, each in enumerate(batches[0]))

    def exactly(x: Tensor) -> Tensor:
        return reference_forward(x, weight, 1e-6)

    between = exactly(x).sin()
    exact_y = exactly(between + x) * 2 - between
    exact = (exact_y, *torch.autograd.grad(exact_y, (x, weight), dy))
    for got, right in zip((y, dx, dw), exact, strict=True):
        assert (got.double() - right).norm() <= 16 * torch.finfo(dtype).eps * right.norm()


# --- beyond 2³¹ elements ---


@pytest.mark.parametrize("n", [128, 5120, 131072])
def test_more_elements_than_32_bits_count(n: int) -> None:
    """Narrow rows, one program a row, and split rows. All of dW; of y and dX the first rows, the last, and those where
    an offset in elements or bytes no longer fits into 31 or 32 bits."""
    m = 2**31 // n + 77
    weight = draw(n, dtype=BF16, device="cuda")
    x, dy = (torch.empty(m, n, dtype=BF16, device="cuda").normal_() for _ in range(2))
    y, dx, dw = gradients(x, weight, dy)
    rows = [0, m, *(2**bits // n for bits in (29, 30, 31))]
    for row in rows:
        part = slice(max(0, row - 40), min(m, row + 40))
        given = (x[part].double(), weight.double(), 1e-6)
        torch.testing.assert_close(y[part].double(), reference_forward(*given), rtol=2.02 * 2**-8, atol=1e-6)
        exact_dx, _ = reference_backward(dy[part].double(), *given)
        torch.testing.assert_close(dx[part].double(), exact_dx, rtol=1.01 * 2**-8, atol=1e-4)
    del y, dx
    exact_dw, squares = (torch.zeros(n, dtype=torch.float64, device="cuda") for _ in range(2))
    for start in range(0, m, 2**26 // n):
        x64, dy64 = x[start : start + 2**26 // n].double(), dy[start : start + 2**26 // n].double()
        terms = dy64 * x64 * torch.rsqrt(x64.square().mean(1, keepdim=True) + 1e-6)
        exact_dw += terms.sum(0)
        squares += terms.square().sum(0)
    # One rounding to bf16; partial sums are as large as √Σt², and each program's takes thousands of float32 roundings,
    # at random.
    bound = 1.01 * 2**-8 * exact_dw.abs() + 2**-16 * squares.sqrt()
    assert bool(((dw.double() - exact_dw).abs() <= bound).all())


@pytest.mark.parametrize("n", [128, 4096, 65536])
def test_strided_rows_beyond_32_bits_are_read_where_they_are(n: int) -> None:
    """Few rows, far apart: the stride itself makes the offset too large."""
    m = 70
    memory = torch.empty(m, 2**25, dtype=BF16, device="cuda")  # 4.7 GB, of which the last row starts at 2³¹ and more
    x = memory[:, 5 * n : 6 * n].normal_()
    weight, dy = draw(n, dtype=BF16, device="cuda"), draw(m, n, dtype=BF16, device="cuda")
    assert x.stride(0) * (m - 1) > 2**31
    assert equal(gradients(x, weight, dy), gradients(x.contiguous(), weight, dy))
    assert equal(gradients(dy, weight, x), gradients(dy, weight, x.contiguous()))
