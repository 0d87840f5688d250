"""RMSNorm of a sequence that is split over GPUs: meshnorm beside torch's own norm on the same DTensor.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--shape 16384,8192] [--out results/FILE.json]

Device time is the median over calls with a cold L2, the slowest rank's. Calls are queued behind a kernel that keeps the
GPU busy, so that a call's own launches follow one another as they do in a training step, whatever the host takes; the
host's time is measured by itself, as calls queued without waiting.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshnorm
from meshnorm.checking.collectives import Recorder

QUEUE = 10  # calls behind one wait of the GPU


def device_time(call: Callable[[], object], flush: Tensor, rounds: int = 6) -> float:
    """Median µs of a call on the device, the slowest rank's."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host queues everything below
        events = []
        for _ in range(QUEUE):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) * 1e3 for start, end in events]
    median = torch.tensor(sorted(times)[len(times) // 2], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def host_time(call: Callable[[], object], calls: int = 50) -> float:
    """µs the host takes to queue a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = (time.perf_counter() - began) / calls * 1e6
    torch.cuda.synchronize()
    return took


def backward_of(
    norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor
) -> Callable[[], object]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight)
    return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="16384,8192")
    parser.add_argument("--out")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    rows, hidden = map(int, options.shape.split(","))
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    torch.manual_seed(rank)

    def placed(local: Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(1)], run_check=False)

    local = torch.randn(1, rows // world, hidden, device="cuda", dtype=torch.bfloat16)
    local_dy = torch.randn_like(local)
    plain_weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(plain_weight, 0)
    weight = distribute_tensor(plain_weight, mesh, [Replicate()])
    x, dy = placed(local), placed(local_dy)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return meshnorm.rms_norm(x, weight, 1e-6)

    def reduced(x: Tensor, weight: Tensor) -> Tensor:
        return meshnorm.rms_norm(x, weight, 1e-6, weight_grad="reduced")

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (hidden,), weight, 1e-6)

    collectives = {}
    for name, norm in (("deferred", ours), ("reduced", reduced)):
        y = norm(x.detach().requires_grad_(), weight.detach().requires_grad_())
        with Recorder(mesh) as forward:
            norm(x, weight)
        with Recorder(mesh) as backward:
            y.backward(dy)
        collectives[name] = {
            "forward": [vars(c) for c in forward.seen],
            "backward": [vars(c) for c in backward.seen],
        }
        assert not forward.seen, "the forward of a row-sharded norm communicates"
        assert len(backward.seen) <= 1, "the backward of a row-sharded norm communicates more than once"

    forwards = {
        "copy of the shard": lambda: local.clone(),
        "meshnorm, plain local tensor": lambda: ours(local, plain_weight),
        "meshnorm, DTensor": lambda: ours(x, weight),
        "torch F.rms_norm, DTensor": lambda: torchs(x, weight),
        "meshnorm, plain local tensor, again": lambda: ours(local, plain_weight),
    }
    backwards = {
        "meshnorm, plain local tensor": backward_of(ours, local, plain_weight, local_dy),
        "meshnorm, DTensor, deferred dW": backward_of(ours, x, weight, dy),
        "meshnorm, DTensor, reduced dW": backward_of(reduced, x, weight, dy),
        "torch F.rms_norm, DTensor": backward_of(torchs, x, weight, dy),
    }
    found = {
        "benchmark": "context parallel RMSNorm, sequence split over the GPUs",
        "shape": [rows, hidden],
        "dtype": "bfloat16",
        "gpus": f"{world} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "meshnorm": meshnorm.__version__,
        "date": datetime.date.today().isoformat(),
        "unit": "microseconds",
        "forward": {name: round(device_time(call, flush), 1) for name, call in forwards.items()},
        "backward": {name: round(device_time(call, flush), 1) for name, call in backwards.items()},
        "host, forward": {name: round(host_time(call), 1) for name, call in forwards.items()},
        "host, backward": {name: round(host_time(call), 1) for name, call in backwards.items()},
        "collectives": collectives,
    }
    found["forward, DTensor over plain"] = round(
        found["forward"]["meshnorm, DTensor"] / found["forward"]["meshnorm, plain local tensor"], 3
    )
    if rank == 0:
        print(json.dumps(found, indent=2))
        if options.out:
            Path(options.out).write_text(json.dumps(found, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
