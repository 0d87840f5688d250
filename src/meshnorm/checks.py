"""Checks of the public functions' arguments. What they read, ranks share: a refused call is refused on all alike."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from meshnorm.dispatch import transformed
from meshnorm.errors import (
    CastingModeError,
    DeviceError,
    DTypeError,
    EpsError,
    GateShapeError,
    GroupSizeError,
    MeshMismatchError,
    NormalizedShapeError,
    OffsetError,
    OptionError,
    ResidualShapeError,
    TensorLayoutError,
    TransformError,
    WeightShapeError,
)
from meshnorm.formula import CASTING_MODES, accumulation_dtype
from meshnorm.formula_gated import ACTIVATIONS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HIDDEN = ("stats", "gather")
WEIGHT_GRADS = ("auto", "deferred", "reduced")


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, without importing DTensor where nobody has (a torch without distributed)."""
    if type(tensor) is Tensor or tensor is None:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_untransformed(*tensors: Tensor | None) -> None:
    """For calls on DTensors, which a transform hides from what it calls."""
    if transformed(*tensors):
        raise TransformError(
            "a DTensor is normalized under a transform of torch.func (grad, vmap, ...) or in forward mode, in which "
            "DTensors take no part: use torch.autograd, or transform a function of plain local tensors"
        )


def check_normalized(
    x: Tensor,
    weight: Tensor | None,
    normalized_shape: int | Sequence[int] | None,
    x_name: str = "x",
    weight_name: str = "weight",
) -> int:
    """How many dims are normalized, all shapes having been checked."""
    if normalized_shape is None:
        shape = tuple(weight.shape) if weight is not None else tuple(x.shape[-1:])
    elif type(normalized_shape) is tuple and all(type(size) is int for size in normalized_shape):
        shape = normalized_shape
    else:
        try:
            sizes = (normalized_shape,) if isinstance(normalized_shape, Integral) else tuple(normalized_shape)  # type: ignore[arg-type]
            shape = tuple(index(size) for size in sizes)
        except TypeError:
            raise NormalizedShapeError(
                f"normalized_shape is {normalized_shape!r}: give an int, or a sequence of ints"
            ) from None
    if not shape:
        raise NormalizedShapeError(
            f"there is no dim to normalize: {x_name} or the weight has no dims; RMSNorm needs at least one normalized "
            f"dim"
        )
    if weight is not None and tuple(weight.shape) != shape:
        raise WeightShapeError(
            f"{weight_name} has shape {tuple(weight.shape)}, but normalized_shape is {shape}: they must be equal"
        )
    ndim = len(shape)
    if tuple(x.shape[x.ndim - ndim :] if ndim <= x.ndim else ()) != shape:
        if normalized_shape is None and weight is not None:
            raise WeightShapeError(
                f"{weight_name} has shape {shape}, but the last dims of {x_name}, of shape {tuple(x.shape)}, differ: "
                f"pass a weight of the shape of the dims that are to be normalized"
            )
        raise NormalizedShapeError(
            f"normalized_shape is {shape}, but {x_name} has shape {tuple(x.shape)}, whose last dims differ"
        )
    if 0 in shape:
        raise NormalizedShapeError(
            f"normalized_shape {shape} holds a dim of size 0: the mean over no elements is undefined"
        )
    return ndim


def check_numbers(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    offset: float,
    casting_mode: str,
    hidden: str,
    weight_grad: str,
    x_name: str = "x",
    weight_name: str = "weight",
) -> float:
    """eps as a float, all dtypes, devices and options having been checked."""
    if x.dtype not in DTYPES:
        raise DTypeError(
            f"{x_name} has dtype {x.dtype}: RMSNorm takes float64, float32, bfloat16 or float16; cast it first"
        )
    if x.layout is not torch.strided:
        raise TensorLayoutError(
            f"{x_name} is {x.layout}: RMSNorm takes strided tensors; densify it, or take its values"
        )
    if weight is not None:
        if weight.dtype not in DTYPES:
            raise DTypeError(
                f"{weight_name} has dtype {weight.dtype}: RMSNorm takes float64, float32, bfloat16 or float16; "
                f"cast it first"
            )
        if weight.layout is not torch.strided:
            raise TensorLayoutError(f"{weight_name} is {weight.layout}: RMSNorm takes strided tensors; densify it")
        if weight.device != x.device:
            raise DeviceError(
                f"{weight_name} is on {weight.device} but {x_name} is on {x.device}: move one to the other's device"
            )
    if eps is None:
        eps = torch.finfo(accumulation_dtype(x.dtype)).eps
    if not _is_within(eps, 0.0):
        raise EpsError(f"eps is {eps}: give a finite number that is 0 or more")
    if not _is_within(offset, -sys.float_info.max):
        raise OffsetError(f"offset is {offset}: give a finite number (0.0, or 1.0 for the Gemma family)")
    if casting_mode not in CASTING_MODES:
        raise CastingModeError(f"casting_mode is {casting_mode!r}: choose one of {', '.join(map(repr, CASTING_MODES))}")
    if hidden not in HIDDEN:
        raise OptionError(f'hidden is {hidden!r}: choose "stats" (one number a row is exchanged) or "gather"')
    if weight_grad not in WEIGHT_GRADS:
        raise OptionError(f'weight_grad is {weight_grad!r}: choose "auto", "deferred" or "reduced"')
    return float(eps)


def _is_within(value: Any, least: float) -> bool:
    """Whether a value is a finite number from ``least`` up; False for what is no number."""
    try:
        return least <= value < math.inf
    except (TypeError, RuntimeError):  # a string, a tensor of several elements
        return False


def check_residual(x: Tensor, residual: Tensor) -> None:
    """That the residual can be added to x, whose own checks have passed."""
    if residual.dtype not in DTYPES:
        raise DTypeError(
            f"residual has dtype {residual.dtype}: RMSNorm takes float64, float32, bfloat16 or float16; cast it first"
        )
    if (residual.dtype == torch.float64) != (x.dtype == torch.float64):
        raise DTypeError(
            f"residual has dtype {residual.dtype} and x {x.dtype}: float64 stands beside float64 alone; cast one of "
            f"them"
        )
    if residual.layout is not torch.strided:
        raise TensorLayoutError(f"residual is {residual.layout}: RMSNorm takes strided tensors; densify it")
    if residual.device != x.device:
        raise DeviceError(f"residual is on {residual.device} but x is on {x.device}: move one to the other's device")
    if residual.shape != x.shape:
        raise ResidualShapeError(
            f"residual has shape {tuple(residual.shape)} but x has {tuple(x.shape)}: they must be equal; expand() what "
            f"is to be broadcast"
        )


def check_beside(q: Tensor, k: Tensor) -> None:
    """That k, whose own checks have passed, can be normalized together with q."""
    if q.dtype != k.dtype:
        raise DTypeError(f"k has dtype {k.dtype} but q has {q.dtype}: cast one to the other's, or norm each by itself")
    if q.device != k.device:
        raise DeviceError(f"k is on {k.device} but q is on {q.device}: move one to the other's device")


def check_meshes(x: Any, other: Any, name: str, x_name: str = "x") -> None:
    if is_dtensor(other) and other.device_mesh != x.device_mesh:
        raise MeshMismatchError(
            f"{name} is on {other.device_mesh} but {x_name} is on {x.device_mesh}: redistribute or rebuild one of them "
            f"on the other's mesh"
        )


def check_gate(
    x: Tensor, gate: Tensor | None, columns: int, norm_before_gate: bool, activation: str, group_size: int | None
) -> int:
    """The numbers of a group, of ``columns`` that are normalized; the gate and what concerns it having been checked."""
    if gate is not None:
        if gate.dtype not in DTYPES:
            raise DTypeError(
                f"gate has dtype {gate.dtype}: RMSNorm takes float64, float32, bfloat16 or float16; cast it first"
            )
        if (gate.dtype == torch.float64) != (x.dtype == torch.float64):
            raise DTypeError(
                f"gate has dtype {gate.dtype} and x {x.dtype}: float64 stands beside float64 alone; cast one of them"
            )
        if gate.layout is not torch.strided:
            raise TensorLayoutError(f"gate is {gate.layout}: RMSNorm takes strided tensors; densify it")
        if gate.device != x.device:
            raise DeviceError(f"gate is on {gate.device} but x is on {x.device}: move one to the other's device")
        if gate.shape != x.shape:
            raise GateShapeError(
                f"gate has shape {tuple(gate.shape)} but x has {tuple(x.shape)}: they must be equal; expand() what is "
                f"to be broadcast"
            )
    if activation not in ACTIVATIONS:
        raise OptionError(f'activation is {activation!r}: choose "silu" or "sigmoid"')
    if not isinstance(norm_before_gate, bool):
        raise OptionError(f"norm_before_gate is {norm_before_gate!r}: choose True or False")
    if group_size is None:
        return columns
    if not isinstance(group_size, Integral) or isinstance(group_size, bool) or group_size < 1:
        raise GroupSizeError(f"group_size is {group_size!r}: give an int of 1 or more, or None for one group")
    if columns % group_size:
        raise GroupSizeError(
            f"group_size is {group_size}, but {columns} numbers are normalized, which it does not divide: give a "
            f"divisor of {columns}, or None for one group"
        )
    return int(group_size)
