"""The module of the gated norm, and its plan in words."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import meshnorm
from meshnorm import module_gated
from meshnorm.errors import DTypeError, GroupSizeError, OptionError, PlacementError, UnreachableLayoutError
from meshnorm.planning import Collective, plan

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


def test_every_argument_reaches_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(module_gated, "gated_rms_norm", lambda *args, **options: seen.update(options, args=args))
    options = {
        **{"norm_before_gate": False, "activation": "sigmoid", "group_size": 4, "offset": 1.0},
        **{"casting_mode": "gemma", "weight_grad": "reduced", "output_placements": (S0,)},
    }
    norm = meshnorm.GatedRMSNorm((2, 4), 1e-5, **options)
    x, gate = torch.ones(3, 2, 4), torch.ones(3, 2, 4)
    norm(x, gate)
    assert seen.pop("args") == (x, gate, norm.weight, 1e-5)
    assert seen == options | {"normalized_shape": (2, 4)}
    known = set(inspect.signature(meshnorm.gated_rms_norm).parameters) - {"x", "gate", "weight", "eps"}
    assert set(seen) == known


def test_its_state_dict_is_the_weight() -> None:
    norm = meshnorm.GatedRMSNorm(8)
    saved = {"weight": torch.randn(8)}
    norm.load_state_dict(saved)
    assert list(norm.state_dict()) == ["weight"] and torch.equal(norm.weight, saved["weight"])
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        x, gate = torch.randn(3, 8), torch.randn(3, 8)
        assert torch.equal(other(x, gate), norm(x, gate))


def test_the_weight_starts_at_a_scale_of_1_also_from_meta() -> None:
    norm = meshnorm.GatedRMSNorm((2, 8), offset=1.0, device="meta", dtype=torch.bfloat16)
    assert norm.weight.is_meta and norm.weight.shape == (2, 8) and norm.weight.dtype == torch.bfloat16
    norm.to_empty(device="cpu").reset_parameters()
    assert torch.equal(norm.weight, torch.zeros_like(norm.weight))
    assert torch.equal(meshnorm.GatedRMSNorm(8).weight, torch.ones(8))
    assert meshnorm.GatedRMSNorm(8, elementwise_affine=False).weight is None


def test_without_a_gate_it_is_the_norm_in_groups() -> None:
    x, norm = torch.randn(3, 8), meshnorm.GatedRMSNorm(8, group_size=4)
    expected = meshnorm.rms_norm(x.view(3, 2, 4)).view(3, 8)
    torch.testing.assert_close(norm(x), expected)


def test_fx_traces_it_as_one_call() -> None:
    norm = meshnorm.GatedRMSNorm(8)
    traced = torch.fx.symbolic_trace(norm)
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    assert torch.equal(traced(x, gate), norm(x, gate))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [meshnorm.gated_rms_norm]


def test_its_words_say_what_it_computes() -> None:
    text = repr(meshnorm.GatedRMSNorm(8, 1e-5, norm_before_gate=False, group_size=4, offset=1.0))
    assert text == (
        "GatedRMSNorm((8,), eps=1e-05, norm_before_gate=False, activation='silu', group_size=4, offset=1.0, "
        "casting_mode='llama')"
    )


# --- the plan ---

MESH, SHAPE = {"cp": 2, "tp": 4}, (4, 64, 32)


def test_whole_groups_exchange_nothing() -> None:
    found = plan(SHAPE, [S1, S2], MESH, gate=[S1, S2], group_size=8)
    assert found.forward == found.backward == ()
    assert (found.gate, found.group_size, found.y, found.dx) == ((S1, S2), 8, (S1, S2), (S1, S2))
    assert (found.rows, found.columns) == (4 * 32, 8)


def test_groups_on_several_ranks_exchange_one_float32_a_row_and_group() -> None:
    for size in (16, 32):
        exchange = (Collective("all_reduce", "tp", 4 * 32 * (32 // size) * 4),)
        found = plan(SHAPE, [S1, S2], MESH, gate=[S1, S2], group_size=size)
        assert (found.forward, found.backward) == (exchange, exchange)
    assert plan(SHAPE, [S1, S2], MESH, gate=[S1, S2]).forward == exchange  # one group by default


def test_a_partial_gate_is_reduced_onto_x_and_counted_in_its_own_dtype() -> None:
    found = plan(SHAPE, [S1, S1], MESH, gate=[S1, P], gate_dtype=torch.float32)
    assert found.forward == (Collective("reduce_scatter", "tp", 4 * 32 * 32 * 4),)
    assert plan(SHAPE, [S1, S2], MESH, gate=[R, R], group_size=8).forward == ()  # cut locally


def test_the_norm_in_groups_has_a_plan_without_a_gate() -> None:
    found = plan(SHAPE, [S1, S2], MESH, group_size=8)
    assert found.gate is None and found.forward == () and "in groups of 8" in str(found)


def test_words() -> None:
    text = str(plan(SHAPE, [S1, P], MESH, gate=[S1, S1], group_size=8))
    assert "RMSNorm of bfloat16[4, 64, 32] beside a gate, in groups of 8, on mesh cp=2, tp=4" in text
    assert "gate      (S(1), S(1))" in text and "reduce_scatter over tp" in text


def test_what_would_have_to_be_gathered_is_refused_with_words() -> None:
    for x, gate, words in (
        ([S0, R], [S1, R], ["gate is S(1)", "'cp'", "x is S(0)", "gathered", "redistribute"]),
        ([R, R], [S1, R], ["gate is S(1)", "'cp'", "redistribute x to gate's placements"]),
    ):
        with pytest.raises(UnreachableLayoutError) as raised:
            plan(SHAPE, x, MESH, gate=gate)
        assert not [word for word in words if word not in str(raised.value)], str(raised.value)


def test_a_plan_of_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(OptionError, match="gathers nothing"):
        plan(SHAPE, [S1, S2], MESH, gate=[S1, S2], hidden="gather")
    with pytest.raises(DTypeError, match="gate_dtype is"):
        plan(SHAPE, [S1, R], MESH, gate=[S1, R], gate_dtype=torch.float64)
    with pytest.raises(PlacementError, match="gate has 1 placements"):
        plan(SHAPE, [S1, R], MESH, gate=[S1])
    with pytest.raises(PlacementError, match="gate is a plain tensor"):
        plan(SHAPE, [S1, R], MESH, gate=torch.ones(3))
    with pytest.raises(GroupSizeError, match="group_size is 5"):
        plan(SHAPE, [S1, R], MESH, gate=[S1, R], group_size=5)
    with pytest.raises(OptionError, match="both given"):
        plan(SHAPE, [S1, R], MESH, gate=[S1, R], residual=[S1, R])
