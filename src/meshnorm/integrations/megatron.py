"""Megatron Core: a norm class for layer specs.

::

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from meshnorm.integrations.megatron import with_meshnorm

    spec = with_meshnorm(get_gpt_layer_local_spec(normalization="RMSNorm", ...))

Megatron hands its norms plain local tensors and reduces their gradients itself: under sequence parallelism those of
parameters that are marked ``sequence_parallel``, as this class marks its weight. Norms that Transformer Engine fuses
with the linear behind them are part of that linear, and stay.

Seen with megatron-core 0.16.1.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.models.backends import LNImpl  # type: ignore[import-not-found] # no dev dependency
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # type: ignore[import-not-found]

from meshnorm.errors import OptionError
from meshnorm.module import RMSNorm

try:
    from megatron.core.extensions.transformer_engine import TENorm  # type: ignore[import-not-found]
except ImportError:  # without Transformer Engine
    TENorm = WrappedTorchNorm

__all__ = ["MeshnormNorm", "with_meshnorm"]


class MeshnormNorm(RMSNorm):
    """``meshnorm.RMSNorm`` with the arguments with which Megatron makes its norms.

    One rounding at the end, as in Transformer Engine. ``config.layernorm_zero_centered_gamma`` adds 1 to the weight,
    which then starts at 0; the weight has ``config.params_dtype``. Raises OptionError for a config that wants another
    normalization.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        if config.normalization != "RMSNorm":
            raise OptionError(
                f"config.normalization is {config.normalization!r}: MeshnormNorm is an RMSNorm; set it to 'RMSNorm', "
                f"or leave the spec's own norms"
            )
        offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        super().__init__(hidden_size, eps, dtype=config.params_dtype, offset=offset, casting_mode="gemma")
        self.config = config
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def with_meshnorm(spec: Any) -> Any:
    """The layer or block spec with ``MeshnormNorm`` for every norm that is a module of its own."""
    if spec in (WrappedTorchNorm, TENorm, LNImpl) and isinstance(spec, type):
        return MeshnormNorm
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(with_meshnorm, spec))
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(spec, **{f.name: with_meshnorm(getattr(spec, f.name)) for f in fields(spec) if f.init})
    return spec
