"""The launches that ``sanitize.py`` runs under compute-sanitizer, a group of them to a process.

Small, and of every kind: each step of the launch settings, masks, strides, odd addresses, frozen tensors, no weight.
Results are held against the plain torch kernels on the CPU, so that a launch which a tool swallowed is noticed.

    PYTHONPATH=src python3 benchmarks/sanitize_launches.py GROUP [SHARD/SHARDS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshnorm.kernels import cpu, gpu

PLANTED = "planted errors"
GROUPS = ("forward", "backward", "slices", "split_forward", "split_backward")
# The launches believe in a few multiprocessors only, so that each program goes through several rows, and so that
# programs that wait for one another are resident even though instrumented ones take more room.
MULTIPROCESSORS = 8
DEVICE = "cuda"

# Each step of the ladders of settings.py, full and with columns left over.
NARROW = (1, 16, 17, 33, 100, 128, 200, 512, 1000, 1024, 2048, 2880)
WIDE = (4096, 4097, 5120, 8192, 12288, 16384)
CHUNKED = (18432, 20001, 32768)  # forward, one program a row; the backward splits them
SPLIT = (32769, 40000, 65536, 131072)


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


VARIANTS = (
    {"dtype": "float32", "weight": "none", "dy": "heads", "want": "dx"},
    {"dtype": "float16", "weight": "float32", "mode": "gemma", "offset": 1.0, "x": "heads"},
    {"weight": "float32", "mode": "none", "x": "odd", "dy": "odd"},
    {"x": "expanded", "dy": "one_row", "want": "dw"},
    {"x": "transposed", "dy": "transposed", "want": "dx"},
)


def launches(group: str) -> Iterator[Launch]:
    """A full bfloat16 case of every width, and in turn two of the variants."""
    widths = {
        "forward": NARROW + WIDE + CHUNKED,
        "backward": NARROW + WIDE,
        "slices": NARROW[::2] + WIDE[::2] + (20001,),
    }
    for i, n in enumerate(widths.get(group, SPLIT if group == "split_forward" else CHUNKED[1:] + SPLIT)):
        m = 300 if n <= 1024 else 12 if n > 32768 else 40
        yield Launch(m, n)
        for k in (2 * i, 2 * i + 1):
            chosen = dict(VARIANTS[k % len(VARIANTS)])
            if group == "backward" and n > 8192:
                chosen.pop("dtype", None)  # rows of float32 are split from there on
            yield Launch(m, n, **chosen)  # type: ignore[arg-type]
    if not group.startswith("split"):
        yield Launch(6, 1000, "float64")
        yield Launch(6, 9000, "float64", x="heads")


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
    assert gpu.multiprocessors(torch.device(DEVICE)) >= 1  # it is there, to be replaced
    gpu.multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
    torch.manual_seed(0)
    for launch in list(launches(group))[shard::shards]:
        _run(group, launch)
    print(f"{group}: all launches done, results right")


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
        expected, found = expected.double(), found.cpu().double()
        off = (expected - found).norm() / expected.norm().clamp_min(1e-30)
        limit = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-10}[launch.dtype]
        # With one column dX is the rounding error of a zero.
        if not off <= limit and not (name == "dX" and n == 1):
            raise SystemExit(f"{group}, {launch}: {name} is off by {off:.3g}")

    y, yc = both(m, n, of=dtype)
    rstd, rstdc = both(m)
    options = (1e-6, launch.offset, launch.mode)
    cpu.forward(x, weight, *options, y, rstd)
    if group in ("forward", "split_forward"):
        gpu.forward(xc, w, *options, yc, rstdc)
        check("y", y, yc), check("rstd", rstd, rstdc)
        return
    total, totalc = both(m)
    if group == "slices":
        cpu.statistic(x, total)
        gpu.statistic(xc, totalc)
        check("statistic", total, totalc)
        gpu.apply(xc, w, totalc, n, *options, yc, rstdc)
        check("y", y, yc), check("rstd", rstd, rstdc)
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
