"""The module of the norms of q and k, the plan in words, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import meshnorm
from meshnorm import errors, module_qk, qk_rms_norm
from meshnorm.cli import main
from meshnorm.planning import Collective, plan

R, P, S1, S2 = Replicate(), Partial(), Shard(1), Shard(2)


def test_every_argument_reaches_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(module_qk, "qk_rms_norm", lambda *args, **options: seen.update(options, args=args))
    options: dict[str, Any] = {
        **{"offset": 1.0, "casting_mode": "gemma", "weight_grad": "reduced"},
        **{"q_output_placements": (S1,), "k_output_placements": (R,)},
    }
    norm = meshnorm.QKRMSNorm((4, 8), 8, 1e-5, **options)
    q, k = torch.ones(3, 4, 8), torch.ones(3, 8)
    norm(q, k)
    assert seen.pop("args") == (q, k, norm.q_norm.weight, norm.k_norm.weight, 1e-5)
    assert seen == options | {"q_normalized_shape": (4, 8), "k_normalized_shape": (8,)}
    known = set(inspect.signature(qk_rms_norm).parameters) - {"q", "k", "q_weight", "k_weight", "eps"}
    assert set(seen) == known


def test_its_parameters_have_the_families_names() -> None:
    norm = meshnorm.QKRMSNorm(16, 8)
    saved = {"q_norm.weight": torch.randn(16), "k_norm.weight": torch.randn(8)}
    norm.load_state_dict(saved)
    assert list(norm.state_dict()) == list(saved)
    q, k = torch.randn(3, 16), torch.randn(3, 8)
    expected = qk_rms_norm(q, k, *saved.values())
    for other in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), torch.fx.symbolic_trace(norm)):
        assert all(torch.equal(a, b) for a, b in zip(other(q, k), expected, strict=True))


def test_the_weights_start_at_a_scale_of_1_also_from_meta() -> None:
    norm = meshnorm.QKRMSNorm(8, offset=1.0, device="meta", dtype=torch.bfloat16)
    assert all(w.is_meta and w.shape == (8,) and w.dtype == torch.bfloat16 for w in norm.parameters())
    norm.to_empty(device="cpu").reset_parameters()
    assert all(not w.any() for w in norm.parameters())


def test_without_weights_the_sizes_are_what_is_normalized() -> None:
    norm = meshnorm.QKRMSNorm((2, 8), 8, elementwise_affine=False)
    q, k = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    found = norm(q, k)
    assert not list(norm.parameters())
    assert torch.equal(found[0], meshnorm.rms_norm(q, normalized_shape=(2, 8)))
    assert torch.equal(found[1], meshnorm.rms_norm(k))


# --- the plan ---

MESH = {"cp": 2, "tp": 4}


def test_the_plan_states_both_and_what_they_exchange_together() -> None:
    found = plan((4, 64, 32), [S1, S2], MESH, k=[S1, S2], k_shape=(4, 64, 8))
    exchange = (Collective("all_reduce", "tp", (128 + 128) * 4),)
    assert found.forward == found.backward == exchange
    assert found.k is not None and (found.k.columns, found.k.y, found.k.dw) == (2, (S1, S2), (P, Shard(0)))
    text = str(found)
    assert "q bfloat16[4, 64, 32] and k bfloat16[4, 64, 8] on mesh cp=2, tp=4" in text
    assert "k         (S(1), S(2)), a rank normalizes 128 rows of 2" in text and "all_reduce over tp of 1.0 KiB" in text
    frozen = plan((4, 64, 32), [S1, S2], MESH, k=[S1, S2], k_shape=(4, 64, 8), k_requires_grad=False)
    assert frozen.backward == (Collective("all_reduce", "tp", 128 * 4),)


def test_the_command_line_states_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mesh", "kv=4,rep=2", "--shape", "4,8192,6144", "--x", "S(2),S(2)"]
    assert main(["plan", *arguments, "--k", "S(2),R", "--k-shape", "4,8192,1024", "--k-weight", "none"]) == 0
    said = capsys.readouterr().out
    assert "forward   all_reduce over kv_rep of 256.0 KiB" in said and "dW of k   none" in said


def test_a_plan_of_what_cannot_be_called_is_refused() -> None:
    for error, words, options in (
        (errors.OptionError, "gathers nothing", {"k": [S1, S2], "k_shape": (4, 64, 8), "hidden": "gather"}),
        (errors.OptionError, "no norm has both", {"k": [S1, S2], "k_shape": (4, 64, 8), "gate": [S1, S2]}),
        (errors.PlacementError, "give k_shape", {"k": [S1, S2]}),
        (errors.PlacementError, "k is a plain tensor", {"k": torch.ones(3)}),
        (errors.PlacementError, "k has 1 placements", {"k": [S1], "k_shape": (4, 64, 8)}),
        (
            errors.UnreachableLayoutError,
            "k_output_placements asks for",
            {
                **{"k": [S1, S2], "k_shape": (4, 64, 8), "k_output_placements": [S1, R]},
            },
        ),
    ):
        with pytest.raises(error, match=words):
            plan((4, 64, 32), [S1, S2], MESH, **options)


# --- what is refused ---

X, W = torch.ones(3, 8), torch.ones(8)
REFUSED: dict[str, tuple[type[Exception], tuple, dict[str, Any], list[str]]] = {
    "no_tensor": (errors.DTypeError, (X, [1.0]), {}, ["k is a list", "tensor"]),
    "no_weight_tensor": (errors.DTypeError, (X, X, W, 1.0), {}, ["k_weight is a float"]),
    "integers": (errors.DTypeError, (X, X.int()), {}, ["k has dtype torch.int32", "cast"]),
    "two_dtypes": (errors.DTypeError, (X, X.double()), {}, ["k has dtype torch.float64 but q has", "cast"]),
    "two_devices": (errors.DeviceError, (X, X.to("meta")), {}, ["k is on meta but q is on cpu", "move"]),
    "weight_elsewhere": (errors.DeviceError, (X, X, W.to("meta")), {}, ["q_weight is on meta but q is on cpu"]),
    "sparse": (errors.TensorLayoutError, (X, X.to_sparse()), {}, ["k is torch.sparse", "densify"]),
    "weight_shape": (
        errors.WeightShapeError,
        (X, X, None, W[:7]),
        {},
        ["k_weight has shape (7,)", "k, of shape"],
    ),
    "normalized_shape": (errors.NormalizedShapeError, (X, X), {"q_normalized_shape": 4}, ["q has shape (3, 8)"]),
    "eps": (errors.EpsError, (X, X, W, W, -1.0), {}, ["eps is -1.0"]),
    "mode": (errors.CastingModeError, (X, X), {"casting_mode": "half"}, ["'half'", "llama"]),
    "placements": (errors.OptionError, (X, X), {"k_output_placements": (R,)}, ["k_output_placements is for a DTensor"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_argument_and_the_way_out(name: str) -> None:
    error, arguments, options, words = REFUSED[name]
    with pytest.raises(error) as raised:
        qk_rms_norm(*arguments, **options)
    assert not [word for word in words if word not in str(raised.value)], str(raised.value)
