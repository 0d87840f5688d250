"""The public functions: arguments are checked here, once; then the local or the sharded way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshnorm import dtensors
from meshnorm.checks import (
    check_meshes,
    check_normalized,
    check_numbers,
    check_residual,
    check_untransformed,
    is_dtensor,
)
from meshnorm.dispatch import unobserved
from meshnorm.errors import DTypeError, MixedTensorError, OptionError, PlacementError
from meshnorm.local import LocalNorm, local_rms_norm
from meshnorm.local_add import LocalAddNorm, local_add_rms_norm
from meshnorm.replayed import signature

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Calls whose arguments were checked, by all that distinguishes them but values and addresses. Full, it
# is emptied: an epoch of batches of ever new sizes then costs what it would without.
_known: dict[tuple, Callable[[Any, Any], Tensor]] = {}
_known_sums: dict[tuple, LocalAddNorm] = {}  # the same of ``add_rms_norm``
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
    ndim = check_normalized(x, weight, normalized_shape)
    eps = check_numbers(x, weight, eps, offset, casting_mode, hidden, weight_grad)
    if is_dtensor(x):
        check_meshes(x, weight, "weight")
        from meshnorm.sharded import known_norm, sharded_rms_norm

        output_placements = _for_a_graph(output_placements)
        call = (eps, float(offset), casting_mode, ndim, hidden, weight_grad, output_placements, in_place)
        if is_reused and (norm := known_norm(x, weight, *call)) is not None:  # type: ignore[arg-type]
            return _remembered(key, norm)(x, weight)
        return sharded_rms_norm(x, weight, *call)  # type: ignore[arg-type]
    _check_plain(weight, output_placements)
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


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    normalized_shape: int | Sequence[int] | None = None,
    weight_grad: str = "auto",
    output_placements: Sequence[Placement] | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual_out = x + residual`` and ``y``, its RMSNorm: what stands between two blocks of a model, in one pass.

    residual_out is rounded to the residual's dtype, and that is what is normalized: y is, to rounding, what
    ``rms_norm(residual_out, weight, ...)`` gives, and what models compute that add first and normalize then.

    The backward is one pass too. It reads residual_out, which is saved, and neither x nor residual. Either output may
    be left unused; its gradient then costs nothing. x and the residual have one gradient. It is written once for both
    where they have one dtype and what made them only reads it (linears, multiplications, embeddings, an addition like
    this), else twice: ``x.grad`` and ``residual.grad`` never share memory.
    (``torch.autograd.grad`` with respect to such an x and residual inside a graph returns one tensor twice, as for
    torch's own addition.)

    Args:
        x: shape ``(*rows, *normalized_shape)``, as in ``rms_norm``: what a block adds, any dtype, strides and layout.
        residual: the residual stream, of x's shape; any strides, and any dtype, but float64 only beside a float64 x. A
            DTensor on x's mesh beside a DTensor x. On each mesh dim it is placed as x is, or

            - x is partial and it is not: x is reduced onto its layout (all-reduced where the residual is replicated,
              reduce-scattered where it is sharded), or it is partial and x is not: the other way round;
            - both are partial: both are reduced, as ``output_placements`` asks, to replicated by default;
            - it is replicated and x is sharded: each rank takes its part, which costs nothing.

            Whatever else would have to gather or to exchange shards is refused.
        weight, eps, offset, casting_mode, normalized_shape, weight_grad: as in ``rms_norm``.
        output_placements: the placements of y and residual_out, to choose how a partial x or residual is reduced:
            ``Replicate()`` or ``Shard(d)`` on a mesh dim where one of them is partial; on every other one what the
            layout gives anyway.

    Returns:
        (y, residual_out): y of x's dtype and residual_out of the residual's, both contiguous and of x's shape;
        DTensors in x's layout, partial dims resolved, for a DTensor x. The gradients of x and of the residual have that
        layout as well.

    Raises:
        ResidualShapeError, and all that ``rms_norm`` raises: before any communication.

    Example:
        >>> x, residual, w = torch.randn(2, 8, 16).bfloat16(), torch.randn(2, 8, 16), torch.ones(16)
        >>> y, residual = add_rms_norm(x, residual, w)
        >>> y.dtype, residual.dtype
        (torch.bfloat16, torch.float32)
    """
    # A call like an earlier one passes the checks as that did: see ``rms_norm``.
    dims = tuple(normalized_shape) if type(normalized_shape) is list else normalized_shape
    numbers = eps, offset, dims
    key, known = None, None
    is_plain = unobserved(x, residual, weight)
    try:
        if is_plain:
            asked = *numbers, casting_mode, weight_grad, output_placements, *map(type, numbers)
            key = signature(x), signature(residual), signature(weight), asked
            known = _known_sums.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, one without strides, an option without a hash
        key = None
    if known is not None:
        return known(x, residual, weight)
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        if not isinstance(tensor, Tensor) and (name != "weight" or tensor is not None):
            raise DTypeError(f"{name} is a {type(tensor).__name__}: pass a torch tensor")
    if any(map(is_dtensor, (x, residual, weight))):
        check_untransformed(x, residual, weight)
    ndim = check_normalized(x, weight, normalized_shape)
    eps = check_numbers(x, weight, eps, offset, casting_mode, "stats", weight_grad)
    check_residual(x, residual)
    options = eps, float(offset), casting_mode, ndim
    if is_dtensor(x):
        if not is_dtensor(residual):
            raise MixedTensorError(
                "residual is a plain tensor but x is a DTensor: wrap it with DTensor.from_local(residual, mesh, "
                "placements)"
            )
        check_meshes(x, weight, "weight")
        check_meshes(x, residual, "residual")
        from meshnorm.sharded_add import sharded_add_rms_norm

        return sharded_add_rms_norm(x, residual, weight, *options, weight_grad, _for_a_graph(output_placements))  # type: ignore[arg-type]
    if is_dtensor(residual):
        raise MixedTensorError(
            "residual is a DTensor but x is a plain tensor: wrap x with DTensor.from_local(x, mesh, placements), or "
            "pass the residual's local part, residual.to_local()"
        )
    _check_plain(weight, output_placements)
    if not is_plain:
        return local_add_rms_norm(x, residual, weight, *options)
    norm = LocalAddNorm(options)
    if key is not None and all(map(_is_constant, numbers)):
        if len(_known_sums) >= MOST_KNOWN:
            _known_sums.clear()
        _known_sums[key] = norm
    return norm(x, residual, weight)


def _for_a_graph(output_placements: Sequence[Placement] | None) -> Any:
    """Placements as what torch.compile can put into its graph, where it makes one."""
    if output_placements is None:
        return None
    if torch.compiler.is_compiling():
        from meshnorm.routing import encoded

        return tuple([encoded(placement) for placement in output_placements])
    if not _may_be_placements(output_placements):
        raise PlacementError(
            f"output_placements is {output_placements!r}: give a sequence of placements, one for each mesh dim"
        )
    return output_placements


def _check_plain(weight: Tensor | None, output_placements: Sequence[Placement] | None) -> None:
    """What must not stand beside a plain x."""
    if is_dtensor(weight):
        raise MixedTensorError(
            "weight is a DTensor but x is a plain tensor: wrap x with DTensor.from_local(x, mesh, placements), or pass "
            "the weight's local part, weight.to_local()"
        )
    if output_placements is not None:
        raise OptionError("output_placements is for a DTensor x, and x is a plain tensor: leave it out")
