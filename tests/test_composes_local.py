"""Plain tensors in one process: converted norms under checkpointing and torch.func, files, PEFT's LoRA."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composed import NORMS, OURS, SPREADS, assert_close, batches, drawn_model, loss_of, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshnorm

FORWARD = torch.ops.meshnorm.forward.default


def _norms(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """Ours, and torch's with the same weight."""
    theirs = nn.RMSNorm(8, eps=1e-6)
    nn.init.normal_(theirs.weight)
    norm = NORMS[kind](8)
    norm.load_state_dict(theirs.state_dict())
    if kind == "converted":
        assert meshnorm.convert(norm).swapped
    return norm.to(dtype), theirs.to(dtype)


def _assert_same_gradients(
    norm: nn.Module, theirs: nn.Module, spread: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    spread(lambda x: norm(x * 2).sin(), found).pow(3).sum().backward()
    theirs(expected * 2).sin().pow(3).sum().backward()
    for one, other in ((found.grad, expected.grad), (norm.weight.grad, theirs.weight.grad)):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


# --- checkpointing ---


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", OURS)
def test_a_checkpointed_norm_has_its_gradients(kind: str, use_reentrant: bool) -> None:
    _assert_same_gradients(*_norms(kind), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant))  # type: ignore[arg-type,return-value]


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.runs += func is FORWARD
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep", "runs"), [(True, 1), (False, 2)])
def test_selective_checkpointing_may_keep_a_converted_norm(keep: bool, runs: int) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keep and op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def spread(f: Any, x: Tensor) -> Tensor:
        return checkpoint(f, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    _assert_same_gradients(*_norms("converted"), spread)
    norm, _ = _norms("converted")
    with _Counted() as counted:
        spread(lambda x: norm(x * 2).sin(), torch.randn(5, 8, dtype=torch.float64).requires_grad_()).sum().backward()
    assert counted.runs == runs


# --- torch.func ---


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", OURS)
def test_transforms_of_a_norm_give_what_torchs_gives(kind: str) -> None:
    norm, theirs = _norms(kind)
    x, weights = torch.randn(3, 5, 8, dtype=torch.float64), {"weight": torch.randn(8, dtype=torch.float64)}

    def loss(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, (x,)).pow(3).sum()

    def per_sample(module: nn.Module) -> Any:
        gradients = torch.func.grad(functools.partial(loss, module), argnums=(0, 1))
        return torch.func.vmap(gradients, in_dims=(None, 0))(weights, x)

    found, expected = per_sample(norm), per_sample(theirs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert found[0]["weight"].shape == (3, 8)
    torch.testing.assert_close(torch.func.vmap(norm)(x), theirs(x), rtol=1e-12, atol=1e-12)


# --- files ---


@pytest.mark.parametrize("kind", OURS)
def test_a_saved_module_and_a_saved_state_dict_give_the_norm_again(kind: str) -> None:
    norm, x = _norms(kind)[0], torch.randn(5, 8, dtype=torch.float64)
    for what in (norm, norm.state_dict()):
        file = io.BytesIO()
        torch.save(what, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=isinstance(what, dict))
        if isinstance(what, dict):
            twin = copy.deepcopy(norm)
            nn.init.zeros_(twin.weight)  # type: ignore[arg-type]
            twin.load_state_dict(loaded)
            loaded = twin
        assert type(loaded) is type(norm) and torch.equal(loaded(x), norm(x))


# --- LoRA ---


def _with_adapters(model: nn.Module) -> nn.Module:
    """Adapters on the linears; the first block's outer norm is trained, all others are frozen."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "down"], modules_to_save=["0.outer"])
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.double()


def _trained(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    loss_of(model(x)).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def _names(gradients: dict[str, Tensor | None]) -> list[str]:
    return [name for name in gradients if "outer" in name or "inner" in name]


@pytest.mark.parametrize("kind", OURS)
def test_lora_trains_its_copy_of_a_norm_and_leaves_the_others(kind: str) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    (x,) = batches(1)
    exact = _trained(_with_adapters(drawn_model("torch")), x)
    found = _trained(_with_adapters(drawn_model(kind)), x)
    assert len(_names(found)) == 1 and len(found) == 1 + 4 * 2
    assert_close(found, exact, 1e-9, "the gradient of")


def _lora_under_fsdp(kind: str) -> None:
    spread, (x,) = SPREADS["fsdp"], batches(1)
    exact = _trained(_with_adapters(drawn_model("torch")), x)
    model = _with_adapters(drawn_model(kind))
    for block in (model.base_model.model[0], model.base_model.model[1], model):  # type: ignore[index,union-attr]
        fully_shard(block, mesh=spread.mesh)
    found = _trained(model, spread.cut(x, spread.mesh))
    assert len(_names(found)) == 1
    assert_close(found, exact, 1e-9, "the gradient of")


@pytest.mark.parametrize("kind", OURS)
def test_lora_under_fsdp2_has_the_gradients_of_one_process(pool2, kind: str) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    pool2.run(_lora_under_fsdp, kind)
