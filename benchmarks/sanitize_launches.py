"""The launches that ``sanitize.py`` runs under compute-sanitizer, a group of them to a process.

Small, and of every kind: each step of the launch settings, masks, strides, odd addresses, frozen tensors, no weight.
A group is one kind of kernel, and its launches are those that this kind serves. Results are held against the plain
torch kernels on the CPU, so that a launch which a tool swallowed is noticed.

    PYTHONPATH=src python3 benchmarks/sanitize_launches.py GROUP [SHARD/SHARDS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshnorm.formula_gated import Gated
from meshnorm.kernels import cpu, cpu_gated, gpu, gpu_backward, gpu_chunks, gpu_gated, gpu_qk, settings

PLANTED = "planted errors"
DEVICE = "cuda"
# The launches believe in a few multiprocessors and clusters only, so that each program goes through several rows. The
# programs of a split row wait for one another: there must be enough for a row of 262144 columns, and few enough that
# all are resident even though instrumented ones take more room.
MULTIPROCESSORS, FOR_SPLIT_ROWS = 8, 32
CLUSTERS = 3
# The modules that ask the device for how many it has.
ASKING = {
    "multiprocessors": (gpu, gpu_backward, gpu_gated, gpu_qk),
    "most_clusters": (gpu_chunks, gpu_gated),
}

# Each step of the ladders of settings.py, full and with columns left over.
NARROW = (1, 16, 17, 33, 100, 128, 200, 512)
WIDTHS = {
    "forward": NARROW,
    "chunks": (1501, 1536, 2500, 2560, 2888, 3072),  # and 5120 in float32
    "slices": (1, 17, 100, 200, 1000, 2048, 4096, 5120, 12288, 20001),
    "clusters": (16384, 17000, 18432, 20001, 24576, 40000, 49152, 65536),  # of 2, 3, 3, 4, 4, 5, 8 and 8 programs
    "forward_wide": (1000, 1024, 2048, 2880, 4096, 5120, 8192, 12288, 17001, 20001, 32768, 40001, 65536, 70001, 131072),
    "backward": (*NARROW, 1000, 1024, 2048, 4096, 4097, 7168, 8192, 12288),
    "qk": (17, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192),
    "gated": (17, 100, 128, 1000, 1024, 2048, 4096, 4097, 8192, 12288, 16384, 20001, 65536),  # of a group
    "split_forward": (131080, 140001, 196608, 262144),
    "split_backward": (65544, 70001, 98304, 131072),
}
GROUPS = ("sums", *WIDTHS)  # the slow ones last


class Launch(NamedTuple):
    """``x`` and ``dy`` name views (see ``rows``); ``weight`` is "same", "float32" or "none"; ``want`` gradients."""

    m: int
    n: int
    dtype: str = "bfloat16"
    weight: str = "same"
    mode: str = "llama"
    offset: float = 0.0
    x: str = "contiguous"
    dy: str = "contiguous"
    want: str = "dx dw"
    rstd: bool = True  # whether the forward stores it


VARIANTS = (
    {"dtype": "float32", "weight": "none", "dy": "heads", "want": "dx"},
    {"dtype": "float16", "weight": "float32", "mode": "gemma", "offset": 1.0, "x": "heads"},
    {"weight": "float32", "mode": "none", "x": "odd", "dy": "odd"},
    {"x": "expanded", "dy": "one_row", "want": "dw"},
    {"x": "transposed", "dy": "transposed", "want": "dx", "rstd": False},
)
# What the bfloat16 widths and their variants do not reach: float32 and float64 in kernels of their own widths.
OTHERS = {
    "forward": (Launch(6, 100, "float64"), Launch(200, 250, "float32", x="odd")),
    "forward_wide": (
        Launch(6, 1000, "float64"),
        Launch(6, 40000, "float64", x="heads"),
        Launch(6, 70001, "float64"),  # wider than the ladder
        Launch(200, 500, "float32", x="odd"),
        Launch(6, 16384, "float32"),
        Launch(6, 40000, "float32"),
        Launch(6, 20001, "float32", x="odd"),
    ),
    "backward": (Launch(6, 1000, "float64"), Launch(6, 4096, "float32", x="heads")),
    "chunks": (
        Launch(60, 5120, "float32"),
        Launch(60, 4500, "float32", weight="none", x="heads", dy="odd", want="dx"),
        Launch(60, 5120, "float32", x="odd", want="dw"),
        Launch(60, 5001, "float32", weight="float32", x="expanded", dy="transposed"),
    ),
    "clusters": (
        Launch(12, 8192, "float32"),  # 2 programs
        Launch(12, 9001, "float32", x="heads", dy="odd"),  # 3
        Launch(12, 32768, "float32", weight="none", want="dx"),  # 8
        Launch(12, 65536, "float32"),  # 16
    ),
    "slices": (Launch(6, 1000, "float64"), Launch(6, 9000, "float64", x="heads")),
    "qk": (Launch(6, 100, "float64"), Launch(60, 512, "float32", x="odd")),
    "gated": (
        Launch(6, 100, "float64"),
        Launch(60, 512, "float32", x="odd"),
        Launch(12, 12288, "float32"),  # 3 programs, as the next
        Launch(12, 9001, "float32", x="heads", dy="odd"),
        Launch(12, 32768, "float32", weight="none", want="dx"),  # 8
        Launch(12, 17000, "float32", weight="float32", x="odd"),  # 5
    ),
    "split_forward": (Launch(6, 70001, "float32"), Launch(6, 65544, "float32", x="heads")),
    "split_backward": (Launch(6, 65544, "float32"),),
}
# Partial rows × columns: fewer rows than are added at a time, as many, more; a width for each step of ``sum_settings``.
SUMS = ((1, 100), (7, 1), (31, 511), (32, 512), (33, 1000), (132, 4096), (264, 20001), (70, 32768), (33, 131072))


def launches(group: str) -> Iterator[Launch]:
    """A full bfloat16 case of every width, and in turn two of the variants, but for the dtype where another kernel
    would take it. Then the others."""
    for i, n in enumerate(WIDTHS[group]):
        m = 200 if n <= 1024 else 12 if n > 32768 else 40
        yield Launch(m, n)
        for k in (2 * i, 2 * i + 1):
            launch = Launch(m, n, **VARIANTS[k % len(VARIANTS)])  # type: ignore[arg-type]
            yield launch if belongs(group, launch) else launch._replace(dtype="bfloat16")
    yield from OTHERS[group]


def belongs(group: str, launch: Launch) -> bool:
    """Whether the launch runs the kernels of its group, by the launch settings. (A split row whose x is frozen needs no
    exchange, and takes those of "slices".)"""
    n, dtype = launch.n, getattr(torch, launch.dtype)
    chunks = settings.backward_chunk_settings(n, dtype) if dtype != torch.float64 else None
    parts = settings.parts_of(n, chunks) if chunks is not None else 0
    may_split = dtype != torch.float64
    match group:
        case "forward":
            return n <= settings.forward_settings(n, dtype).block
        case "forward_wide":
            split = may_split and settings.forward_split_settings(n, dtype) is not None
            return not split and n > settings.forward_settings(n, dtype).block
        case "split_forward":
            return may_split and settings.forward_split_settings(n, dtype) is not None
        case "backward" | "qk":
            return not parts and settings.backward_settings(n, dtype) is not None
        case "chunks":
            return parts == 1
        case "clusters":
            return parts > 1
        case "split_backward":
            return may_split and not parts and settings.backward_split_settings(n, dtype) is not None
    return True


@triton.jit
def planted_kernel(X, Y):
    """Reads 1024 numbers and writes them."""
    index = tl.arange(0, 1024)
    tl.store(Y + index, tl.load(X + index))


def run_planted() -> None:
    """X holds numbers that nobody has written, and Y has room for 1000."""
    planted_kernel[(1,)](torch.empty(1024, device=DEVICE), torch.empty(1000, device=DEVICE))
    torch.cuda.synchronize()
    print("all launches done")


def run(group: str, shard: int, shards: int) -> None:
    """Launches a group's share, results held against the plain torch kernels on the CPU."""
    pretend(FOR_SPLIT_ROWS if group.startswith("split") else MULTIPROCESSORS)
    torch.manual_seed(0)
    if group == "sums":
        for p, n in SUMS[shard::shards]:
            _sum(p, n)
    else:
        for i, launch in list(enumerate(launches(group)))[shard::shards]:
            if group == "qk":
                _run_qk(launch)
            elif group == "gated":
                _run_gated(launch, i % 2 == 0)
            else:
                _run(group, launch)
    print(f"{group}: all launches done, results right")


def pretend(multiprocessors: int) -> None:
    """That the GPU has so many multiprocessors, and room for few clusters."""
    most_clusters = gpu_chunks.most_clusters

    def few_clusters(*arguments: Any, **options: Any) -> int:
        return min(CLUSTERS, most_clusters(*arguments, **options))

    pretended = {"multiprocessors": lambda device: multiprocessors, "most_clusters": few_clusters}
    for name, modules in ASKING.items():
        for module in modules:
            assert callable(getattr(module, name))  # there, to be replaced
            setattr(module, name, pretended[name])


def _sum(p: int, n: int) -> None:
    """The sum of partial rows that the kernel before it writes: it may be launched before that one has ended."""
    drawn = torch.randn(p, n)
    source, partial = drawn.to(DEVICE), torch.empty(p, n, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        dw = torch.empty(n, dtype=dtype, device=DEVICE)
        torch.mul(source, 2, out=partial)
        gpu.sum_partials(partial, dw)
        _check(f"sums, {p}x{n}", "dW", (2 * drawn).double().sum(0).to(dtype), dw, 1e-2 if dw.itemsize == 2 else 1e-5)


def _check(what: str, name: str, expected: Tensor, found: Tensor, limit: float) -> None:
    expected, found = expected.double(), found.cpu().double()
    off = (expected - found).norm() / expected.norm().clamp_min(1e-30)
    if not off <= limit:
        raise SystemExit(f"{what}: {name} is off by {off:.3g}")


def _run(group: str, launch: Launch) -> None:
    m, n, dtype = launch.m, launch.n, getattr(torch, launch.dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = rows(launch.x, m, n, dtype), rows(launch.dy, m, n, dtype)
    weight = None
    if launch.weight != "none":
        weight = torch.randn(n).to(dtype if launch.weight == "same" else torch.float32)
    w = None if weight is None else weight.to(DEVICE)
    xc, dyc = on_gpu(x), on_gpu(dy)

    def both(*shape: int, of: torch.dtype = acc) -> tuple[Tensor, Tensor]:
        return torch.empty(shape, dtype=of), torch.empty(shape, dtype=of, device=DEVICE)

    def check(name: str, expected: Tensor, found: Tensor) -> None:
        if not (name == "dX" and n == 1):  # with one column dX is the rounding error of a zero
            limit = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-10}[launch.dtype]
            _check(f"{group}, {launch}", name, expected, found, limit)

    y, yc = both(m, n, of=dtype)
    rstd, rstdc = both(m)
    options = (1e-6, launch.offset, launch.mode)
    cpu.forward(x, weight, *options, y, rstd)
    if "forward" in group:
        gpu.forward(xc, w, *options, yc, rstdc if launch.rstd else None)
        check("y", y, yc)
        if launch.rstd:
            check("rstd", rstd, rstdc)
        return
    total, totalc = both(m)
    if group == "slices":
        cpu.statistic(x, total)
        gpu.statistic(xc, totalc)
        check("statistic", total, totalc)
        gpu.apply(xc, w, totalc, n, *options, yc, rstdc)
        check("y", y, yc)
        check("rstd", rstd, rstdc)
    rstdc = rstd.to(DEVICE)
    dx, dxc = both(m, n, of=dtype)
    dw, dwc = both(n, of=dtype if weight is None else weight.dtype)
    needs_dx, needs_dw = "dx" in launch.want, "dw" in launch.want and weight is not None
    wanted = (dx if needs_dx else None, dw if needs_dw else None)
    wantedc = (dxc if needs_dx else None, dwc if needs_dw else None)
    cpu.backward(dy, x, weight, rstd, launch.offset, *wanted)
    if group == "slices":
        cpu.backward_statistic(dy, x, weight, rstd, launch.offset, total)
        gpu.backward_statistic(dyc, xc, w, rstdc, launch.offset, totalc)
        if n > 1:
            check("backward_statistic", total, totalc)
        gpu.backward_apply(dyc, xc, w, rstdc, totalc, n, launch.offset, *wantedc)
    else:
        gpu.backward(dyc, xc, w, rstdc, launch.offset, *wantedc)
    if needs_dx:
        check("dX", dx, dxc)
    if needs_dw:
        check("dW", dw, dwc)


def _run_gated(launch: Launch, before: bool) -> None:
    """A norm before or after a gate, which lies as dY does: two groups of as many columns, wide ones alone."""
    m, n, dtype = launch.m, launch.n, getattr(torch, launch.dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    groups = 2 if n <= 4096 else 1
    columns = groups * n
    x, dy, gate = (rows(kind, m, columns, dtype) for kind in (launch.x, launch.dy, launch.dy))
    weight = None
    if launch.weight != "none":
        weight = torch.randn(columns).to(dtype if launch.weight == "same" else torch.float32)
    how = Gated(1e-6, launch.offset, launch.mode, before, "silu" if launch.rstd else "sigmoid", n)
    xc, dyc, gatec = on_gpu(x), on_gpu(dy), on_gpu(gate)
    w = None if weight is None else weight.to(DEVICE)
    needs_dx, needs_dw = "dx" in launch.want, "dw" in launch.want and weight is not None
    expected = {name: torch.empty(m, columns, dtype=dtype) for name in ("y", "dX", "dGate")}
    expected |= {name: torch.empty(m, groups, dtype=acc) for name in ("rstd", "total", "c")}
    expected["dW"] = torch.empty(columns, dtype=dtype if weight is None else weight.dtype)
    found = {name: torch.empty_like(tensor, device=DEVICE) for name, tensor in expected.items()}

    def check(*names: str) -> None:
        limit = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-10}[launch.dtype]
        for name in names:
            _check(f"gated, {launch}, norm_before_gate={before}", name, expected[name], found[name], limit)

    def wanted(of: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        return tuple(
            of[name] if needs else None for name, needs in (("dX", needs_dx), ("dGate", needs_dx), ("dW", needs_dw))
        )

    gradients = [name for name, needs in (("dX", needs_dx), ("dGate", needs_dx), ("dW", needs_dw)) if needs]
    cpu_gated.forward(x, gate, weight, how, expected["y"], expected["rstd"])
    gpu_gated.forward(xc, gatec, w, how, found["y"], found["rstd"])
    check("y", "rstd")
    cpu_gated.statistic(x, gate, how, expected["total"])
    gpu_gated.statistic(xc, gatec, how, found["total"])
    gpu_gated.apply(xc, gatec, w, found["total"], n, how, found["y"], found["rstd"])
    check("total", "y", "rstd")
    cpu_gated.backward(dy, x, gate, weight, expected["rstd"], how, *wanted(expected))
    gpu_gated.backward(dyc, xc, gatec, w, found["rstd"], how, *wanted(found))
    check(*gradients)
    if n > 17:  # of few columns the sum is mostly rounding errors
        cpu_gated.backward_statistic(dy, x, gate, weight, expected["rstd"], how, expected["c"])
        gpu_gated.backward_statistic(dyc, xc, gatec, w, found["rstd"], how, found["c"])
        check("c")
        gpu_gated.backward_apply(dyc, xc, gatec, w, found["rstd"], found["c"], n, how, *wanted(found))
        check(*gradients)


def _run_qk(launch: Launch) -> None:
    """Two norms of as many columns at once: q as the launch says, k of half as many rows, one after another."""
    needs_dx, needs_dw = "dx" in launch.want, "dw" in launch.want and launch.weight != "none"
    halves = [_Half(launch, launch.m, launch.x, launch.dy), _Half(launch, launch.m // 2, "contiguous", "contiguous")]
    options, offset, n = (1e-6, launch.offset, launch.mode), launch.offset, launch.n

    def given(*names: str) -> list[tuple]:
        return [tuple(half.found[name] for name in names) for half in halves]

    def gradients() -> list[tuple]:
        wanted = given("dx", "dw")
        return [(dx if needs_dx else None, dw if needs_dw else None) for dx, dw in wanted]

    def check(*names: str) -> None:
        for half in halves:
            for name in names:
                half.check(name)

    of_gradients = [name for name, needs in (("dx", needs_dx), ("dw", needs_dw)) if needs]
    gpu_qk.forward(given("x", "weight", "y", "rstd"), *options)
    check("y", "rstd")
    gpu_qk.statistic(given("x", "total"))
    applied = zip(given("x", "weight", "total"), given("y", "rstd"), strict=True)
    gpu_qk.apply([(*tensors, n, *outputs) for tensors, outputs in applied], *options)
    check("total", "y", "rstd")
    saved = given("dy", "x", "weight", "rstd")
    gpu_qk.backward([(*tensors, *each) for tensors, each in zip(saved, gradients(), strict=True)], offset)
    check(*of_gradients)
    gpu_qk.backward_statistic(given("dy", "x", "weight", "rstd", "c"), offset)
    check("c")
    summed = zip(given("dy", "x", "weight", "rstd", "c"), gradients(), strict=True)
    gpu_qk.backward_apply([(*tensors, n, *each) for tensors, each in summed], offset)
    check(*of_gradients)


class _Half:
    """One of two norms: its tensors on the GPU, and what is expected of them."""

    def __init__(self, launch: Launch, m: int, x_lies: str, dy_lies: str) -> None:
        self.launch, n, dtype = launch, launch.n, getattr(torch, launch.dtype)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        x, dy = rows(x_lies, m, n, dtype), rows(dy_lies, m, n, dtype)
        weight = None
        if launch.weight != "none":
            weight = torch.randn(n).to(dtype if launch.weight == "same" else torch.float32)
        y, dx = (torch.empty(m, n, dtype=dtype) for _ in range(2))
        rstd, total, c = (torch.empty(m, dtype=acc) for _ in range(3))
        dw = torch.empty(n, dtype=dtype if weight is None else weight.dtype)
        cpu.forward(x, weight, 1e-6, launch.offset, launch.mode, y, rstd)
        cpu.statistic(x, total)
        cpu.backward(dy, x, weight, rstd, launch.offset, dx, dw)
        cpu.backward_statistic(dy, x, weight, rstd, launch.offset, c)
        self.expected = {"y": y, "rstd": rstd, "total": total, "c": c, "dx": dx, "dw": dw}
        self.found = {name: torch.empty_like(tensor, device=DEVICE) for name, tensor in self.expected.items()}
        self.found |= {"x": on_gpu(x), "dy": on_gpu(dy), "weight": None if weight is None else weight.to(DEVICE)}

    def check(self, name: str) -> None:
        limit = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-10}[self.launch.dtype]
        _check(f"qk, {self.launch}", name, self.expected[name], self.found[name], limit)


def rows(kind: str, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """An (A, B, N) view of m random rows on the CPU; ``m`` is even."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    match kind:
        case "contiguous":
            return normal(1, m, n)
        case "heads":  # two of four heads of each token
            return normal(m // 2, 4, n)[:, 1:3]
        case "transposed":
            return normal(2, m // 2, n).transpose(0, 1)
        case "expanded":
            return normal(m // 2, 1, n).expand(m // 2, 2, n)
        case "one_row":
            return normal(1, 1, n).expand(m // 2, 2, n)
        case "odd":  # rows at odd addresses
            return normal(1, m, n + 1)[:, :, 1:]
    raise ValueError(kind)


def on_gpu(x: Tensor) -> Tensor:
    """x with its strides, its storage no longer than it must be. By a copy from the host, which initcheck sees."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(DEVICE)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


if __name__ == "__main__":
    _, group, *share = sys.argv
    run_planted() if group == PLANTED else run(group, *map(int, (share or ["0/1"])[0].split("/")))
