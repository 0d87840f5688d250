"""Training the tiny models on ranks. Each function here runs on every rank, and returns what that rank found.

Context parallelism hands a model plain local tensors, and its attention has to see the whole sequence. torch's own
``context_parallel`` knows the attention of GPUs alone (on CPUs: ``aten._scaled_dot_product_flash_attention_for_cpu.
default does not have a sharding strategy registered``), so that here the attention gathers keys and values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import BATCH, SEQUENCE, Family, Trained, converted, model_of, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshnorm
from meshnorm.converting.converted import is_converted

GATHERS = "gathers_keys_and_values"

_meshes: dict[str, DeviceMesh] = {}


def _mesh(name: str) -> DeviceMesh:
    """ "cp" of a dp 2 × cp 2 mesh, or "dp_cp", both of its dims as one; made once on a rank."""
    if not _meshes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        _meshes.update(cp=mesh["cp"], dp_cp=mesh._flatten("dp_cp"))
    return _meshes[name]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mean(loss: Tensor) -> Tensor:
    total = loss.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# --- dp × cp ---


def _gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """(batch, heads, sequence, dim) from this rank's part of the sequence; its gradient is summed over the ranks."""
    placed = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
    return placed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def use_gathering_attention(model: nn.Module, mesh: DeviceMesh) -> None:
    """The model's attention gets this rank's queries, keys and values, and gathers the last two over the mesh."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(GATHERS, partial(_attention, mesh))
    AttentionMaskInterface.register(GATHERS, lambda *args, **named: None)
    model.set_attn_implementation(GATHERS)  # type: ignore[operator]


def _attention(
    mesh: DeviceMesh,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries to all keys, with a window and GPT-OSS's sinks where there are such."""
    key, value = (_gathered(t, mesh) for t in (key, value))
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    asking = torch.arange(query.shape[2]).view(-1, 1) + mesh.get_local_rank() * query.shape[2]
    back = asking - torch.arange(key.shape[2])
    seen = (back >= 0) if sliding_window is None else (back >= 0) & (back < sliding_window)
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def train_data_and_context_parallel(family: Family, dtype: torch.dtype, converts: bool, steps: int) -> Trained:
    """FSDP2 over dp 2 × cp 2, plain local tensors inside; a model with recurrent layers over dp 4."""
    mesh, rank = _mesh("dp_cp"), dist.get_rank()
    rows, columns = (BATCH // 4, SEQUENCE) if family.recurrent else (BATCH // 2, SEQUENCE // 2)
    row, column = (rank, 0) if family.recurrent else divmod(rank, 2)
    model = model_of(family, dtype)
    if converts:
        converted(model, family)
    if not family.recurrent:
        use_gathering_attention(model, _mesh("cp"))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(
        model,
        steps,
        cut=lambda batch: batch[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns].contiguous(),
        mean=_mean,
        whole=whole,
    )


def _layers(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


# --- tp ---


def train_tensor_parallel(family: Family, dtype: torch.dtype, converts: bool, steps: int, path: str) -> Trained:
    """Transformers' own plan over two ranks; converted, with our styles where the plan wraps a norm."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from meshnorm.integrations.transformers_tp import all_heads_tp_plan, per_head_tp_plan

    plan = {"all": all_heads_tp_plan, "each": per_head_tp_plan}.get(family.heads) if converts else None
    distributed = DistributedConfig(tp_size=2, tp_plan=plan(_config(path)) if plan else None)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=distributed).train()
    if converts:
        report = meshnorm.convert(model)
        ours = [module for module in model.modules() if is_converted(module)]
        assert (len(ours), len(report.left)) == (family.norms, family.left + (family.norms - len(report.swapped)))
    return train(model, steps, whole=whole)


def _config(path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)
