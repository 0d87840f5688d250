"""What a call costs the host on a GPU machine: calls queued without waiting, divided by their number.

PYTHONPATH=src python3 benchmarks/host.py [--shape 64,4096] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import pstats
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton

import meshnorm
from meshnorm import ops
from meshnorm.kernels import gpu


def microseconds(call: Callable[[], object], calls: int = 200, rounds: int = 5) -> float:
    """The smallest of some rounds: what the call takes when nothing interferes."""
    for _ in range(20):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="64,4096")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    m, n = map(int, options.shape.split(","))
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    weight, dy = torch.randn(n, device="cuda", dtype=torch.bfloat16), torch.randn_like(x)
    xg, wg = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y, rstd = torch.empty_like(x), torch.empty(m, device="cuda")

    def both(norm: Callable) -> Callable[[], object]:
        return lambda: torch.autograd.grad(norm(xg, wg), (xg, wg), dy)

    def torchs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (n,), weight, 1e-6)

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, ", end="")
    print(f"{datetime.date.today()}, {m}x{n} bfloat16, host microseconds a call")
    calls: dict[str, Callable[[], object]] = {
        "F.rms_norm, forward without gradients": lambda: torchs(x, weight),
        "meshnorm, forward without gradients": lambda: meshnorm.rms_norm(x, weight),
        "  of which: ops.forward": lambda: ops.forward.direct(x, weight, 1e-6, 0.0, "llama", 1),  # type: ignore[attr-defined]
        "  of which: kernel and launch": lambda: gpu.forward(x[None], weight, 1e-6, 0.0, "llama", y, rstd),
        "F.rms_norm, forward and backward": both(torchs),
        "meshnorm, forward and backward": both(lambda x, weight: meshnorm.rms_norm(x, weight)),
        "clone": lambda: x.clone(),
    }
    for name, call in calls.items():
        print(f"{name:<40} {microseconds(call):7.1f}", flush=True)
    if options.profile:
        with cProfile.Profile() as profile:
            microseconds(calls["meshnorm, forward without gradients"])
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
