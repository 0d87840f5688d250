"""What is refused: by which class, in which words, and on ranks by all of them alike, so that they can go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import meshnorm
from meshnorm import GatedRMSNorm, add_rms_norm, errors, gated_rms_norm, rms_norm
from meshnorm.checking.case import mesh_for
from meshnorm.checking.ranks import RankPool
from meshnorm.errors import (
    CastingModeError,
    DeviceError,
    DoubleBackwardError,
    DTypeError,
    EpsError,
    GateShapeError,
    GroupSizeError,
    MeshMismatchError,
    MeshnormError,
    MixedTensorError,
    NormalizedShapeError,
    OffsetError,
    OptionError,
    PlacementError,
    ResidualShapeError,
    TensorLayoutError,
    TransformError,
    UnreachableLayoutError,
    WeightShapeError,
)
from meshnorm.formula import reference_forward

BUILTINS = {
    DTypeError: TypeError,
    TensorLayoutError: TypeError,
    DeviceError: ValueError,
    NormalizedShapeError: ValueError,
    WeightShapeError: ValueError,
    ResidualShapeError: ValueError,
    GateShapeError: ValueError,
    GroupSizeError: ValueError,
    EpsError: ValueError,
    OffsetError: ValueError,
    CastingModeError: ValueError,
    OptionError: ValueError,
    MixedTensorError: TypeError,
    MeshMismatchError: ValueError,
    PlacementError: ValueError,
    UnreachableLayoutError: ValueError,
    DoubleBackwardError: NotImplementedError,
    TransformError: NotImplementedError,
}


def test_every_class_derives_from_ours_and_from_the_builtin_one_would_expect() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, MeshnormError)} - {
        MeshnormError
    }
    assert classes == set(BUILTINS)
    for kind, builtin in BUILTINS.items():
        assert issubclass(kind, builtin)


def test_every_class_is_raised_by_a_test_below() -> None:
    raised = {kind for kind, *_ in [*PLAIN.values(), *ON_RANKS.values()]}
    assert raised == set(BUILTINS)


# --- plain tensors ---


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(3, 4, 8).to(dtype)


def _double_backward() -> None:
    x = torch.randn(3, 8).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    dx.sum().backward()


W = torch.ones(8)
# name -> (class, call, words: the argument, and the way out)
PLAIN: dict[str, tuple[type[MeshnormError], Callable[[], Any], list[str]]] = {
    "weight_too_short": (WeightShapeError, lambda: rms_norm(_x(), torch.ones(7)), ["weight", "(7,)", "(3, 4, 8)"]),
    "weight_of_more_dims_than_x": (WeightShapeError, lambda: rms_norm(W, torch.ones(2, 8)), ["weight", "(2, 8)"]),
    "weight_against_normalized_shape": (
        WeightShapeError,
        lambda: rms_norm(_x(), W, normalized_shape=(4, 8)),
        ["weight", "(8,)", "normalized_shape", "(4, 8)", "equal"],
    ),
    "weight_that_would_broadcast": (WeightShapeError, lambda: rms_norm(_x(), torch.ones(1)), ["weight", "(1,)"]),
    "weight_without_dims": (NormalizedShapeError, lambda: rms_norm(_x(), torch.tensor(1.0)), ["no dim", "weight"]),
    "x_without_dims": (NormalizedShapeError, lambda: rms_norm(torch.tensor(1.0)), ["no dim", "x"]),
    "no_normalized_dims": (NormalizedShapeError, lambda: rms_norm(_x(), normalized_shape=()), ["no dim"]),
    "normalized_dims_that_differ": (
        NormalizedShapeError,
        lambda: rms_norm(_x(), normalized_shape=(3, 8)),
        ["normalized_shape", "(3, 8)", "(3, 4, 8)"],
    ),
    "normalized_dims_in_front": (
        NormalizedShapeError,
        lambda: rms_norm(_x(), normalized_shape=(3, 4)),
        ["normalized_shape", "last dims"],
    ),
    "more_normalized_dims_than_dims": (
        NormalizedShapeError,
        lambda: rms_norm(_x(), normalized_shape=(1, 3, 4, 8)),
        ["normalized_shape", "(1, 3, 4, 8)"],
    ),
    "negative_normalized_dim": (NormalizedShapeError, lambda: rms_norm(_x(), normalized_shape=-1), ["(-1,)"]),
    "empty_normalized_dim": (NormalizedShapeError, lambda: rms_norm(torch.ones(3, 0)), ["(0,)", "size 0"]),
    "empty_normalized_dim_and_weight": (
        NormalizedShapeError,
        lambda: rms_norm(torch.ones(3, 0, 2), torch.ones(0, 2)),
        ["(0, 2)", "size 0"],
    ),
    "empty_normalized_dim_and_no_rows": (NormalizedShapeError, lambda: rms_norm(torch.ones(0, 0)), ["size 0"]),
    "integer_x": (DTypeError, lambda: rms_norm(_x(torch.int64)), ["x has dtype torch.int64", "bfloat16", "cast"]),
    "boolean_x": (DTypeError, lambda: rms_norm(_x(torch.bool)), ["x has dtype torch.bool", "cast"]),
    "complex_x": (DTypeError, lambda: rms_norm(_x(torch.complex64)), ["x has dtype torch.complex64", "cast"]),
    "string_eps": (EpsError, lambda: rms_norm(_x(), eps="1e-5"), ["eps is 1e-5", "finite number"]),
    "vector_eps": (EpsError, lambda: rms_norm(_x(), eps=torch.ones(2)), ["eps is", "finite number"]),
    "no_offset": (OffsetError, lambda: rms_norm(_x(), offset=None), ["offset is None", "finite number"]),
    "fractional_shape": (NormalizedShapeError, lambda: rms_norm(_x(), normalized_shape=8.0), ["8.0", "int"]),
    "list_x": (DTypeError, lambda: rms_norm([1.0]), ["x is a list", "tensor"]),
    "no_x": (DTypeError, lambda: rms_norm(None), ["x is a NoneType", "tensor"]),
    "list_weight": (DTypeError, lambda: rms_norm(_x(), [1.0]), ["weight is a list", "tensor"]),
    "sparse_weight": (TensorLayoutError, lambda: rms_norm(_x(), W.to_sparse()), ["weight is torch.sparse", "densify"]),
    "sparse_x": (TensorLayoutError, lambda: rms_norm(_x().to_sparse()), ["x is torch.sparse_coo", "densify"]),
    "float8_x": (DTypeError, lambda: rms_norm(_x(torch.float8_e4m3fn)), ["x has dtype torch.float8", "cast"]),
    "integer_weight": (DTypeError, lambda: rms_norm(_x(), W.int()), ["weight has dtype torch.int32", "cast"]),
    "weight_elsewhere": (
        DeviceError,
        lambda: rms_norm(_x(), W.to("meta")),
        ["weight is on meta", "x is on cpu", "move"],
    ),
    "x_elsewhere": (DeviceError, lambda: rms_norm(_x().to("meta"), W), ["weight is on cpu", "x is on meta", "move"]),
    "negative_eps": (EpsError, lambda: rms_norm(_x(), W, -1e-6), ["eps is -1e-06", "0 or more"]),
    "nan_eps": (EpsError, lambda: rms_norm(_x(), W, math.nan), ["eps is nan", "finite"]),
    "infinite_eps": (EpsError, lambda: rms_norm(_x(), W, math.inf), ["eps is inf", "finite"]),
    "nan_offset": (OffsetError, lambda: rms_norm(_x(), W, offset=math.nan), ["offset is nan", "finite"]),
    "infinite_offset": (OffsetError, lambda: rms_norm(_x(), W, offset=-math.inf), ["offset is -inf", "finite"]),
    "casting_mode": (
        CastingModeError,
        lambda: rms_norm(_x(), W, casting_mode="Gemma"),
        ["casting_mode is 'Gemma'", "'llama'", "'gemma'", "'none'"],
    ),
    "casting_mode_none": (
        CastingModeError,
        lambda: rms_norm(_x(), W, casting_mode=None),  # type: ignore[arg-type]
        ["casting_mode is None", "'none'"],
    ),
    "hidden": (OptionError, lambda: rms_norm(_x(), W, hidden="all"), ["hidden is 'all'", '"stats"', '"gather"']),
    "weight_grad": (
        OptionError,
        lambda: rms_norm(_x(), W, weight_grad="sum"),
        ["weight_grad is 'sum'", '"auto"', '"deferred"', '"reduced"'],
    ),
    "output_placements_of_a_plain_x": (
        OptionError,
        lambda: rms_norm(_x(), W, output_placements=(Replicate(),)),
        ["output_placements", "plain tensor", "leave it out"],
    ),
    "residual_that_would_broadcast": (
        ResidualShapeError,
        lambda: add_rms_norm(_x(), torch.ones(8), W),
        ["residual has shape (8,)", "(3, 4, 8)", "expand()"],
    ),
    "residual_beside_an_x_that_would_broadcast": (
        ResidualShapeError,
        lambda: add_rms_norm(torch.ones(8), _x(), W),
        ["residual has shape (3, 4, 8)", "(8,)"],
    ),
    "list_residual": (DTypeError, lambda: add_rms_norm(_x(), [1.0], W), ["residual is a list", "tensor"]),
    "no_residual": (DTypeError, lambda: add_rms_norm(_x(), None), ["residual is a NoneType", "tensor"]),
    "integer_residual": (DTypeError, lambda: add_rms_norm(_x(), _x(torch.int32)), ["residual has dtype", "cast"]),
    "float64_residual": (
        DTypeError,
        lambda: add_rms_norm(_x(), _x(torch.float64)),
        ["residual has dtype torch.float64", "x torch.float32", "cast"],
    ),
    "float64_x_beside_a_residual": (
        DTypeError,
        lambda: add_rms_norm(_x(torch.float64), _x()),
        ["residual has dtype torch.float32", "x torch.float64", "cast"],
    ),
    "sparse_residual": (TensorLayoutError, lambda: add_rms_norm(_x(), _x().to_sparse()), ["residual is", "densify"]),
    "residual_elsewhere": (
        DeviceError,
        lambda: add_rms_norm(_x(), _x().to("meta")),
        ["residual is on meta", "x is on cpu", "move"],
    ),
    "output_placements_of_a_plain_x_and_residual": (
        OptionError,
        lambda: add_rms_norm(_x(), _x(), W, output_placements=(Replicate(),)),
        ["output_placements", "plain tensor", "leave it out"],
    ),
    "eps_behind_an_addition": (EpsError, lambda: add_rms_norm(_x(), _x(), W, -1.0), ["eps is -1.0", "0 or more"]),
    "weight_behind_an_addition": (WeightShapeError, lambda: add_rms_norm(_x(), _x(), torch.ones(7)), ["weight has"]),
    "gate_that_would_broadcast": (
        GateShapeError,
        lambda: gated_rms_norm(_x(), torch.ones(8), W),
        ["gate has shape (8,)", "(3, 4, 8)", "expand()"],
    ),
    "list_gate": (DTypeError, lambda: gated_rms_norm(_x(), [1.0], W), ["gate is a list", "tensor"]),
    "integer_gate": (DTypeError, lambda: gated_rms_norm(_x(), _x(torch.int32)), ["gate has dtype", "cast"]),
    "float64_gate": (
        DTypeError,
        lambda: gated_rms_norm(_x(), _x(torch.float64)),
        ["gate has dtype torch.float64", "x torch.float32", "cast"],
    ),
    "sparse_gate": (TensorLayoutError, lambda: gated_rms_norm(_x(), _x().to_sparse()), ["gate is", "densify"]),
    "gate_elsewhere": (
        DeviceError,
        lambda: gated_rms_norm(_x(), _x().to("meta")),
        ["gate is on meta", "x is on cpu", "move"],
    ),
    "activation": (
        OptionError,
        lambda: gated_rms_norm(_x(), _x(), activation="relu"),
        ["activation is 'relu'", '"silu"', '"sigmoid"'],
    ),
    "norm_before_gate": (
        OptionError,
        lambda: gated_rms_norm(_x(), _x(), norm_before_gate=None),
        ["norm_before_gate is None", "True or False"],
    ),
    "group_that_does_not_divide": (
        GroupSizeError,
        lambda: gated_rms_norm(_x(), _x(), W, group_size=3),
        ["group_size is 3", "8 numbers", "divisor of 8"],
    ),
    "group_of_nothing": (
        GroupSizeError,
        lambda: gated_rms_norm(_x(), _x(), group_size=0),
        ["group_size is 0", "1 or more", "None"],
    ),
    "group_of_half": (GroupSizeError, lambda: gated_rms_norm(_x(), _x(), group_size=0.5), ["group_size is 0.5"]),
    "group_of_a_module": (GroupSizeError, lambda: GatedRMSNorm(8, group_size=3), ["group_size is 3", "8"]),
    "activation_of_a_module": (OptionError, lambda: GatedRMSNorm(8, activation="tanh"), ["activation is 'tanh'"]),
    "eps_beside_a_gate": (EpsError, lambda: gated_rms_norm(_x(), _x(), W, -1.0), ["eps is -1.0", "0 or more"]),
    "output_placements_of_a_plain_x_and_gate": (
        OptionError,
        lambda: gated_rms_norm(_x(), _x(), W, output_placements=(Replicate(),)),
        ["output_placements", "plain tensor", "leave it out"],
    ),
    "double_backward": (
        DoubleBackwardError,
        _double_backward,
        ["not supported", "create_graph=False", "reference_forward"],
    ),
    "a_module_over_other_dims": (
        NormalizedShapeError,
        lambda: meshnorm.RMSNorm(8)(torch.ones(3, 7)),
        ["normalized_shape is (8,)", "(3, 7)"],
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_refused_with_words(name: str) -> None:
    kind, call, words = PLAIN[name]
    with pytest.raises(MeshnormError) as raised:
        call()
    _assert_told(raised.value, kind, words)
    with pytest.raises(BUILTINS[kind]):  # as one would catch it who does not know ours
        call()


def _assert_told(error: BaseException, kind: type, words: list[str]) -> None:
    assert type(error) is kind
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{error} does not say {missing}"


@pytest.mark.parametrize("value", [0.0, 1e-300, 10])
def test_an_eps_of_zero_or_more_is_taken(value: float) -> None:
    x = torch.randn(3, 8)
    assert torch.equal(rms_norm(x, W, value), rms_norm(x, W, float(value)))
    assert rms_norm(x, W, value).isfinite().all()


# --- ranks ---


S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()


def _dtensor(mesh: DeviceMesh, placements: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> DTensor:
    """The same random tensor on every rank, cut without communication."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    if any(p.is_partial() for p in placements):
        return DTensor.from_local(whole, mesh, placements, run_check=False)
    return torch.distributed.tensor.distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _replicated(mesh: DeviceMesh, *shape: int) -> DTensor:
    return _dtensor(mesh, (R,) * mesh.ndim, shape)


def _refused(
    *placements: Any,
    weight: Any = _replicated,
    shape: tuple[int, ...] = (4, 6, 8),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Callable[[DeviceMesh], None]:
    """A call on the mesh dp=2, tp=2, with a weight that is made there."""

    def call(mesh: DeviceMesh) -> None:
        made = weight(mesh, *shape[-1:]) if callable(weight) else weight
        rms_norm(_dtensor(mesh, placements, shape, dtype), made, **options)

    return call


def _plain_x(mesh: DeviceMesh) -> None:
    rms_norm(torch.ones(4, 8), _replicated(mesh, 8))


def _plain_x_in_a_module(mesh: DeviceMesh) -> None:
    norm = meshnorm.RMSNorm(8)
    norm.weight = torch.nn.Parameter(_replicated(mesh, 8))
    norm(torch.ones(4, 8))


def _transformed(mesh: DeviceMesh) -> Any:
    x = _dtensor(mesh, (S0, S2), (4, 6, 8))
    return torch.func.grad(lambda weight: rms_norm(x, weight).sum())(_replicated(mesh, 8))


def _double_backward_of_a_dtensor(mesh: DeviceMesh) -> None:
    x = _dtensor(mesh, (S0, S2), (4, 6, 8)).requires_grad_()
    y = rms_norm(x, _replicated(mesh, 8))
    (dx,) = torch.autograd.grad(y, x, _dtensor(mesh, (S0, S2), (4, 6, 8)).requires_grad_(), create_graph=True)
    torch.autograd.grad(dx, x, _dtensor(mesh, (S0, S2), (4, 6, 8)))


def _double_backward_of_a_partial_x(mesh: DeviceMesh) -> None:
    # dY does not depend on x: only dX itself ties the penalty to x.
    x = _dtensor(mesh, (S0, P), (4, 6, 8)).requires_grad_()
    y = rms_norm(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (y.to_local().sum() + dx.to_local().square().sum()).backward()


def _names_differ(mesh: DeviceMesh, *shape: int) -> DTensor:
    return _replicated(mesh_for((("dp", 2), ("cp", 2))), *shape)


def _shapes_differ(mesh: DeviceMesh, *shape: int) -> DTensor:
    return _replicated(mesh_for((("all", 4),)), *shape)


def _one_dim_of_the_mesh(mesh: DeviceMesh, *shape: int) -> DTensor:
    return _replicated(mesh["tp"], *shape)


def _another_shard_order(mesh: DeviceMesh) -> None:
    """What torch 2.13 can describe, and makes in no public way: tp shards a dim before dp does."""
    x = _dtensor(mesh, (S0, S0), (8, 6, 8))
    spec = x._spec
    if not hasattr(spec, "shard_order"):
        raise PlacementError("x has no shard_order in this release; redistribute nothing")
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    rms_norm(x)  # the same call in the mesh's order is remembered
    rms_norm(x)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    other = DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta, shard_order=order)
    rms_norm(DTensor(x.to_local(), other, requires_grad=False))  # type: ignore[call-arg]


ON_RANKS: dict[str, tuple[type[MeshnormError], Callable[[DeviceMesh], None], list[str]]] = {
    "plain_x": (MixedTensorError, _plain_x, ["weight is a DTensor", "x is a plain", "from_local", "to_local()"]),
    "plain_x_in_a_module": (MixedTensorError, _plain_x_in_a_module, ["weight is a DTensor", "from_local"]),
    "mesh_of_other_names": (
        MeshMismatchError,
        _refused(S0, R, weight=_names_differ),
        ["weight is on", "x is on", "mesh"],
    ),
    "mesh_of_another_shape": (MeshMismatchError, _refused(S0, R, weight=_shapes_differ), ["weight is on", "x is"]),
    "mesh_of_fewer_dims": (
        MeshMismatchError,
        _refused(S0, R, weight=_one_dim_of_the_mesh),
        ["weight is on", "x is on"],
    ),
    "weight_of_the_local_shape": (
        WeightShapeError,
        _refused(S0, S2, weight=torch.ones(4)),
        ["weight has shape (4,)", "(4, 6, 8)"],
    ),
    "dtensor_weight_too_long": (
        WeightShapeError,
        _refused(S0, R, weight=lambda mesh, _: _replicated(mesh, 9)),
        ["weight has shape (9,)", "(4, 6, 8)"],
    ),
    "normalized_dims_that_differ": (
        NormalizedShapeError,
        _refused(S0, R, weight=None, normalized_shape=(4, 8)),
        ["normalized_shape is (4, 8)", "(4, 6, 8)"],
    ),
    "empty_normalized_dim": (NormalizedShapeError, _refused(S0, R, weight=None, shape=(4, 0)), ["(0,)", "size 0"]),
    "integer_x": (DTypeError, _refused(S0, S2, dtype=torch.int32), ["x has dtype torch.int32", "cast"]),
    "complex_x": (DTypeError, _refused(S0, S2, dtype=torch.complex64), ["x has dtype torch.complex64", "cast"]),
    "negative_eps": (EpsError, _refused(S0, S2, eps=-1.0), ["eps is -1.0", "0 or more"]),
    "nan_eps": (EpsError, _refused(S0, S2, eps=math.nan), ["eps is nan"]),
    "infinite_eps": (EpsError, _refused(S0, S2, eps=math.inf), ["eps is inf"]),
    "nan_offset": (OffsetError, _refused(S0, S2, offset=math.nan), ["offset is nan"]),
    "casting_mode": (CastingModeError, _refused(S0, S2, casting_mode="fp32"), ["casting_mode is 'fp32'", "'llama'"]),
    "hidden": (OptionError, _refused(S0, S2, hidden="local"), ["hidden is 'local'", '"gather"']),
    "weight_grad": (OptionError, _refused(S0, S2, weight_grad="none"), ["weight_grad is 'none'", '"reduced"']),
    "weight_elsewhere": (
        DeviceError,
        _refused(S0, S2, weight=torch.ones(8, device="meta")),
        ["weight is on meta", "move"],
    ),
    "another_shard_order": (PlacementError, _another_shard_order, ["x has", "shard_order", "redistribute"]),
    "outputs_that_hash_not": (
        PlacementError,
        _refused(S0, S2, output_placements=[[S0], 1]),
        ["output_placements is", "one for each mesh dim"],
    ),
    "output_of_another_length": (
        PlacementError,
        _refused(S0, S2, output_placements=(S0,)),
        ["output_placements has 1 placements", "dp=2, tp=2", "one placement for each mesh dim"],
    ),
    "output_dim_out_of_range": (
        PlacementError,
        _refused(S0, S2, output_placements=(Shard(5), S2)),
        ["output_placements has S", "'dp'", "3 dims"],
    ),
    "output_that_is_no_placement": (
        PlacementError,
        _refused(S0, S2, output_placements=("S(0)", S2)),
        ["output_placements has 'S(0)'", "'dp'", "no Placement"],
    ),
    "output_still_partial": (
        UnreachableLayoutError,
        _refused(S0, P, output_placements=(S0, P)),
        ["output_placements asks for P", "'tp'", "Replicate()", "Shard(d)"],
    ),
    "output_strided": (
        UnreachableLayoutError,
        _refused(P, R, output_placements=(_StridedShard(0, split_factor=2), R)),
        ["output_placements asks for", "'dp'", "Replicate()", "Shard(d)"],
    ),
    "output_cut_before_a_later_mesh_dim": (
        UnreachableLayoutError,
        _refused(P, S1, output_placements=(S1, S1)),
        ["output_placements asks for S", "'dp'", "'tp'", "mesh order", "redistribute x first"],
    ),
    "output_moves_a_shard": (
        UnreachableLayoutError,
        _refused(S0, S2, output_placements=(S1, S2)),
        ["output_placements asks for S", "'dp'", "redistribute y"],
    ),
    "output_gathers_rows": (
        UnreachableLayoutError,
        _refused(S0, S2, output_placements=(R, S2)),
        ["output_placements asks for R", "'dp'", "redistribute y"],
    ),
    "output_shards_what_is_whole": (
        UnreachableLayoutError,
        _refused(R, S2, output_placements=(S0, S2)),
        ["output_placements asks for S", "'dp'", "redistribute y"],
    ),
    "output_is_partial_where_x_is_whole": (
        UnreachableLayoutError,
        _refused(R, S2, output_placements=(P, S2)),
        ["output_placements asks for P", "'dp'", "redistribute y"],
    ),
    "output_gathers_hidden_in_stats": (
        UnreachableLayoutError,
        _refused(S0, S2, output_placements=(S0, R)),
        ["output_placements asks for R", "'tp'", 'hidden="gather"'],
    ),
    "output_keeps_hidden_in_gather": (
        UnreachableLayoutError,
        _refused(S0, S2, output_placements=(S0, S2), hidden="gather"),
        ["output_placements asks for S", "'tp'", 'hidden="gather" gives Replicate()'],
    ),
    "plain_residual": (
        MixedTensorError,
        lambda mesh: add_rms_norm(_dtensor(mesh, (S0, R), (4, 6, 8)), torch.ones(4, 6, 8)),  # type: ignore[arg-type]
        ["residual is a plain tensor", "from_local"],
    ),
    "plain_x_beside_a_residual": (
        MixedTensorError,
        lambda mesh: add_rms_norm(torch.ones(4, 6, 8), _dtensor(mesh, (S0, R), (4, 6, 8))),  # type: ignore[arg-type]
        ["residual is a DTensor", "from_local", "to_local()"],
    ),
    "residual_on_another_mesh": (
        MeshMismatchError,
        lambda mesh: add_rms_norm(_replicated(mesh, 4, 6, 8), _names_differ(mesh, 4, 6, 8)),  # type: ignore[arg-type]
        ["residual is on", "x is on"],
    ),
    "residual_that_would_have_to_be_gathered": (
        UnreachableLayoutError,
        lambda mesh: add_rms_norm(_dtensor(mesh, (S0, R), (4, 6, 8)), _dtensor(mesh, (S1, R), (4, 6, 8))),  # type: ignore[arg-type]
        ["residual is S", "'dp'", "gathered", "redistribute"],
    ),
    "plain_gate": (
        MixedTensorError,
        lambda mesh: gated_rms_norm(_dtensor(mesh, (S0, R), (4, 6, 8)), torch.ones(4, 6, 8)),
        ["gate is a plain tensor", "from_local"],
    ),
    "plain_x_beside_a_gate": (
        MixedTensorError,
        lambda mesh: gated_rms_norm(torch.ones(4, 6, 8), _dtensor(mesh, (S0, R), (4, 6, 8))),
        ["gate is a DTensor", "from_local", "to_local()"],
    ),
    "gate_on_another_mesh": (
        MeshMismatchError,
        lambda mesh: gated_rms_norm(_replicated(mesh, 4, 6, 8), _names_differ(mesh, 4, 6, 8)),
        ["gate is on", "x is on"],
    ),
    "gate_that_would_have_to_be_gathered": (
        UnreachableLayoutError,
        lambda mesh: gated_rms_norm(_dtensor(mesh, (S0, R), (4, 6, 8)), _dtensor(mesh, (S1, R), (4, 6, 8))),
        ["gate is S", "'dp'", "gathered", "redistribute"],
    ),
    "sharded_gate_of_a_replicated_x": (
        UnreachableLayoutError,
        lambda mesh: gated_rms_norm(_dtensor(mesh, (R, R), (4, 6, 8)), _dtensor(mesh, (S1, R), (4, 6, 8))),
        ["gate is S", "'dp'", "redistribute x to gate's placements"],
    ),
    "no_rows_on_some_ranks": (EpsError, _refused(S0, R, shape=(1, 8), eps=-1.0), ["eps is -1.0"]),
    "torch_func": (
        TransformError,
        _transformed,
        ["torch.func", "use torch.autograd"],
    ),
    "double_backward": (DoubleBackwardError, _double_backward_of_a_dtensor, ["create_graph=False"]),
    "double_backward_of_a_partial_x": (
        DoubleBackwardError,
        _double_backward_of_a_partial_x,
        ["create_graph=False", "reference_forward"],
    ),
}


def _refusal_and_a_good_call(name: str) -> tuple[str, str, bool]:
    """On each rank: (the class and the words of what a bad call raised, whether the next good one was right)."""
    mesh = mesh_for((("dp", 2), ("tp", 2)))
    kind = words = ""
    try:
        ON_RANKS[name][1](mesh)
    except Exception as error:
        kind, words = type(error).__name__, str(error)
    x, weight = _dtensor(mesh, (S0, S2), (3, 5, 7)).requires_grad_(), _replicated(mesh, 7).requires_grad_()
    y = rms_norm(x, weight, weight_grad="reduced")  # exchanges statistics over tp, and dW over dp
    y.backward(torch.ones_like(y))
    assert isinstance(x.grad, DTensor) and isinstance(weight.grad, DTensor)
    leaves = [x.detach().full_tensor().requires_grad_(), weight.detach().full_tensor().requires_grad_()]
    expected = reference_forward(*leaves, 1e-6)
    expected.sum().backward()
    pairs = [(y, expected), (x.grad, leaves[0].grad), (weight.grad, leaves[1].grad)]
    right = all(torch.allclose(a.detach().full_tensor(), b, rtol=1e-5, atol=1e-5) for a, b in pairs)  # type: ignore
    return kind, words, right


@pytest.mark.parametrize("name", ON_RANKS)
def test_every_rank_is_refused_alike_and_goes_on(pool4: RankPool, name: str) -> None:
    kind, _, words = ON_RANKS[name]
    pids = pool4.pids
    outcomes = pool4.run(_refusal_and_a_good_call, name)
    assert outcomes == [outcomes[0]] * 4
    found, told, right = outcomes[0]
    assert found == kind.__name__, told
    assert not [word for word in words if word not in told], told
    assert right
    assert pids in ((), pool4.pids)


def _change_before_the_backward(which: str, x_placements: Any, weight_placements: Any) -> str:
    """On each rank: what the backward said of an x or a weight that was changed after the forward."""
    mesh = mesh_for((("dp", 2), ("tp", 2)))
    x = _dtensor(mesh, x_placements, (4, 6, 8)).requires_grad_()
    plain = weight_placements is None
    weight = torch.ones(8) if plain else _dtensor(mesh, weight_placements, (8,))
    weight.requires_grad_()
    hidden = x * 1.0
    y = rms_norm(hidden, weight)
    with torch.no_grad():
        (hidden if which == "x" else weight).mul_(2.0)
    try:
        y.backward(_dtensor(mesh, x_placements, (4, 6, 8)))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("which", ["x", "weight"])
@pytest.mark.parametrize(
    ("x_placements", "weight_placements"),
    [((S0, S1), (R, R)), ((S0, S2), (R, R)), ((S0, S2), (R, S0)), ((S0, S2), None)],
    ids=["rows", "hidden", "hidden_and_weight", "plain_weight"],
)
def test_a_change_before_the_backward_is_noticed_on_every_rank(
    pool4: RankPool, which: str, x_placements: Any, weight_placements: Any
) -> None:
    # As torch notices it for its own ops: gradients of the changed values would be silently wrong.
    for words in pool4.run(_change_before_the_backward, which, x_placements, weight_placements):
        assert "inplace" in words
