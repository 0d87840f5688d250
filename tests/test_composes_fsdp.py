"""FSDP2, HSDP, DDP, context and tensor parallelism: every gradient is that of one process in float64.

The three ways in which trainers get a norm weight's gradient wrong have a test each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from composed import (
    OURS,
    SPREADS,
    Recipe,
    assert_close,
    assert_equal_to_one_process,
    assert_replicas_agree,
    batches,
    drawn_model,
    is_norm_weight,
    loss_of,
    named_parameters,
    train,
    whole,
)
from torch import Tensor

from meshnorm.checking.ranks import RankPool

Ranks = Callable[[int], RankPool]
WAYS = ("ddp", "fsdp", "hsdp", "fsdp × cp", "cp of DTensors", "fsdp × cp of DTensors", "tp", "fsdp × tp")
OF_DTENSORS = ("cp of DTensors", "fsdp × cp of DTensors", "tp", "fsdp × tp")


def _pool(ranks: Ranks, way: str) -> RankPool:
    world = 1
    for _, size in SPREADS[way].dims:
        world *= size
    return ranks(world)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("way", WAYS)
def test_three_steps_equal_those_of_one_process(ranks: Ranks, way: str, kind: str) -> None:
    _pool(ranks, way).run(assert_equal_to_one_process, way, kind, Recipe(steps=3))


@pytest.mark.parametrize("way", OF_DTENSORS)
def test_three_steps_with_gradients_reduced_by_the_norm_equal_those_of_one_process(ranks: Ranks, way: str) -> None:
    _pool(ranks, way).run(assert_equal_to_one_process, way, "module", Recipe(steps=3), weight_grad="reduced")


# --- the classic failures ---


def _gradients(way: str, kind: str, weight_grad: str, micro_batches: int = 1) -> dict[str, Tensor]:
    """Those of the norm weights, from backward passes alone."""
    spread = SPREADS[way]
    model = spread.apply(drawn_model(kind, weight_grad=weight_grad), spread.mesh)
    for x in batches(micro_batches):
        loss_of(model(spread.cut(x, spread.mesh))).backward()
    found = {name: whole(p.grad) for name, p in named_parameters(model) if is_norm_weight(name)}
    assert len(found) == 5 and None not in found.values(), "a norm's weight has no gradient"
    return found  # type: ignore[return-value]


def _exact_gradients(part: slice = slice(None), micro_batches: int = 1) -> dict[str, Tensor]:
    """Of one process; ``part``: of these sequence positions alone, as a share of the whole."""
    model = drawn_model("torch")
    for x in batches(micro_batches):
        (model(x)[:, part].pow(3).sum() / x.numel()).backward()
    return {name: p.grad for name, p in model.named_parameters() if is_norm_weight(name)}  # type: ignore[misc]


def _no_share_is_lost(way: str, kind: str, weight_grad: str) -> None:
    found, exact = _gradients(way, kind, weight_grad), _exact_gradients()
    halves = [_exact_gradients(part) for part in (slice(None, 3), slice(3, None))]
    for name, gradient in exact.items():
        for half in halves:  # each share is large enough to be missed
            assert half[name].norm() > 0.02 * gradient.norm()
    assert_close(found, exact, 1e-11, "the gradient of")  # type: ignore[arg-type]


def _modes(way: str) -> tuple[str, ...]:
    return ("auto", "reduced") if way in OF_DTENSORS else ("auto",)


EACH = pytest.mark.parametrize(
    ("way", "kind", "weight_grad"),
    [(way, OURS[i % 2], mode) for i, way in enumerate(WAYS) for mode in _modes(way)],  # both kinds take the same path
)


@EACH
def test_no_ranks_share_of_a_norm_weights_gradient_is_lost(ranks: Ranks, way, kind, weight_grad) -> None:
    _pool(ranks, way).run(_no_share_is_lost, way, kind, weight_grad)


def _nothing_is_counted_twice(way: str, kind: str, weight_grad: str) -> None:
    """Over three micro-batches: what reduces an accumulated gradient again counts the earlier ones again."""
    found, exact = _gradients(way, kind, weight_grad, 3), _exact_gradients(micro_batches=3)
    for name, gradient in exact.items():
        times = (found[name] * gradient).sum() / gradient.square().sum()
        assert abs(times - 1) < 1e-9, f"the gradient of {name} counts {times:.3f} times"
    assert_close(found, exact, 1e-11, "the gradient of")  # type: ignore[arg-type]


@EACH
def test_no_norm_weights_gradient_is_counted_twice(ranks: Ranks, way, kind, weight_grad) -> None:
    _pool(ranks, way).run(_nothing_is_counted_twice, way, kind, weight_grad)


def _no_drift(way: str, kind: str) -> None:
    """Every parameter, in float32; the bound is what rounding each step's update explains, steps adding up."""
    spread, recipe = SPREADS[way], Recipe(steps=50, lr=0.01, clip=1.0)
    exact = drawn_model("torch")
    train(exact, SPREADS["one process"], recipe)
    model = spread.apply(drawn_model(kind, torch.float32), spread.mesh)
    start = {name: whole(p) for name, p in named_parameters(model)}
    train(model, spread, recipe, torch.float32)
    assert_replicas_agree(model)
    trained = {name: whole(p) for name, p in named_parameters(model)}
    for name, before in start.items():
        assert before is not None and not torch.allclose(trained[name], before, rtol=0.05)  # type: ignore[arg-type]
    bound = 50 * 4 * torch.finfo(torch.float32).eps
    assert_close(trained, {n: p.detach() for n, p in exact.named_parameters()}, bound, "after 50 steps")


@pytest.mark.parametrize(
    ("way", "kind"),
    [("ddp", "module"), ("tp", "converted"), ("fsdp × tp", "module")],
)
def test_norm_weights_do_not_drift_between_ranks_over_50_steps(ranks: Ranks, way, kind) -> None:
    _pool(ranks, way).run(_no_drift, way, kind)


# --- FSDP2's mixed precision ---


def _fp32_reduce(kind: str) -> None:
    """Each rank's gradient is bfloat16, as the weight is in the backward; the mean of both is taken in float32."""
    spread, (x,) = SPREADS["fsdp fp32 reduce"], batches(1, torch.float32)
    mine = spread.cut(x, spread.mesh)
    alone = drawn_model(kind, torch.bfloat16)
    loss_of(alone(mine.bfloat16())).backward()
    expected = {}
    for name, parameter in named_parameters(alone):
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        total = parameter.grad.float()
        dist.all_reduce(total)
        expected[name] = total / 2
    model = spread.apply(drawn_model(kind, torch.float32), spread.mesh)
    loss_of(model(mine)).backward()
    rounded_too = 0
    for name, parameter in named_parameters(model):
        found = whole(parameter.grad)
        assert found is not None and found.dtype == torch.float32
        assert torch.equal(found, expected[name]), name
        rounded_too += torch.equal(found, found.bfloat16().float())
    assert rounded_too < len(expected), "no gradient holds more than bfloat16 does: it was reduced in bfloat16"


@pytest.mark.parametrize("kind", OURS)
def test_bfloat16_gradients_are_reduced_in_float32(pool2: RankPool, kind: str) -> None:
    pool2.run(_fp32_reduce, kind)


# --- torch.compile on top ---


def _compiled(way: str, kind: str) -> None:
    torch.compiler.reset()
    spread, recipe, exact = SPREADS[way], Recipe(steps=2), drawn_model("torch")
    expected = train(exact, SPREADS["one process"], recipe)
    model = spread.apply(drawn_model(kind), spread.mesh)
    for block in model[:2]:  # type: ignore[index]
        block.compile(backend="aot_eager", fullgraph=True)
    for found, one in zip(train(model, spread, recipe), expected, strict=True):
        assert_close(found, one, 1e-9, "the gradient of")


@pytest.mark.parametrize(("way", "kind"), [("fsdp", "module"), ("cp of DTensors", "module"), ("tp", "converted")])
def test_blocks_compiled_whole_have_the_gradients_of_one_process(pool2: RankPool, way: str, kind: str) -> None:
    pool2.run(_compiled, way, kind)
