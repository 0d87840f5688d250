"""The public function of the norms of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshnorm.checks import check_beside, check_meshes, check_normalized, check_numbers, check_untransformed, is_dtensor
from meshnorm.dispatch import unobserved
from meshnorm.errors import DTypeError, MixedTensorError, OptionError
from meshnorm.functional import MOST_KNOWN, _for_a_graph, _is_constant
from meshnorm.local_qk import LocalQKNorm, inverse, local_qk_rms_norm, permuted
from meshnorm.replayed import signature
from meshnorm.rows import memory_order

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# As ``functional._known``.
_known: dict[tuple, LocalQKNorm] = {}


def qk_rms_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    q_normalized_shape: int | Sequence[int] | None = None,
    k_normalized_shape: int | Sequence[int] | None = None,
    weight_grad: str = "auto",
    q_output_placements: Sequence[Placement] | None = None,
    k_output_placements: Sequence[Placement] | None = None,
) -> tuple[Tensor, Tensor]:
    """The norms of queries and keys before attention, both in one pass each way::

        q, k = rms_norm(q, q_weight, ...), rms_norm(k, k_weight, ...)

    Bit for bit that on plain tensors, and their gradients (but for the order in which dW adds up rows that were
    transposed). q and k may have any shapes, each its own: per head (Qwen3,
    Gemma3: ``(batch, sequence, heads, head_dim)``, or transposed to ``(batch, heads, sequence, head_dim)``, with
    weights of ``(head_dim,)``) or over all heads (OLMo2, OLMoE, MiniMax-M2: ``(batch, sequence, heads * head_dim)``).
    docs/qk.md says which arguments a model family has.

    On a GPU both are one launch forward; backward one, and one more that adds up both dW. (Two norms that one launch
    cannot do with the bits of each alone take a launch each: docs/qk.md.) The backward saves q, k, the weights and one
    number a row.

    Args:
        q, k: shape ``(*rows, *normalized dims)``; both of one dtype, float64, float32, bfloat16 or float16, and on one
            device. Any strides: slices of a fused projection are read in place. Both plain tensors, or both DTensors on
            one mesh, each of any placements, not necessarily the other's.
        q_weight, k_weight: as ``weight`` of ``rms_norm``; None for a norm without weight, of either or both (Llama-4,
            NanoChat).
        eps, offset, casting_mode, weight_grad: of both, as in ``rms_norm``.
        q_normalized_shape, k_normalized_shape: the last dims of q and of k, which are normalized. Each defaults to the
            weight's shape, or to the last dim where there is no weight.
        q_output_placements, k_output_placements: as ``output_placements`` of ``rms_norm``: how a partial q or k is
            reduced.

    Where mesh dims shard the normalized dims, one number a row is exchanged each way, of q and of k in one all-reduce
    over the mesh dims that shard both. Keys that several ranks hold alike (fewer key heads than ranks) are replicated
    on that mesh dim: nothing of them is exchanged there, and none of their gradients counted twice.

    Returns:
        (q, k) normalized, of the shapes and dtype given; DTensors in the layouts given, partial dims resolved. Rows
        that were transposed stay so in memory; else the results are contiguous.

    Raises:
        What ``rms_norm`` raises, naming q, k or their weights: before any communication.

    Example:
        >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)  # 8 query heads, 2 key heads
        >>> q, k = qk_rms_norm(q, k, torch.ones(64), torch.ones(64))
        >>> q.shape, k.shape
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 16, 2, 64]))
    """
    # A call like an earlier one passes the checks as that did: see ``functional``.
    shapes = q_normalized_shape, k_normalized_shape
    numbers = eps, offset, *(tuple(shape) if type(shape) is list else shape for shape in shapes)
    named = casting_mode, weight_grad, q_output_placements, k_output_placements
    key, known = None, None
    is_plain = unobserved(q, k, q_weight, k_weight)
    try:
        if is_plain:
            key = *map(signature, (q, k, q_weight, k_weight)), numbers, named, *map(type, numbers)
            known = _known.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, one without strides, an option without a hash
        key = None
    if known is not None:
        return known(q, k, q_weight, k_weight)
    for name, tensor in (("q", q), ("k", k), ("q_weight", q_weight), ("k_weight", k_weight)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("q", "k")):
            raise DTypeError(f"{name} is a {type(tensor).__name__}: pass a torch tensor")
    sharded = any(map(is_dtensor, (q, k, q_weight, k_weight)))
    if sharded:
        check_untransformed(q, k, q_weight, k_weight)
    q_ndim = check_normalized(q, q_weight, q_normalized_shape, "q", "q_weight")
    k_ndim = check_normalized(k, k_weight, k_normalized_shape, "k", "k_weight")
    asked = eps, offset, casting_mode, "stats", weight_grad
    eps = check_numbers(q, q_weight, *asked, "q", "q_weight")
    check_numbers(k, k_weight, *asked, "k", "k_weight")
    check_beside(q, k)
    options = eps, float(offset), casting_mode, q_ndim, k_ndim
    if sharded:
        _check_all_sharded(q, k, q_weight, k_weight)
        from meshnorm.sharded_qk import sharded_qk_rms_norm

        outputs: Any = _for_a_graph(q_output_placements), _for_a_graph(k_output_placements)
        return sharded_qk_rms_norm(q, k, q_weight, k_weight, *options, weight_grad, *outputs)  # type: ignore[arg-type]
    for name, placements in (("q", q_output_placements), ("k", k_output_placements)):
        if placements is not None:
            raise OptionError(
                f"{name}_output_placements is for a DTensor {name}, which is a plain tensor: leave it out"
            )
    q_order, k_order = memory_order(q, q_ndim), memory_order(k, k_ndim)
    if not is_plain:
        ys = local_qk_rms_norm(permuted(q, q_order), permuted(k, k_order), q_weight, k_weight, options)
        return permuted(ys[0], inverse(q_order)), permuted(ys[1], inverse(k_order))
    norm = LocalQKNorm(options, q_order, k_order)
    if key is not None and all(map(_is_constant, numbers)):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = norm
    return norm(q, k, q_weight, k_weight)


def _check_all_sharded(q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    """That q and k are DTensors of one mesh, which the weights are on too."""
    for name, plain, other in (("q", q, "k"), ("k", k, "q")):
        if not is_dtensor(plain):
            raise MixedTensorError(
                f"{name} is a plain tensor but {other} or a weight is a DTensor: wrap it with DTensor.from_local("
                f"{name}, mesh, placements), with Replicate() on mesh dims whose ranks hold the same, or pass local "
                f"tensors alone"
            )
    check_meshes(q, k, "k", "q")
    check_meshes(q, q_weight, "q_weight", "q")
    check_meshes(k, k_weight, "k_weight", "k")
