"""RMSNorm under the names that liger-kernel 0.8.5 gives it, so that code written for it runs by changing an import.

Same names, same arguments in the same order, same defaults. What differs, on purpose:

- ``in_place`` is accepted and has no effect. Liger writes dX over dY's memory by default, which corrupts the gradient
  of whatever else reads dY, such as a residual branch (``meshnorm.rms_norm`` has the option, off by default).
- ``row_mode`` is accepted and has no effect: one launch setting serves each width.
- The offset is added to the weight in float32, where Liger's "llama" and "none" modes add it in the weight's dtype;
  the statistics of mode "none" are in float32. Any strides, a weight of any float dtype, CPU tensors.
- A DTensor stays one, in its layout, and so does its gradient. ``gather=True`` gives Liger's plain, whole y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshnorm.checks import is_dtensor
from meshnorm.errors import CastingModeError, OptionError
from meshnorm.functional import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "LigerFusedAddRMSNorm",
    "LigerFusedAddRMSNormFunction",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "LigerRMSNormFunction",
    "liger_fused_add_rms_norm",
    "liger_rms_norm",
]

# Liger's numbers for the modes, which it takes in place of their names.
_MODES = {-1: "none", 0: "llama", 1: "gemma"}


def _mode(casting_mode: str | int) -> str:
    if not isinstance(casting_mode, int):
        return casting_mode
    if casting_mode not in _MODES:
        raise CastingModeError(f"casting_mode is {casting_mode}: choose 'llama' (0), 'gemma' (1) or 'none' (-1)")
    return _MODES[casting_mode]


def _norm(X: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: str | int, gather: bool) -> Tensor:
    shape = tuple(X.shape[-1:] if W is None else W.shape)
    y = rms_norm(X, W, eps, offset=offset, casting_mode=_mode(casting_mode), normalized_shape=shape)
    return _whole(y) if gather else y


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor's plain, whole tensor, the same on every rank, as long as its gradient is too."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: DTensor = tensor  # type: ignore[assignment]
    return dtensor.full_tensor()


class LigerRMSNormFunction:
    """``apply`` of Liger's autograd function."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
        gather: bool = False,
    ) -> Tensor:
        """y of X's shape ``(*rows, hidden)``, dtype and layout. W has shape ``(hidden,)``, or is None.

        ``gather`` gives a DTensor's whole y as a plain tensor; each rank must then use it alike. Raises what
        ``meshnorm.rms_norm`` raises.
        """
        return _norm(X, W, eps, offset, casting_mode, gather)


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    *,
    gather: bool = False,
) -> Tensor:
    """As ``LigerRMSNormFunction.apply``."""
    return _norm(X, W, eps, offset, casting_mode, gather)


class LigerFusedAddRMSNormFunction:
    """``apply`` of Liger's autograd function."""

    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
        gather: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(the norm of X + R, X + R). X and R are of one shape, dtype and layout."""
        if not (is_dtensor(X) or is_dtensor(R)) and X.dtype == R.dtype and X.shape == R.shape:
            shape = tuple(X.shape[-1:] if W is None else W.shape)
            return add_rms_norm(X, R, W, eps, offset=offset, casting_mode=_mode(casting_mode), normalized_shape=shape)
        total = X + R
        return _norm(total, W, eps, offset, casting_mode, gather), _whole(total) if gather else total


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    *,
    gather: bool = False,
) -> tuple[Tensor, Tensor]:
    """As ``LigerFusedAddRMSNormFunction.apply``."""
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode, in_place, gather)


class _Norm(nn.Module):
    """What Liger's two modules share. The weight has shape ``(hidden_size,)``; eps is ``variance_epsilon``."""

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float, offset: float, casting_mode: str, init_fn: str, in_place: bool, affine: bool
    ) -> None:
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise OptionError(f"init_fn is {init_fn!r}: choose 'ones' or 'zeros'")
        start = torch.ones if init_fn == "ones" else torch.zeros
        self.register_parameter("weight", nn.Parameter(start(hidden_size)) if affine else None)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place
        self.gather = False

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNorm(_Norm):
    """Liger's module. ``gather`` is ours: a DTensor's whole y as a plain tensor."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
        *,
        gather: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine)
        self.row_mode = row_mode
        self.elementwise_affine = elementwise_affine
        self.gather = gather

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode, gather=self.gather
        )


class LigerFusedAddRMSNorm(_Norm):
    """Liger's module: (the norm of hidden_states + residual, hidden_states + residual)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        *,
        gather: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, True)
        self.gather = gather

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states,
            residual,
            self.weight,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
            self.in_place,
            self.gather,
        )


def _preset(
    name: str, offset: float, casting_mode: str, init_fn: str, in_place: bool = False, rows: bool = True
) -> type[LigerRMSNorm]:
    """A LigerRMSNorm with other defaults. ``rows``: whether it takes ``row_mode``."""

    def with_row_mode(
        self: Any,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = offset,
        casting_mode: str = casting_mode,
        init_fn: str = init_fn,
        in_place: bool = in_place,
        row_mode: bool | None = None,
    ) -> None:
        LigerRMSNorm.__init__(self, hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)

    def without_row_mode(
        self: Any,
        dim: int,
        eps: float = 1e-6,
        offset: float = offset,
        casting_mode: str = casting_mode,
        init_fn: str = init_fn,
        in_place: bool = in_place,
    ) -> None:
        LigerRMSNorm.__init__(self, dim, eps, offset, casting_mode, init_fn, in_place)

    doc = f"A LigerRMSNorm whose defaults are offset={offset}, casting_mode={casting_mode!r}, init_fn={init_fn!r}."
    names = {"__init__": with_row_mode if rows else without_row_mode, "__doc__": doc, "__module__": __name__}
    return type(name, (LigerRMSNorm,), names)


LigerRMSNormForGemma = _preset("LigerRMSNormForGemma", 1.0, "gemma", "zeros", in_place=True)
LigerRMSNormForGemma2 = _preset("LigerRMSNormForGemma2", 1.0, "gemma", "zeros")
LigerRMSNormForGemma3 = _preset("LigerRMSNormForGemma3", 1.0, "gemma", "zeros", rows=False)
LigerRMSNormForQwen3Next = _preset("LigerRMSNormForQwen3Next", 1.0, "gemma", "zeros")
LigerRMSNormForMuseGlimmerTextCentered = _preset("LigerRMSNormForMuseGlimmerTextCentered", 1.0, "gemma", "zeros")
LigerRMSNormForOlmo2 = _preset("LigerRMSNormForOlmo2", 0.0, "llama", "ones")
LigerRMSNormForGlm4 = _preset("LigerRMSNormForGlm4", 0.0, "llama", "ones")


class LigerRMSNormForGemma4(LigerRMSNorm):
    """A LigerRMSNorm in Gemma's casting mode without its offset; ``with_scale=False`` leaves the weight out."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """The same; ``dim`` may be left out without a scale."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        if dim is None and with_scale:
            raise OptionError("dim is None: give the hidden size, or with_scale=False for a norm without a weight")
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, with_scale)
