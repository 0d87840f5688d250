"""Transformers' tensor parallelism for norms of queries and keys, which its plans wrap before they can be converted.

Norms over all heads (OLMo2, OLMo3, OLMoE, MiniMax-M2): their own plans gather queries, keys and values on every rank
before the norms, and run the attention of all heads everywhere. Here projections, norms and attention stay sharded by
head, and a norm exchanges one number a row each way::

    from meshnorm.integrations.transformers_tp import all_heads_tp_plan

    plan = all_heads_tp_plan(AutoConfig.from_pretrained(name))
    model = AutoModelForCausalLM.from_pretrained(
        name, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan)
    )

Norms of one head each (Qwen3, Gemma 3) see this rank's heads and exchange nothing: ``per_head_tp_plan``.

Seen with Transformers 5.24.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ReplicatedWithGradAllReduce,
    TensorParallelLayer,
)

from meshnorm.converting.converted import is_converted, swap
from meshnorm.converting.probe import recipe_of
from meshnorm.converting.shell import Refused
from meshnorm.errors import OptionError
from meshnorm.parallel import hidden_sharded

__all__ = [
    "PER_HEAD_STYLE",
    "STYLE",
    "HiddenParallelNorm",
    "PerHeadNorm",
    "all_heads_tp_plan",
    "per_head_tp_plan",
]

STYLE = "meshnorm_hidden"
PER_HEAD_STYLE = "meshnorm_per_head"

_SHARDED = {"colwise_gather_output": "colwise", "colwise_rep": "colwise"}
_SPLIT = {"rowwise_split_input": "rowwise", "rowwise_rep": "rowwise"}
_SUMMED = "replicated_with_grad_allreduce"


class HiddenParallelNorm(TensorParallelLayer):
    """The style of a norm whose x is this rank's part of the last dim; so is its y. Registered as ``STYLE``.

    The norm is converted as ``meshnorm.convert`` does it; its weight is sharded along. Raises OptionError for a norm
    that cannot be converted.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        weight = module._parameters.get(param)
        if weight is not None:
            sharded = distribute_tensor(weight.detach(), mesh, [Shard(weight.ndim - 1)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(sharded, requires_grad=weight.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _convert(module, STYLE)
        return super().install_forward(module, mesh)

    def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        width = next((weight.shape[-1] for weight in module.parameters(recurse=False)), None)

        def sharded(x: Any) -> Any:
            return hidden_sharded(x, mesh, width) if isinstance(x, torch.Tensor) else x

        return tuple(map(sharded, args)), {name: sharded(x) for name, x in kwargs.items()}

    def transform_output_post_forward(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()


class PerHeadNorm(ReplicatedWithGradAllReduce):
    """The style of a norm that sees this rank's heads, one a row. Registered as ``PER_HEAD_STYLE``.

    The norm is converted; its weight is whole on every rank, its gradient summed over them by Transformers. Raises
    OptionError for a norm that cannot be converted.
    """

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _convert(module, PER_HEAD_STYLE)
        return super().install_forward(module, mesh)


def _convert(module: nn.Module, style: str) -> None:
    if is_converted(module):
        return
    try:
        swap(module, recipe_of(module))
    except Refused as reason:
        raise OptionError(
            f"tp_plan gives a {type(module).__name__} the style {style!r}, and meshnorm cannot compute that "
            f"norm: {reason}; give it another style"
        ) from reason


# Its types say class, its uses instance.
ALL_PARALLEL_STYLES.register(STYLE, HiddenParallelNorm())  # type: ignore[arg-type]
ALL_PARALLEL_STYLES.register(PER_HEAD_STYLE, PerHeadNorm())  # type: ignore[arg-type]


def all_heads_tp_plan(config: Any, prefix: str = "model.") -> dict[str, str]:
    """The model's own tensor-parallel plan without the gather around q_norm and k_norm.

    Args:
        config: of a model whose own plan (``base_model_tp_plan``) gathers q_proj, k_proj and v_proj. Its heads, and its
            key-value heads, must divide by the tensor-parallel size.
        prefix: where the layers hang in the model that is loaded: ``"model."`` in a causal language model, ``""`` in a
            bare one.

    Returns:
        A plan for ``DistributedConfig(tp_plan=...)``. It is whole, since Transformers 5.17 takes it for the plan, where
        later releases merge it with the model's.

    Raises:
        OptionError: the model's own plan gathers nothing.
    """
    own = _own_plan(config)
    plan: dict[str, str] = {}
    for name, style in own.items():
        layer, _, part = name.rpartition(".")
        if part in ("q_proj", "k_proj", "v_proj") and style in _SHARDED:
            plan[name] = _SHARDED[style]
            if part != "v_proj":
                plan[f"{layer}.{part[0]}_norm"] = STYLE
        elif part == "o_proj" and style in _SPLIT:
            plan[name] = _SPLIT[style]
    if STYLE not in plan.values():
        raise OptionError(
            f"the tensor-parallel plan of {type(config).__name__} gathers no queries and keys: "
            f"there is nothing to replace; use it as it is"
        )
    return {f"{prefix}{name}": style for name, style in (own | plan).items()}


def per_head_tp_plan(config: Any, prefix: str = "model.") -> dict[str, str]:
    """The model's own tensor-parallel plan, its norms of one head each converted: those whose gradients it sums.

    Args:
        config: of a model whose own plan has norms that are ``"replicated_with_grad_allreduce"``.
        prefix: as in ``all_heads_tp_plan``.

    Returns:
        A plan for ``DistributedConfig(tp_plan=...)``, whole.

    Raises:
        OptionError: the model's own plan has no such norm.
    """
    own = _own_plan(config)
    plan = {name: PER_HEAD_STYLE for name, style in own.items() if style == _SUMMED and "norm" in name}
    if not plan:
        raise OptionError(
            f"the tensor-parallel plan of {type(config).__name__} has no norms of one head each: "
            f"use it as it is, and meshnorm.convert on the model"
        )
    return {f"{prefix}{name}": style for name, style in (own | plan).items()}


def _own_plan(config: Any) -> dict[str, str]:
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})
