"""Norms as models write them: one class for each way to round, and some that are no RMSNorm or not ours to replace."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Unnamed(nn.Module):
    """x̂ is rounded to x's dtype, the product to what that and the weight's promote to."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class LlamaNorm(Unnamed):
    """The same under a name that says what it is."""


class CachingNorm(LlamaNorm):
    """Says itself what of it is copied and pickled."""

    cache: Tensor | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "cache": None}


class RootAndDivisionNorm(nn.Module):
    """All in float32, one rounding; the statistic by other instructions than ours."""

    def __init__(self, size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.norm_eps = norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + self.norm_eps) * self.scale).to(x)


class GemmaStyleNorm(nn.Module):
    """All in float32, one rounding; 1 is added to the weight."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).type_as(x)


class NoneStyleNorm(GemmaStyleNorm):
    """x̂ and the sum of weight and offset are both rounded to x's dtype before the product."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * (1 + self.weight.float()).type_as(x)


class T5StyleNorm(LlamaNorm):
    """x̂ is rounded only where the weight is half: y always has the weight's dtype or float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        statistic = torch.rsqrt(hidden_states.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        scaled = hidden_states * statistic
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            scaled = scaled.to(self.weight.dtype)
        return self.weight * scaled


class ConstantEpsNorm(LlamaNorm):
    """eps stands in the code; the attribute that looks like it is not read."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1.5625e-7)).to(hidden_states)


class WideUnderAutocastNorm(GemmaStyleNorm):
    """Under autocast y is float32, as torch's own norm gives it on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() if torch.is_autocast_enabled("cpu") else x)


class WeightlessNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class UnusedBufferNorm(WeightlessNorm):
    """Holds a weight that it does not apply."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size))


# --- to be left alone ---


class GatedNorm(LlamaNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states)


class SumNorm(LlamaNorm):
    """The root of the sum, not of the mean."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        total = hidden_states.float().square().sum(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(total + self.variance_epsilon))


class GroupedNorm(LlamaNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        groups = hidden_states.unflatten(-1, (2, -1))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * groups.flatten(-2)


class EpsOutsideNorm(LlamaNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states / (hidden_states.square().mean(-1, keepdim=True).sqrt() + 1e-3)


class ClampedEpsNorm(LlamaNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.square().mean(-1, keepdim=True).clamp(min=self.variance_epsilon)
        return self.weight * (hidden_states * torch.rsqrt(mean))


class RoundedStatisticNorm(LlamaNorm):
    """rstd itself is rounded to x's dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.float().square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon).type_as(hidden_states))


class OffsetInHalfNorm(GemmaStyleNorm):
    """1 is added to the weight in the weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight).float()).type_as(x)


class DetachedStatisticNorm(LlamaNorm):
    """The statistic is a constant to the gradient."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.detach().square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))


class OtherwiseInEvaluationNorm(LlamaNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        y = super().forward(hidden_states)
        return y if self.training else y * 1.25


class ChannelsFirstNorm(LlamaNorm):
    """Rows of a 4-dim x lie along dim 1; others along the last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.ndim == 4:
            return super().forward(hidden_states.transpose(1, -1)).transpose(1, -1)
        return super().forward(hidden_states)


class OtherwiseIn4DNorm(LlamaNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        y = super().forward(hidden_states)
        return y.flip(-1) if hidden_states.ndim == 4 else y


class OddOffsetNorm(GemmaStyleNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (0.3 + self.weight)


class TwoWeightsNorm(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))
