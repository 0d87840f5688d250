"""The module of the norm behind an addition, and its plan in words."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import meshnorm
from meshnorm import module
from meshnorm.errors import DTypeError, OptionError, PlacementError, UnreachableLayoutError
from meshnorm.planning import Collective, plan

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


def test_every_argument_reaches_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(module, "add_rms_norm", lambda *args, **options: seen.update(options, args=args))
    options = {"offset": 1.0, "casting_mode": "gemma", "weight_grad": "reduced", "output_placements": (S0,)}
    norm = meshnorm.AddRMSNorm((2, 4), 1e-5, **options)
    x, residual = torch.ones(3, 2, 4), torch.ones(3, 2, 4)
    norm(x, residual)
    assert seen.pop("args") == (x, residual, norm.weight, 1e-5)
    assert seen == options | {"normalized_shape": (2, 4)}
    known = set(inspect.signature(meshnorm.add_rms_norm).parameters) - {"x", "residual", "weight", "eps"}
    assert set(seen) == known


def test_it_is_an_rmsnorm_and_loads_what_one_saved() -> None:
    saved = torch.nn.RMSNorm(8)
    torch.nn.init.normal_(saved.weight)
    norm = meshnorm.AddRMSNorm(8, eps=1e-6)
    norm.load_state_dict(saved.state_dict())
    assert isinstance(norm, torch.nn.RMSNorm) and torch.equal(norm.weight, saved.weight)
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    y, residual_out = norm(x, residual)
    expected = meshnorm.add_rms_norm(x, residual, saved.weight, 1e-6)
    assert torch.equal(y, expected[0]) and torch.equal(residual_out, expected[1])
    (y.sum() + residual_out.sum()).backward()
    assert norm.weight.grad is not None


def test_without_affine_there_is_no_weight() -> None:
    norm = meshnorm.AddRMSNorm(8, elementwise_affine=False)
    assert norm.weight is None and norm(torch.randn(3, 8), torch.randn(3, 8))[0].shape == (3, 8)


# --- the plan ---

MESH, SHAPE = {"cp": 2, "tp": 4}, (4, 64, 32)


def test_a_partial_x_is_reduce_scattered_onto_the_residual() -> None:
    found = plan(SHAPE, [S1, P], MESH, residual=[S1, S1], residual_dtype=torch.float32)
    assert (found.x, found.residual, found.y, found.dx) == ((S1, P), (S1, S1), (S1, S1), (S1, S1))
    assert found.forward == (Collective("reduce_scatter", "tp", 4 * 32 * 32 * 2),)
    assert found.backward == ()
    assert (found.rows, found.columns) == (4 * 8, 32)


def test_a_partial_x_is_all_reduced_beside_a_replicated_residual() -> None:
    found = plan(SHAPE, [S1, P], MESH, residual=[S1, R])
    assert found.y == (S1, R) and found.forward == (Collective("all_reduce", "tp", 4 * 32 * 32 * 2),)
    asked = plan(SHAPE, [S1, P], MESH, residual=[S1, R], output_placements=[S1, S1])
    assert asked.y == (S1, S1) and [c.kind for c in asked.forward] == ["reduce_scatter"]


def test_a_partial_residual_is_counted_in_its_own_dtype() -> None:
    found = plan(SHAPE, [S1, S1], MESH, residual=[S1, P], residual_dtype=torch.float32)
    assert found.forward == (Collective("reduce_scatter", "tp", 4 * 32 * 32 * 4),)


def test_hidden_sharded_it_exchanges_one_float32_a_row_each_way() -> None:
    found = plan(SHAPE, [S1, S2], MESH, residual=[S1, S2], dtype=torch.bfloat16)
    exchange = (Collective("all_reduce", "tp", 4 * 32 * 4),)
    assert (found.forward, found.backward) == (exchange, exchange)


def test_a_gradient_of_residual_out_in_another_placement_is_counted() -> None:
    found = plan(SHAPE, [S1, R], MESH, residual=[S1, R], d_residual_out_placements=[S1, P])
    assert found.backward == (Collective("all_reduce", "tp", 4 * 32 * 32 * 2),)


def test_words() -> None:
    text = str(plan(SHAPE, [S1, P], MESH, residual=[S1, S1]))
    assert "RMSNorm of bfloat16[4, 64, 32] + residual on mesh cp=2, tp=4" in text
    assert "residual  (S(1), S(1))" in text and "reduce_scatter over tp" in text


REFUSED = {
    "rows_of_another_dim": (
        [S0, R],
        [S1, R],
        {},
        ["residual is S(1)", "'cp'", "x is S(0)", "gathered", "redistribute"],
    ),
    "replicated_x": ([R, R], [S1, R], {}, ["residual is S(1)", "'cp'", "redistribute x to residual's placements"]),
    "hidden_beside_rows": ([S1, S2], [S1, S1], {}, ["'tp'", "x is S(2)", "gathered"]),
    "a_partial_x_whose_residual_is_cut_in_another_order": ([P, S1], [S1, S1], {}, ["'cp'", "'tp'", "mesh order"]),
    "a_sharded_residual_asked_to_be_replicated": (
        [S1, P],
        [S1, S1],
        {"output_placements": [S1, R]},
        ["residual is S(1)", "'tp'", "gathered"],
    ),
    "rows_asked_to_move": (
        [S1, R],
        [S1, R],
        {"output_placements": [S0, R]},
        ["output_placements asks for S(0)", "'cp'"],
    ),
    "hidden_asked_to_be_gathered": (
        [S1, S2],
        [S1, S2],
        {"output_placements": [S1, R]},
        ["output_placements asks for R", "'tp'", "redistribute y"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_to_be_gathered_is_refused_with_words(name: str) -> None:
    x, residual, options, words = REFUSED[name]
    with pytest.raises(UnreachableLayoutError) as raised:
        plan(SHAPE, x, MESH, residual=residual, **options)
    assert not [word for word in words if word not in str(raised.value)], str(raised.value)


def test_a_plan_of_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(OptionError, match="gathers nothing"):
        plan(SHAPE, [S1, S2], MESH, residual=[S1, S2], hidden="gather")
    with pytest.raises(DTypeError, match="residual_dtype is"):
        plan(SHAPE, [S1, R], MESH, residual=[S1, R], residual_dtype=torch.float64)
    with pytest.raises(PlacementError, match="residual has 1 placements"):
        plan(SHAPE, [S1, R], MESH, residual=[S1])
    with pytest.raises(PlacementError, match="residual is a plain tensor"):
        plan(SHAPE, [S1, R], MESH, residual=torch.ones(3))
