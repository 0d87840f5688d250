"""The gated norm's public function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshnorm.checks import check_gate, check_meshes, check_normalized, check_numbers, check_untransformed, is_dtensor
from meshnorm.dispatch import unobserved
from meshnorm.errors import DTypeError, MixedTensorError
from meshnorm.formula_gated import Gated
from meshnorm.functional import MOST_KNOWN, _check_plain, _for_a_graph, _is_constant
from meshnorm.local_gated import LocalGatedNorm, local_gated_rms_norm
from meshnorm.replayed import signature

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# As ``functional._known``.
_known: dict[tuple, LocalGatedNorm] = {}


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    norm_before_gate: bool = True,
    activation: str = "silu",
    group_size: int | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    normalized_shape: int | Sequence[int] | None = None,
    weight_grad: str = "auto",
    output_placements: Sequence[Placement] | None = None,
) -> Tensor:
    """RMSNorm beside a gate, what stands behind the mixer of state-space and linear-attention models, in one pass::

        y = norm(x) · (weight + offset) · act(gate)          norm_before_gate=True (Qwen3-Next, Kimi-Linear)
        y = norm(x · act(gate)) · (weight + offset)          norm_before_gate=False (Mamba 2, Bamba, Nemotron-H)

    ``meshnorm.formula_gated`` defines it (Dao & Gu, 2024); docs/gated.md says which arguments a model family has.

    The backward is one pass too, which gives the gradients of x, the gate and the weight. It saves x, the gate, the
    weight and one number a row and group, and computes the activation again.

    Args:
        x: shape ``(*rows, *normalized_shape)``, as in ``rms_norm``: any dtype, strides and layout.
        gate: of x's shape; any strides, and any dtype, but float64 only beside a float64 x. A DTensor on x's mesh
            beside a DTensor x. On each mesh dim it is placed as x is; or it is partial, and reduced onto x's layout; or
            it is replicated and x is sharded, and each rank takes its part, which costs nothing. A partial x is reduced
            onto the gate's layout, or as ``output_placements`` asks. Whatever else would have to gather is refused.
            None: the norm alone, in groups.
        weight, eps, offset, normalized_shape, weight_grad: as in ``rms_norm``. The weight has the whole
            ``normalized_shape``, also where it is normalized in groups.
        norm_before_gate: False: what is normalized is x · act(gate), in the accumulation dtype.
        activation: ``"silu"`` or ``"sigmoid"``, of the gate in the accumulation dtype.
        group_size: the numbers of a group, which divide the normalized dims' product: these, flattened, are cut into
            groups that are normalized each by itself. None: one group.
        casting_mode: where results are rounded to x's dtype. ``"llama"``: x̂, then its product with the weight where
            that has x's dtype, then y. ``"gemma"``: y alone. ``"none"``: x̂, the weight, their product, the activation
            that multiplies it, and y.
        output_placements: y's placements, to choose how a partial x or gate is reduced: ``Replicate()`` or ``Shard(d)``
            on a mesh dim where one of them is partial; on every other one what the layout gives anyway.

    Where a mesh dim shards the normalized dims, groups that lie whole within each rank exchange nothing; else one
    number a row and group is all-reduced, once in each pass.

    Returns:
        y of x's shape and dtype, contiguous; a DTensor for a DTensor x, in x's layout, partial dims resolved. The
        gradients of x and of the gate have that layout as well, and each its own dtype.

    Raises:
        GateShapeError, GroupSizeError, and all that ``rms_norm`` raises: before any communication.

    Example:
        >>> x, gate, w = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 16), torch.ones(16)
        >>> gated_rms_norm(x, gate, w).shape  # a norm over each head's 16 numbers
        torch.Size([2, 8, 4, 16])
        >>> x, gate, w = torch.randn(2, 8, 64), torch.randn(2, 8, 64), torch.ones(64)
        >>> gated_rms_norm(x, gate, w, norm_before_gate=False, group_size=16).shape  # 4 groups of 16
        torch.Size([2, 8, 64])
    """
    # A call like an earlier one passes the checks as that did: see ``functional``.
    dims = tuple(normalized_shape) if type(normalized_shape) is list else normalized_shape
    numbers = eps, offset, dims, group_size, norm_before_gate
    options = *numbers, activation, casting_mode, weight_grad, output_placements, *map(type, numbers)
    key, known = None, None
    is_plain = unobserved(x, gate, weight)
    try:
        if is_plain:
            key = signature(x), signature(gate), signature(weight), options
            known = _known.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, one without strides, an option without a hash
        key = None
    if known is not None:
        return known(x, gate, weight)
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        if not isinstance(tensor, Tensor) and (name == "x" or tensor is not None):
            raise DTypeError(f"{name} is a {type(tensor).__name__}: pass a torch tensor")
    if any(map(is_dtensor, (x, gate, weight))):
        check_untransformed(x, gate, weight)
    ndim = check_normalized(x, weight, normalized_shape)
    eps = check_numbers(x, weight, eps, offset, casting_mode, "stats", weight_grad)
    columns = math.prod(x.shape[x.ndim - ndim :])
    group_size = check_gate(x, gate, columns, norm_before_gate, activation, group_size)
    how = Gated(eps, float(offset), casting_mode, norm_before_gate, activation, group_size)
    if is_dtensor(x):
        if gate is not None and not is_dtensor(gate):
            raise MixedTensorError(
                "gate is a plain tensor but x is a DTensor: wrap it with DTensor.from_local(gate, mesh, placements)"
            )
        check_meshes(x, weight, "weight")
        check_meshes(x, gate, "gate")
        from meshnorm.sharded_gated import sharded_gated_rms_norm

        outputs: Any = _for_a_graph(output_placements)
        return sharded_gated_rms_norm(x, gate, weight, *how, ndim, weight_grad, outputs)  # type: ignore[arg-type]
    if is_dtensor(gate):
        raise MixedTensorError(
            "gate is a DTensor but x is a plain tensor: wrap x with DTensor.from_local(x, mesh, placements), or pass "
            "the gate's local part, gate.to_local()"
        )
    _check_plain(weight, output_placements)
    if not is_plain:
        return local_gated_rms_norm(x, gate, weight, how, ndim)
    norm = LocalGatedNorm(how, ndim)
    if key is not None and all(map(_is_constant, numbers)):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = norm
    return norm(x, gate, weight)
