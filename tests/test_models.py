"""Tiny models of ten families, converted and not: same logits, gradients as near to float64, the loss curve they had.

The tolerances. On a CPU a converted norm gives y bit for bit, so that the first logits are the same bits. Its gradient
is the formula's, rounded once; autograd's of the norm's own lines is rounded elsewhere: from the second step on the
curves may part. In float32 both gradients are some 1e-7 from float64 and the loss is a number of 24 bits: 4 ulp of it
are allowed over 20 steps (1 was seen). In bfloat16 the parameters are rounded at each step, which takes either curve
some distance from float64; the converted one may not be further off, nor further than that from the own one.
``benchmarks/models_cpu.py`` prints what is measured.
"""

from __future__ import annotations

import copy

import pytest
import torch
from spread_models import train_data_and_context_parallel, train_tensor_parallel
from tiny_models import FAMILIES, Family, Trained, converted, error_of, judge, model_of, train

pytest.importorskip("transformers", reason="Transformers is not installed: pip install meshnorm[transformers]")

ULP = 2.0**-23
SHARED = [family for family in FAMILIES if family.sharded]


@pytest.fixture(autouse=True)
def one_thread():
    """As on the ranks: a product's order of summation depends on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _apart(found: Trained, other: Trained) -> list[float]:
    return [abs(a - b) for a, b in zip(found.losses, other.losses, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_converted_model_has_the_logits_and_the_loss_curve_it_had(family: Family, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    own, exact = train(copy.deepcopy(model)), train(judge(model))
    found = train(converted(model, family))
    assert torch.equal(found.logits, own.logits)
    assert own.losses[0] - own.losses[-1] > 1.5  # it learns
    if dtype is torch.float32:
        assert all(gap <= 4 * ULP * loss for gap, loss in zip(_apart(found, own), own.losses, strict=True))
        assert all(gap <= 8 * ULP * loss for gap, loss in zip(_apart(found, exact), exact.losses, strict=True))
    else:
        noise = max(_apart(own, exact))
        assert max(_apart(found, own)) <= 2 * noise and max(_apart(found, exact)) <= 1.5 * noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_no_gradient_of_a_converted_model_is_further_from_float64(family: Family, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    own, exact = train(copy.deepcopy(model), 1), train(judge(model), 1)
    found = train(converted(model, family), 1)
    assert found.gradients.keys() == own.gradients.keys() == exact.gradients.keys()
    eps = torch.finfo(dtype).eps
    assert error_of(found.gradients, exact.gradients) <= 1.2 * error_of(own.gradients, exact.gradients) + eps / 4
    for name, gradient in exact.gradients.items():  # those that cancel (Qwen3-Next's dt_bias) by more than rounding
        ours, theirs = (error_of({name: t.gradients[name]}, {name: gradient}) for t in (found, own))
        assert ours <= 2 * theirs + (32 if dtype is torch.float32 else 1) * eps, name


def _assert_trains_as(found: list[Trained], own: list[Trained], one: Trained) -> None:
    """In float32: the curve and gradients of the model whose norms are its own, there and in one process."""
    for each, other in zip(found, own, strict=True):
        assert all(gap <= 4 * ULP * loss for gap, loss in zip(_apart(each, other), other.losses, strict=True))
        assert all(gap <= 8 * ULP * loss for gap, loss in zip(_apart(each, one), one.losses, strict=True))
        assert each.gradients.keys() == one.gradients.keys()
        for name, gradient in one.gradients.items():
            assert error_of({name: each.gradients[name]}, {name: gradient}) <= 128 * ULP, name
    assert all(each.losses == found[0].losses for each in found)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_data_and_context_parallel_training_equals_one_process(pool4, family: Family) -> None:
    """FSDP2 over dp 2 × cp 2; over dp 4 where a recurrence runs along the sequence."""
    one = train(model_of(family), steps=6)
    own, found = (
        pool4.run(train_data_and_context_parallel, family, torch.float32, converts, 6) for converts in (False, True)
    )
    assert all(torch.equal(mine.logits, theirs.logits) for mine, theirs in zip(found, own, strict=True))
    _assert_trains_as(found, own, one)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 cannot put together what packed experts are sharded into"
)
@pytest.mark.parametrize("family", SHARED, ids=str)
def test_tensor_parallel_training_equals_one_process(pool2, tmp_path, family: Family) -> None:
    """Transformers' own plan over tp 2; what its norms of queries and keys are wrapped in has our styles."""
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="this Transformers has another")
    model = model_of(family)
    model.save_pretrained(tmp_path)
    one = train(model, steps=6)
    own, found = (
        pool2.run(train_tensor_parallel, family, torch.float32, converts, 6, str(tmp_path))
        for converts in (False, True)
    )
    _assert_trains_as(found, own, one)
