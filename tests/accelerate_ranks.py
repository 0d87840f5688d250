"""A tiny Llama trained through Accelerate, its norms swapped before ``prepare``. Runs on every rank alike.

On GPUs it is a script, ``torchrun --nproc-per-node 2 tests/accelerate_ranks.py cp`` (or ``tp``). On CPU ranks it is
imported: Accelerate gives its ``ParallelismConfig`` to several accelerators and refuses it on CPUs (``ParallelismConfig
is only compatible DistributedType.FSDP (version 2) or DistributedType.Multi{Device}``), so that there its state is set
behind that check, to what the check would have let through; what ``prepare`` does then is the real thing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import BATCH, SEQUENCE, Family, batches, converted, loss_of, model_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LLAMA = Family("Llama", 5, more={"num_key_value_heads": 4})  # context_parallel repeats no heads
STEPS = 4


def accelerator_for(way: str) -> Any:
    """Over two ranks: "ddp", "fsdp", "cp" or "tp"."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    sizes = {"fsdp": {"dp_shard_size": 2}, "cp": {"cp_size": 2}, "tp": {"tp_size": 2}}.get(way)
    parallel = ParallelismConfig(**sizes) if sizes else None
    shards = None
    if way in ("fsdp", "cp"):
        shards = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
    if torch.cuda.is_available():
        return Accelerator(parallelism_config=parallel, fsdp_plugin=shards)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (dist.get_rank(), dist.get_rank(), 2, 2)), strict=True))
    accelerator = Accelerator(cpu=True)
    if parallel is not None:
        accelerator.state.parallelism_config = parallel
        accelerator.state.device_mesh = parallel.get_device_mesh("cpu")
    if shards is not None:
        accelerator.state.fsdp_plugin = shards
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def trained(way: str, converts: bool, path: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """(each step's loss, the first gradient of every parameter). ``path``: the saved model that tp loads."""
    accelerator = accelerator_for(way)
    dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
    model = _loaded(path, dtype) if way == "tp" else model_of(LLAMA, dtype)
    if way == "cp" and accelerator.device.type == "cpu":
        _gather_in_attention(model, accelerator)
    if converts:
        converted(model, LLAMA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for tokens, following in batches(STEPS):
        optimizer.zero_grad()
        loss = _step(way, model, accelerator, tokens.to(accelerator.device), following.to(accelerator.device))
        losses.append(_mean(loss))
        gradients = gradients or {n.removeprefix("module."): _whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def _loaded(path: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(tp_size=2)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=distributed).train()


def _step(way: str, model: nn.Module, accelerator: Any, tokens: Tensor, following: Tensor) -> Tensor:
    """Forward and backward of this rank's part of the batch."""
    rank, contexts = dist.get_rank(), ExitStack()
    if way in ("ddp", "fsdp"):
        rows = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        tokens, following = tokens[rows], following[rows]
    positions = torch.arange(SEQUENCE, device=tokens.device).repeat(len(tokens), 1)
    if way == "cp" and tokens.is_cuda:
        buffers = [tokens, following, positions]
        contexts.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        contexts.enter_context(
            accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            )
        )
    elif way == "cp":
        first = rank * SEQUENCE // 2
        tokens, following, positions = (t[:, first : first + SEQUENCE // 2] for t in (tokens, following, positions))
    with contexts:
        _, loss = loss_of(model, tokens, following, positions)
        accelerator.backward(loss)
    return loss.detach()


def _gather_in_attention(model: nn.Module, accelerator: Any) -> None:
    """torch's context_parallel, which maybe_context_parallel enters, has no attention for CPUs."""
    from spread_models import use_gathering_attention

    use_gathering_attention(model, accelerator.torch_device_mesh["cp"])


def _mean(loss: Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradient.float().cpu().clone()


def main(way: str) -> None:
    """Converted beside not converted, on GPUs; raises where they part by more than bfloat16 explains."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    with tempfile.TemporaryDirectory() as path:
        shared = [path]
        dist.broadcast_object_list(shared)  # the first rank's, where save_pretrained writes
        if way == "tp":
            model_of(LLAMA).save_pretrained(shared[0])
        dist.barrier()
        (own, exact), (found, gradients) = (trained(way, converts, shared[0]) for converts in (False, True))
        dist.barrier()
    assert own[0] - own[-1] > 0.1, own
    for loss, other in zip(found, own, strict=True):
        assert abs(loss - other) < 1e-2 * other, (found, own)
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= 0.05 * exact[name].norm(), name
    if rank == 0:
        print(f"{way} on {dist.get_world_size()} ranks: {own} with the model's norms, {found} converted")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
