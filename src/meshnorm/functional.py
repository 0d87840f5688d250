"""The public functions: arguments are checked here, once; then the local or the sharded way."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshnorm import dtensors
from meshnorm.dispatch import transformed, unobserved
from meshnorm.errors import (
    CastingModeError,
    DeviceError,
    DTypeError,
    EpsError,
    MeshMismatchError,
    MixedTensorError,
    NormalizedShapeError,
    OffsetError,
    OptionError,
    PlacementError,
    TensorLayoutError,
    TransformError,
    WeightShapeError,
)
from meshnorm.formula import CASTING_MODES, accumulation_dtype
from meshnorm.local import LocalNorm, local_rms_norm
from meshnorm.replayed import signature

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HIDDEN = ("stats", "gather")
WEIGHT_GRADS = ("auto", "deferred", "reduced")

# Calls whose arguments were checked, by all that distinguishes them but values and addresses. Full, it
# is emptied: an epoch of batches of ever new sizes then costs what it would without.
_known: dict[tuple, Callable[[Any, Any], Tensor]] = {}
MOST_KNOWN = 1024


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    normalized_shape: int | Sequence[int] | None = None,
    hidden: str = "stats",
    weight_grad: str = "auto",
    output_placements: Sequence[Placement] | None = None,
    in_place: bool = False,
) -> Tensor:
    """RMSNorm of a plain tensor or of a DTensor in any layout: ``y = x · rsqrt(mean(x²) + eps) · (weight + offset)``.

    The formula is that of Zhang & Sennrich (2019); the offset is the Gemma family's. ``meshnorm.formula`` defines it.

    Args:
        x: shape ``(*rows, *normalized_shape)``; float64, float32, bfloat16 or float16; any strides. A plain tensor, or
            a DTensor of any placements.
        weight: shape ``normalized_shape``, any of these dtypes, not necessarily x's; None for a norm without weight. A
            plain tensor, or for a DTensor x also a DTensor on x's mesh.
        eps: added to the mean of the squares, 0 or more. None is ``torch.finfo`` of the accumulation dtype's ``eps``,
            as in ``torch.nn.RMSNorm``.
        offset: added to the weight in the accumulation dtype (float32; float64 for a float64 x). 1.0 for Gemma. Without
            a weight it is not used.
        casting_mode: where results are rounded to x's dtype. ``"llama"``: x̂, then the product. ``"gemma"``: the product
            alone. ``"none"``: x̂, the weight and the product. Statistics are always in the accumulation dtype.
        normalized_shape: the dims that are normalized, the last ones of x. Defaults to the weight's shape, or to x's
            last dim where there is no weight.
        hidden: what happens where a mesh dim shards the normalized dims. ``"stats"``: one number a row is exchanged
            each way and y keeps x's layout. ``"gather"``: x is gathered and y is replicated on that mesh dim.
        weight_grad: ``"deferred"`` leaves the weight's gradient as ``Partial("sum")`` over the mesh dims that shard
            rows (a DTensor weight), or as the sum over the rank's own rows (a plain weight). ``"reduced"`` sums it over
            all these mesh dims, in the accumulation dtype. ``"auto"``: deferred for a DTensor weight, reduced for a
            plain weight beside a DTensor x. Between plain tensors there is nothing to reduce.
            A DTensor weight that is sharded otherwise than x's hidden dims is gathered, and its gradient is always
            summed and returned in the weight's own placement.
        output_placements: y's placements, to choose how a partial x is reduced: ``Replicate()`` (the default) or
            ``Shard(d)`` on a mesh dim where x is partial; on every other one what the layout gives anyway.
        in_place: dX is written over dY. Wrong where anything else still reads dY, a residual branch for one.

    Returns:
        y of x's shape and dtype; a DTensor for a DTensor x, in x's layout (partial dims resolved).

    Raises:
        DTypeError, TensorLayoutError, NormalizedShapeError, WeightShapeError, EpsError, OffsetError, CastingModeError,
        OptionError, DeviceError, MixedTensorError, MeshMismatchError, PlacementError, UnreachableLayoutError,
        TransformError: see ``meshnorm.errors``. All are raised from metadata that ranks share, before any
        communication.

    Example:
        >>> x, w = torch.randn(2, 8, 16), torch.ones(16)
        >>> rms_norm(x, w).shape  # (2, 8, 16) -> (2, 8, 16), each of the 16 rows of 16 normalized
        torch.Size([2, 8, 16])
    """
    # A call like an earlier one passes the checks as that did.
    dims = tuple(normalized_shape) if type(normalized_shape) is list else normalized_shape
    outputs = tuple(output_placements) if type(output_placements) is list else output_placements
    # 8 == 8.0 and 1.0 == 1+0j, of which one is refused: types count.
    types = type(eps), type(offset), type(dims)
    options = eps, offset, casting_mode, dims, hidden, weight_grad, outputs, in_place, types
    key, known = None, None
    is_plain = unobserved(x, weight)
    try:
        if is_plain:
            key = signature(x), signature(weight), options
            known = _known.get(key)
        elif is_dtensor(x) and (key := _dtensor_key(x, weight, options)) is not None:
            known = _known.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, one without strides, an option without a hash
        key = None
    if known is not None:
        return known(x, weight)
    is_reused = key is not None and all(map(_is_constant, (eps, offset, dims, in_place)))
    if not isinstance(x, Tensor) or not (weight is None or isinstance(weight, Tensor)):
        wrong = "x" if not isinstance(x, Tensor) else "weight"
        raise DTypeError(f"{wrong} is a {type(x if wrong == 'x' else weight).__name__}: pass a torch tensor")
    if is_dtensor(x) or is_dtensor(weight):
        check_untransformed(x, weight)
    ndim = _check_normalized(x, weight, normalized_shape)
    eps = _check_numbers(x, weight, eps, offset, casting_mode, hidden, weight_grad)
    if is_dtensor(x):
        _check_meshes(x, weight)
        from meshnorm.routing import encoded
        from meshnorm.sharded import known_norm, sharded_rms_norm

        if output_placements is not None and not _may_be_placements(output_placements):
            raise PlacementError(
                f"output_placements is {output_placements!r}: give a sequence of placements, one for each mesh dim"
            )
        if output_placements is not None and torch.compiler.is_compiling():
            output_placements = tuple(encoded(placement) for placement in output_placements)  # type: ignore[misc]
        call = (eps, float(offset), casting_mode, ndim, hidden, weight_grad, output_placements, in_place)
        if is_reused and (norm := known_norm(x, weight, *call)) is not None:  # type: ignore[arg-type]
            return _remembered(key, norm)(x, weight)
        return sharded_rms_norm(x, weight, *call)  # type: ignore[arg-type]
    if is_dtensor(weight):
        raise MixedTensorError(
            "weight is a DTensor but x is a plain tensor: wrap x with DTensor.from_local(x, mesh, placements), or pass "
            "the weight's local part, weight.to_local()"
        )
    if output_placements is not None:
        raise OptionError("output_placements is for a DTensor x, and x is a plain tensor: leave it out")
    if not is_plain:
        return local_rms_norm(x, weight, eps, float(offset), casting_mode, ndim)
    norm = LocalNorm(eps, float(offset), casting_mode, ndim, in_place)
    return (_remembered(key, norm) if is_reused else norm)(x, weight)


def _is_constant(option: Any) -> bool:
    """Whether an option is a value that can neither change nor keep anything alive."""
    if isinstance(option, tuple):
        return all(map(_is_constant, option))
    return option is None or isinstance(option, (bool, int, float))


def _may_be_placements(placements: Any) -> bool:
    """Whether it is a sequence of what can be looked up; the layout says which of them is no placement."""
    try:
        return isinstance(placements, Sequence) and hash(tuple(placements)) is not None
    except TypeError:
        return False


def _dtensor_key(x: Any, weight: Any, options: tuple) -> tuple | None:
    """All that distinguishes a call on a DTensor but values and addresses; None where something observes it."""
    if torch.compiler.is_compiling() or not dtensors.is_open(x):
        return None
    local = dtensors.local(x)
    if is_dtensor(weight):
        local_weight = dtensors.local(weight)
        weight_key = dtensors.layout(weight), signature(local_weight), weight.requires_grad
    else:
        local_weight = weight
        weight_key = weight if weight is None else (signature(weight), weight.requires_grad)
    if not unobserved(local, local_weight):
        return None
    return dtensors.layout(x), signature(local), weight_key, options


def _remembered(key: Any, norm: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = norm
    return norm


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


def _check_normalized(x: Tensor, weight: Tensor | None, normalized_shape: int | Sequence[int] | None) -> int:
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
            "there is no dim to normalize: x or the weight has no dims; RMSNorm needs at least one normalized dim"
        )
    if weight is not None and tuple(weight.shape) != shape:
        raise WeightShapeError(
            f"weight has shape {tuple(weight.shape)}, but normalized_shape is {shape}: they must be equal"
        )
    ndim = len(shape)
    if tuple(x.shape[x.ndim - ndim :] if ndim <= x.ndim else ()) != shape:
        if normalized_shape is None and weight is not None:
            raise WeightShapeError(
                f"weight has shape {shape}, but the last dims of x, of shape {tuple(x.shape)}, differ: pass a weight "
                f"of the shape of the dims that are to be normalized"
            )
        raise NormalizedShapeError(
            f"normalized_shape is {shape}, but x has shape {tuple(x.shape)}, whose last dims differ"
        )
    if 0 in shape:
        raise NormalizedShapeError(
            f"normalized_shape {shape} holds a dim of size 0: the mean over no elements is undefined"
        )
    return ndim


def _check_numbers(
    x: Tensor, weight: Tensor | None, eps: float | None, offset: float, casting_mode: str, hidden: str, weight_grad: str
) -> float:
    """eps as a float, all dtypes, devices and options having been checked."""
    if x.dtype not in DTYPES:
        raise DTypeError(f"x has dtype {x.dtype}: RMSNorm takes float64, float32, bfloat16 or float16; cast x first")
    if x.layout is not torch.strided:
        raise TensorLayoutError(f"x is {x.layout}: RMSNorm takes strided tensors; densify x, or take its values")
    if weight is not None:
        if weight.dtype not in DTYPES:
            raise DTypeError(
                f"weight has dtype {weight.dtype}: RMSNorm takes float64, float32, bfloat16 or float16; cast it first"
            )
        if weight.layout is not torch.strided:
            raise TensorLayoutError(f"weight is {weight.layout}: RMSNorm takes strided tensors; densify it")
        if weight.device != x.device:
            raise DeviceError(f"weight is on {weight.device} but x is on {x.device}: move one to the other's device")
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


def _check_meshes(x: Any, weight: Any) -> None:
    if is_dtensor(weight) and weight.device_mesh != x.device_mesh:
        raise MeshMismatchError(
            f"weight is on {weight.device_mesh} but x is on {x.device_mesh}: redistribute or rebuild one of them on "
            f"the other's mesh"
        )
