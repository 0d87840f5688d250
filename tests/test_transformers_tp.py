"""Transformers' tensor parallelism with our style for norms over all heads, beside one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from meshnorm.checking.collectives import Recorder
from meshnorm.errors import OptionError

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="this Transformers has another tensor parallelism"
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}


def _saved(name: str, path, **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SMALL, **more))
    for part, parameter in model.named_parameters():
        if "norm" in part:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(path)
    return model.train()


def _tokens() -> torch.Tensor:
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def _step(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = _tokens()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def _sharded_step(path: str, plan: bool) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    from transformers.distributed import DistributedConfig

    from meshnorm.integrations.transformers_tp import all_heads_tp_plan

    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(path)
    distributed = DistributedConfig(tp_size=2, tp_plan=all_heads_tp_plan(config) if plan else None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=distributed
    ).train()
    attention = model.model.layers[0].self_attn
    heads: list[tuple[int, ...]] = []
    attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(tuple(args[0].shape)))
    if plan:
        assert attention.q_norm.weight.placements == (Shard(0),)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with Recorder(mesh) as recorder:
        loss, gradients = _step(model)
    assert heads == [(2, 12, 16 if plan else 32)]  # this rank's heads alone, or all of them
    return loss, gradients, [c.kind for c in recorder.seen]


@pytest.mark.parametrize("name", ["Olmo2", "Olmoe"])
def test_a_model_with_norms_over_all_heads_equals_one_process(pool2, tmp_path, name) -> None:
    more = MOE if name == "Olmoe" else {}
    loss, gradients = _step(_saved(name, tmp_path, **more))
    gathers = {}
    for plan in (True, False):
        for found_loss, found, kinds in pool2.run(_sharded_step, str(tmp_path), plan):
            gathers[plan] = kinds.count("all_gather")
            assert found_loss == pytest.approx(loss, rel=1e-5)
            if plan:
                assert found.keys() == gradients.keys()
                for part, gradient in found.items():
                    off = (gradient - gradients[part]).abs().max() / gradients[part].abs().max()
                    assert off < 1e-4, part
    assert gathers[True] < gathers[False]


def _generates(path: str) -> torch.Tensor:
    from transformers.distributed import DistributedConfig

    from meshnorm.integrations.transformers_tp import all_heads_tp_plan

    config = transformers.AutoConfig.from_pretrained(path)
    distributed = DistributedConfig(tp_size=2, tp_plan=all_heads_tp_plan(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=distributed
    ).eval()
    tokens = _tokens()
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False)


def test_it_generates_what_one_process_generates(pool2, tmp_path) -> None:
    model, tokens = _saved("Olmo2", tmp_path).eval(), _tokens()
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False)
    for found in pool2.run(_generates, str(tmp_path)):
        assert torch.equal(found, expected)


def test_the_plan_replaces_the_gathering_entries_of_each_family() -> None:
    from meshnorm.integrations.transformers_tp import STYLE, all_heads_tp_plan

    attention = "model.layers.*.self_attn"
    expected = {
        **{f"{attention}.{part}": "colwise" for part in ("q_proj", "k_proj", "v_proj")},
        **{f"{attention}.{part}": STYLE for part in ("q_norm", "k_norm")},
        f"{attention}.o_proj": "rowwise",
    }
    for family in ("Olmo2", "Olmo3", "Olmoe", "MiniMaxM2", "FlexOlmo"):
        config = getattr(transformers, f"{family}Config", None)
        if config is not None:
            plan, own = all_heads_tp_plan(config()), config().base_model_tp_plan
            assert plan == {f"model.{name}": style for name, style in own.items()} | expected
    with pytest.raises(OptionError, match="LlamaConfig gathers no queries and keys"):
        all_heads_tp_plan(transformers.LlamaConfig())


def test_a_norm_that_cannot_be_converted_is_named() -> None:
    from meshnorm.integrations.transformers_tp import HiddenParallelNorm

    with pytest.raises(OptionError, match=r"a LayerNorm the style 'meshnorm_hidden'.* it holds weight, bias"):
        HiddenParallelNorm().install_forward(torch.nn.LayerNorm(8), None)


def test_the_plan_for_norms_of_one_head_names_those_whose_gradients_are_summed() -> None:
    from meshnorm.integrations.transformers_tp import PER_HEAD_STYLE, per_head_tp_plan

    for family in ("Qwen3", "Gemma3Text", "Qwen3Next"):
        config = getattr(transformers, f"{family}Config")()
        expected = {f"layers.*.self_attn.{part}_norm": PER_HEAD_STYLE for part in ("q", "k")}
        assert per_head_tp_plan(config, prefix="") == config.base_model_tp_plan | expected
    with pytest.raises(OptionError, match="LlamaConfig has no norms of one head each"):
        per_head_tp_plan(transformers.LlamaConfig())


def _named_x() -> None:
    from meshnorm.integrations.transformers_tp import HiddenParallelNorm

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8)
    expected, style = norm(x), HiddenParallelNorm()
    style.shard_param(norm, "weight", mesh)
    style.install_forward(norm, mesh)
    mine = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    for y in (norm(x[:, mine]), norm(hidden_states=x[:, mine])):
        torch.testing.assert_close(y, expected[:, mine])


def test_a_norm_over_all_heads_may_be_called_with_a_named_x(pool2) -> None:
    pool2.run(_named_x)
