"""Whether a y is that of the formula, bit for bit, where only the rounding of float32 intermediates is left open.

Two implementations of one formula may differ in the last bits of the float32 statistic: they add squares in another
order, or take the root by another instruction. So the formula is evaluated in float64 with the statistic some float32
ulp smaller, and the same larger, and then rounded to the dtypes that a casting mode says. An element for which both
give the same value admits that value and no other; in bfloat16 that is all but about one in a thousand. A mode is
admissible if every element is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshnorm.converting.recipe import APART, RAISED
from meshnorm.formula import accumulation_dtype, reference_rstd

# Half of what the mean is off by, eps, the root and a product: 3 ulp at 64 columns, 6 at 131072, with room for other
# orders of summation. A rounding to bfloat16 is 2000 times as large.
SPREAD = 32 * 2.0**-24


def admits(
    y: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, ndim: int, way: str
) -> bool:
    """Whether ``y`` may be what x and the weight give in this casting mode, by this way of the recipe's."""
    dtype = x.dtype
    if way == APART:
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    elif way == RAISED:
        if torch.promote_types(x.dtype, y.dtype) != y.dtype:
            return False
        x = x.to(y.dtype)
        dtype = y.dtype
    if y.dtype != dtype or y.shape != x.shape:
        return False
    x_hat = x.double() * reference_rstd(x.double(), eps, ndim)
    ends = []
    for factor in (1 - SPREAD, 1 + SPREAD):
        end = x_hat * factor
        if way == APART:
            end = end.to(x.dtype).double()
            end = (end if weight is None else end * weight.double()).to(dtype).double()
        else:
            end = _rounded(end, weight, offset, casting_mode, dtype)
        ends.append(end)
    found, low, high = y.double(), torch.minimum(*ends), torch.maximum(*ends)
    return bool(((found >= low) & (found <= high)).all())


def _rounded(x_hat: Tensor, weight: Tensor | None, offset: float, casting_mode: str, dtype: torch.dtype) -> Tensor:
    """y in float64, rounded where the mode rounds to ``dtype``."""
    if casting_mode != "gemma":
        x_hat = x_hat.to(dtype).double()
    if weight is None:
        return x_hat.to(dtype).double()
    # w + offset is a float32 before it is anything else.
    scale = weight.to(accumulation_dtype(dtype)).add(offset)
    if casting_mode == "none":
        scale = scale.to(dtype)
    return (x_hat * scale.double()).to(dtype).double()
