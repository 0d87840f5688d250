"""Gradient accumulation, clipping, optimizers and freezing: each step equals that of one process in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from composed import (
    OURS,
    SPREADS,
    TORCH_211,
    Recipe,
    assert_close,
    assert_equal_to_one_process,
    drawn_model,
    is_norm_weight,
    train,
)
from torch import nn

from meshnorm.checking.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLAIN = ("one process", "ddp", "fsdp", "fsdp × cp")
OF_DTENSORS = ("cp of DTensors", "tp", "fsdp × tp")
REDUCED_BY_FSDP = ("fsdp × tp",)  # which leaves no gradient partial


def _equal(ranks: Ranks, way: str, kind: str, recipe: Recipe, weight_grad: str = "auto") -> None:
    world = 1
    for _, size in SPREADS[way].dims:
        world *= size
    if world == 1:
        ranks(2).run(_one_process_equals_torchs_norm, kind, recipe)  # whose ranks have one thread each
    else:
        ranks(world).run(assert_equal_to_one_process, way, kind, recipe, weight_grad=weight_grad)


def _one_process_equals_torchs_norm(kind: str, recipe: Recipe) -> None:
    spread = SPREADS["one process"]
    models = [drawn_model("torch"), drawn_model(kind)]
    expected, found = (train(model, spread, recipe) for model in models)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-9, "the gradient of")
    trained, exact = ({name: p.detach() for name, p in model.named_parameters()} for model in reversed(models))
    assert_close(trained, exact, 1e-9, "after the training,")


def _cases(*ways: str) -> list:
    """Both kinds of norm in one process, where it costs nothing; on ranks by turns."""
    found = [(way, kind) for way in ways for kind in OURS if way in ("one process", "tp")]
    return found + [(way, OURS[i % 2]) for i, way in enumerate(ways) if way not in ("one process", "tp")]


EVERYWHERE = pytest.mark.parametrize(("way", "kind"), _cases(*PLAIN, *OF_DTENSORS))


# --- accumulation ---


@pytest.mark.parametrize("sync_last_only", [False, True])
@EVERYWHERE
def test_three_micro_batches_accumulate_to_the_gradient_of_all(ranks: Ranks, way, kind, sync_last_only) -> None:
    """Reduced after each, or once after the last, as FSDP2's ``set_requires_gradient_sync`` asks."""
    _equal(ranks, way, kind, Recipe(steps=2, micro_batches=3, sync_last_only=sync_last_only))


# --- clipping ---

WRONG_ON_211 = pytest.mark.xfail(
    TORCH_211, strict=True, reason="torch 2.11 with foreach=True takes the parts of a Partial gradient for the whole"
)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("way", "kind"), _cases(*PLAIN, *REDUCED_BY_FSDP))
def test_clip_grad_norm_clips_as_in_one_process(ranks: Ranks, way, kind, foreach) -> None:
    _equal(ranks, way, kind, Recipe(clip=0.05, clip_foreach=foreach))


def test_clipping_matters_to_these_gradients() -> None:
    spread = SPREADS["one process"]
    clipped = train(drawn_model("module"), spread, Recipe(steps=1, clip=0.05))
    free = train(drawn_model("module"), spread, Recipe(steps=1))
    assert not torch.allclose(clipped[0]["0.outer.weight"], free[0]["0.outer.weight"], rtol=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_grad", ["auto", "reduced"])
@pytest.mark.parametrize("way", ["cp of DTensors", "tp"])
def test_clip_grad_norm_without_foreach_is_right_on_partial_gradients(ranks: Ranks, way, weight_grad) -> None:
    _equal(ranks, way, "module", Recipe(clip=0.05), weight_grad)


# "reduced" helps where the norms' gradients are all that is partial; in "cp of DTensors" those of the linears are too.
@pytest.mark.parametrize(
    ("way", "weight_grad"),
    [
        pytest.param("cp of DTensors", "auto", marks=WRONG_ON_211),
        pytest.param("cp of DTensors", "reduced", marks=WRONG_ON_211),
        pytest.param("tp", "auto", marks=WRONG_ON_211),
        ("tp", "reduced"),
    ],
)
def test_clip_grad_norm_with_foreach_is_right_on_partial_gradients(ranks: Ranks, way, weight_grad) -> None:
    _equal(ranks, way, "module", Recipe(clip=0.05, clip_foreach=True), weight_grad)


# --- optimizers ---


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@EVERYWHERE
def test_adamw_steps_as_in_one_process(ranks: Ranks, way, kind, implementation) -> None:
    _equal(ranks, way, kind, Recipe(implementation=implementation))


@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
@pytest.mark.parametrize(("way", "kind"), _cases(*PLAIN, *REDUCED_BY_FSDP))
def test_sgd_steps_as_in_one_process(ranks: Ranks, way, kind, implementation) -> None:
    _equal(ranks, way, kind, Recipe(optimizer="SGD", implementation=implementation))


@pytest.mark.parametrize(
    ("way", "implementation", "weight_grad"),
    [
        ("cp of DTensors", "for-loop", "auto"),
        pytest.param("cp of DTensors", "foreach", "auto", marks=WRONG_ON_211),
        pytest.param("cp of DTensors", "foreach", "reduced", marks=WRONG_ON_211),
        ("tp", "for-loop", "auto"),
        ("tp", "for-loop", "reduced"),
        pytest.param("tp", "foreach", "auto", marks=WRONG_ON_211),
        ("tp", "foreach", "reduced"),
    ],
)
def test_sgd_is_right_on_partial_gradients(ranks: Ranks, way, implementation, weight_grad) -> None:
    _equal(ranks, way, "module", Recipe(optimizer="SGD", implementation=implementation), weight_grad)


FUSED_SGD = Recipe(optimizer="SGD", implementation="fused")


@pytest.mark.parametrize(("way", "kind"), _cases("one process", "ddp"))
def test_fused_sgd_steps_as_in_one_process_on_plain_parameters(ranks: Ranks, way, kind) -> None:
    _equal(ranks, way, kind, FUSED_SGD)


def _fused_sgd_is_refused(way: str) -> None:
    spread = SPREADS[way]
    model = spread.apply(drawn_model("module"), spread.mesh)
    with pytest.raises(NotImplementedError, match="_fused_sgd_"):
        train(model, spread, FUSED_SGD)


@pytest.mark.parametrize("way", ["fsdp", "cp of DTensors", "tp"])
def test_fused_sgd_of_dtensors_is_refused_by_torch(pool2: RankPool, way: str) -> None:
    pool2.run(_fused_sgd_is_refused, way)


# --- freezing ---


@pytest.mark.parametrize(("way", "kind"), _cases("one process", "fsdp", "fsdp × cp", *OF_DTENSORS))
def test_norms_frozen_and_thawed_in_mid_training_train_as_in_one_process(ranks: Ranks, way, kind) -> None:
    """Frozen ones get no gradient, the others that which they had; thawed ones go on."""
    _equal(ranks, way, kind, Recipe(steps=4, frozen_after=1, thawed_after=3))


def _frozen_under_ddp(kind: str) -> None:
    spread, models = SPREADS["ddp"], [drawn_model("torch"), drawn_model(kind)]
    for model in models:
        _freeze_norms(model)
    expected = train(models[0], SPREADS["one process"], Recipe())
    for found, one in zip(train(spread.apply(models[1], spread.mesh), spread, Recipe()), expected, strict=True):
        assert_close(found, one, 1e-9, "the gradient of")
    wrapped = spread.apply(drawn_model(kind), spread.mesh)
    train(wrapped, spread, Recipe(steps=1))
    _freeze_norms(wrapped)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        train(wrapped, spread, Recipe())


def _freeze_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_norm_weight(name))


@pytest.mark.parametrize("kind", OURS)
def test_norms_are_frozen_before_ddp_wraps_them(pool2: RankPool, kind: str) -> None:
    """torch's DDP waits for the gradients of all that was to be trained when it wrapped the model."""
    pool2.run(_frozen_under_ddp, kind)
