"""What a call costs the host: calls queued without waiting, divided by their number. On a CPU, where nothing is queued,
a call's whole time: a small shape leaves the host's part.

PYTHONPATH=src python3 benchmarks/host.py [--shape 64,4096] [--profile forward] [--device cpu --shape 1,16]
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import pstats
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshnorm
from meshnorm import functional, ops
from meshnorm.kernels import kernels_for

# What a call may cost, as a multiple of another one.
TARGETS = (
    ("forward without gradients", "F.rms_norm", "meshnorm", 1.5),
    ("forward and backward", "F.rms_norm", "meshnorm", 1.6),
    ("forward without gradients", "meshnorm", "meshnorm, DTensor", 2.0),
    ("forward and backward", "meshnorm", "meshnorm, DTensor", 2.0),
)


def microseconds(call: Callable[[], object], calls: int = 200, rounds: int = 15) -> float:
    """The smallest of some rounds: what the call takes when nothing interferes."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(20):
        call()
    found = []
    for _ in range(rounds):
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    synchronize()
    return min(found)


def both(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> Callable[[], object]:
    """Forward and backward, without what accumulates gradients."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    return lambda: torch.autograd.grad(norm(x, weight), (x, weight), dy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="64,4096")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", choices=("forward", "both", "dtensor", "dtensor-both"))
    options = parser.parse_args()
    m, n = map(int, options.shape.split(","))
    x = torch.randn(m, n, device=options.device, dtype=torch.bfloat16)
    weight, dy = torch.randn(n, device=x.device, dtype=torch.bfloat16), torch.randn_like(x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # nothing is communicated
    mesh = init_device_mesh(x.device.type, (1,))
    xd, dyd = (DTensor.from_local(t, mesh, [Shard(0)]) for t in (x, dy))
    wd = DTensor.from_local(weight, mesh, [Replicate()])

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (n,), weight, 1e-6)

    ours = meshnorm.rms_norm
    xg = x.clone().requires_grad_()
    ours(x, weight)
    norm = functional._known[next(reversed(functional._known))]  # what that call left behind
    y, rstd = torch.empty_like(x), torch.empty(m, device=x.device)
    kernels = kernels_for(x.device)
    device = torch.cuda.get_device_name() if x.is_cuda else "CPU"
    print(f"{device}, torch {torch.__version__}, {datetime.date.today()}, {m}x{n} bfloat16, host microseconds a call")
    calls: dict[str, Callable[[], object]] = {
        "forward without gradients, F.rms_norm": lambda: torchs(x, weight),
        "forward without gradients, meshnorm": lambda: ours(x, weight),
        "  of which: without looking the call up": lambda: norm(x, weight),
        "  of which: allocating y": lambda: torch.empty_like(x),
        "  a call not seen before: ops.forward": lambda: ops.forward.direct(x, weight, 1e-6, 0.0, "llama", 1),  # type: ignore[attr-defined]
        "  a call not seen before: its launch": lambda: kernels.forward(x[None], weight, 1e-6, 0.0, "llama", y, rstd),
        "forward without gradients, meshnorm, DTensor": lambda: ours(xd, wd),
        "forward and backward, F.rms_norm": both(torchs, x, weight, dy),
        "forward and backward, meshnorm": both(ours, x, weight, dy),
        "forward and backward, meshnorm, DTensor": both(ours, xd, wd, dyd),
        "forward, with gradients to come, meshnorm": lambda: ours(xg, weight),
        "clone": lambda: x.clone(),
        "DTensor.from_local": lambda: DTensor.from_local(x, mesh, [Shard(0)]),
    }
    found = {}
    for name, call in calls.items():
        found[name] = microseconds(call)
        print(f"{name:<46} {found[name]:7.1f}", flush=True)
    for what, base, whose, most in TARGETS:
        ratio = found[f"{what}, {whose}"] / found[f"{what}, {base}"]
        verdict = "met" if ratio <= most else "MISSED"
        print(f"{what}: {whose} takes {ratio:.2f} times what {base} takes, {most} at most: {verdict}")
    if options.profile:
        names = {
            "forward": "forward without gradients, meshnorm",
            "both": "forward and backward, meshnorm",
            "dtensor": "forward without gradients, meshnorm, DTensor",
            "dtensor-both": "forward and backward, meshnorm, DTensor",
        }
        with cProfile.Profile() as profile:
            microseconds(calls[names[options.profile]])
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
