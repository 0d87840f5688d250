"""What a norm module computes, found by running its own forward on small random tensors.

Nothing is read off a class's name. The forward is asked, in this order: is y a row's x times one number a row times one
number a column; what is added to the weight; what is added to the mean of the squares, and which attribute holds it; is
all of that exact in float32, for tensors of other ranks and in evaluation too; is the gradient the formula's; and where
does it round, for each pair of dtypes. An answer that ``meshnorm.rms_norm`` cannot give refuses the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshnorm.checks import DTYPES
from meshnorm.converting.recipe import APART, FUSED, RAISED, Recipe, Situation
from meshnorm.converting.rounding import admits
from meshnorm.converting.shell import Refused, Shell, accelerator, undisturbed
from meshnorm.formula import CASTING_MODES, accumulation_dtype, reference_backward, reference_rstd

# In a probe there are at least so many elements a row scale, enough for two casting modes to differ in some.
_ELEMENTS = 512
# Squares of x this small vanish beside any eps but 0, and are normal numbers in float32 and bfloat16.
_TINY = 2.0**-40
_FORMULA = "x · rsqrt(mean(x²) + eps) · (weight + offset) over its last dims"


def recipe_of(module: nn.Module) -> Recipe:
    """How ``meshnorm.rms_norm`` gives what the module's forward gives. Raises Refused where it does not."""
    shell = Shell(module)
    with undisturbed(shell.device):
        return _Probe(shell).recipe()


class _Probe:
    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.generator = torch.Generator("cpu")
        self.generator.seed()
        self.weight = shell.tensor  # None once y has been seen not to depend on it
        self.offset, self.eps = 0.0, 0.0
        self.eps_name: str | None = None

    def recipe(self) -> Recipe:
        self._read_weight()
        self._read_eps()
        self._check_values()
        self._check_width()
        self._check_gradient()
        mode = self._casting_mode()
        ways = self._ways(mode)
        shell = self.shell
        if shell.dtype is not None and (None, shell.dtype, shell.dtype if self.weight else None) not in ways:
            raise Refused(f"in {str(shell.dtype).removeprefix('torch.')} it rounds where no casting mode does")
        return Recipe(
            argument=shell.argument,
            weight=self.weight,
            eps_name=self.eps_name,
            eps=None if self.eps_name else self.eps,
            offset=self.offset,
            casting_mode=mode,
            normalized_shape=shell.given_shape if self.weight is None else None,
            ways=ways,
            fixed=self._fixed(),
        )

    # --- draws ---

    def x(self, *scales: float, dtype: torch.dtype = torch.float32, ndim: int = 3, width: int | None = None) -> Tensor:
        """Rows at each of the scales, of full precision, so that a forward that rounds x first shows."""
        shape = self.shell.shape if width is None else (width,)
        rows = -(-_ELEMENTS // self.shell.width)
        drawn = self.signed(0.25, 4.0, len(scales), rows, *shape)
        drawn *= torch.tensor(scales, dtype=torch.float64, device="cpu").view(-1, 1, *(1,) * len(shape))
        leading = {2: (-1,), 3: drawn.shape[:2], 4: (1, len(scales), rows)}[ndim]
        return drawn.to(dtype).view(*leading, *shape).to(self.shell.device)

    def drawn_weight(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if self.shell.tensor is None:
            return None
        return self.signed(1.25, 2.25, *self.shell.shape).to(dtype).to(self.shell.device)

    def signed(self, least: float, most: float, *shape: int) -> Tensor:
        """Numbers of either sign, in float64 on the CPU."""
        options = {"generator": self.generator, "dtype": torch.float64, "device": "cpu"}
        size = torch.rand(shape, **options) * (most - least) + least
        return size.copysign(torch.rand(shape, **options) - 0.5)

    def dims(self) -> tuple[int, ...]:
        return tuple(range(-self.shell.ndim, 0))

    # --- the formula ---

    def _read_weight(self) -> None:
        """Whether y depends on the tensor that the module holds, and what is added to it."""
        if self.shell.tensor is None:
            return
        x, weight = self.x(1.0, 8.0), self.drawn_weight()
        assert weight is not None
        first, second = self.shell(x, weight).double(), self.shell(x, weight + 1).double()
        if torch.equal(first, second):
            self.weight = None
            return
        x_hat = second - first
        added = (first - weight.double() * x_hat) / x_hat
        value = added.median().item()
        if not (added - value).abs().max().item() < 1e-3:
            raise Refused(self._why_not())
        numbers = [float(number) for number in self.shell.numbers().values() if number is not None]
        near = [number for number in (0.0, 1.0, *numbers) if abs(number - value) < 1e-3]
        if not near:
            raise Refused(f"it adds about {value:.4g} to its weight, which is neither 0, 1 nor any of its attributes")
        self.offset = near[0]

    def _read_eps(self) -> None:
        """eps, and the attribute that holds it: the one that changes eps when it is changed."""
        estimate = self._estimated_eps()
        for name, number in self.shell.numbers().items():
            value = torch.finfo(torch.float32).eps if number is None else float(number)
            if abs(value - estimate) > 1e-4 * estimate:
                continue
            try:
                follows = abs(self._estimated_eps(**{name: 0.25}) - 0.25) < 1e-3
            except Refused:
                continue
            if follows:
                self.eps_name, self.eps = name, value
                return
        # A number that stands in the code: the shortest decimal there is near it. It is held to the bit afterwards.
        decimals = (float(f"{estimate:.{digits}g}") for digits in range(1, 7))
        self.eps = next((value for value in decimals if abs(value - estimate) <= 3e-6 * estimate), estimate)

    def _estimated_eps(self, **attributes: float) -> float:
        x, weight = self.x(_TINY), self.drawn_weight()
        y = self.shell(x, weight, **attributes).double()
        scale = 1.0 if self.weight is None or weight is None else weight.double() + self.offset
        rstd = (y / (x.double() * scale)).mean().item()
        squares = x.double().square().mean().item()
        if not 0 < rstd < float("inf"):
            raise Refused(self._why_not())
        estimate = rstd**-2 - squares
        return estimate if estimate > 0.5 * squares else 0.0

    def eps_in(self, dtype: torch.dtype) -> float:
        """eps for an x of this dtype: an eps of None is the accumulation dtype's own."""
        if self.eps_name and getattr(self.shell.module, self.eps_name) is None:
            return torch.finfo(accumulation_dtype(dtype)).eps
        return self.eps

    def scales(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Row scales: where eps does not count, where it is all that counts, and where it is as large as the mean."""
        middle = max(2.0**-10, min(1.0, self.eps**0.5)) if dtype is torch.float16 else self.eps**0.5
        middle = torch.tensor(middle).log2().round().exp2().item() if middle else 2.0**-8
        return (1.0, 8.0, middle) if dtype is torch.float16 else (1.0, 8.0, middle, _TINY)

    def admits(self, y: Tensor, x: Tensor, weight: Tensor | None, mode: str = "llama", way: str = FUSED) -> bool:
        used = weight if self.weight else None
        eps = self.eps_in(y.dtype if way == RAISED else x.dtype)
        return admits(y, x, used, eps, self.offset, mode, self.shell.ndim, way)

    def _check_values(self) -> None:
        """y to the last bits of float32, in training and in evaluation, and for an x of other ranks."""
        scales, weight = self.scales(torch.float32), self.drawn_weight()
        for training in (True, False):
            x = self.x(*scales)
            if not self.admits(self.shell(x, weight, training=training), x, weight):
                raise Refused(self._why_not())
        any_width = self.shell.tensor is None and self.shell.given_shape is None
        for ndim in (2, 4):
            x = self.x(*scales, ndim=ndim, width=80 if any_width else None)
            if not self.admits(self.shell(x, weight), x, weight):
                raise Refused(f"for an x of {x.ndim} dims it computes something other")

    def _check_width(self) -> None:
        """That the weight scales whole rows, and no broadcast of it."""
        weight = self.drawn_weight()
        if not self.weight or weight is None:
            return
        x = self.x(1.0)
        for dim in self.dims():
            try:
                self.shell(torch.cat([x, x], dim), weight)
            except Refused:
                continue
            raise Refused(f"its {self.weight} of shape {self.shell.shape} scales wider rows too: parts of them, or any")

    def _fixed(self) -> tuple[tuple[str, Any], ...]:
        """The attributes beside eps that y changes with: numbers, and what is on or off."""
        x, weight = self.x(1.0, max(_TINY, self.eps**0.5)), self.drawn_weight()
        y, found = self.shell(x, weight), []
        for name, value in self.shell.attributes().items():
            if name == self.eps_name or not isinstance(value, (int, float)):
                continue
            other = not value if isinstance(value, bool) else value + 1
            try:
                follows = not torch.equal(self.shell(x, weight, **{name: other}), y)
            except Refused:
                follows = True
            if follows:
                found.append((name, value))
        return tuple(found)

    def _check_gradient(self) -> None:
        x, weight = self.x(*self.scales(torch.float32)[:3]), self.drawn_weight()
        dy = self.signed(0.1, 1.0, *x.shape).to(x)
        wanted = [tensor.requires_grad_() for tensor in ((x, weight) if self.weight else (x,)) if tensor is not None]
        y = self.shell(x, weight)
        if not y.requires_grad:
            raise Refused("its forward gives no gradient")
        found = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        used = weight.detach().double() if self.weight and weight is not None else None
        exact = x.detach().double()
        dx, dw = reference_backward(dy.double(), exact, used, self.eps, self.offset, self.shell.ndim)
        rstd = reference_rstd(exact, self.eps, self.shell.ndim)
        size = dy.double().abs() if used is None else (dy.double() * (used + self.offset)).abs()
        bounds = [size.amax(self.dims(), keepdim=True) * rstd, (dy.double() * exact * rstd).abs().sum((0, 1))]
        for name, gradient, expected, bound in zip(("x", self.weight), found, (dx, dw), bounds, strict=False):
            assert expected is not None
            if gradient is None or not bool(((gradient.double() - expected).abs() <= 1e-4 * bound).all()):
                raise Refused(f"the gradient of its {name} is not that of {_FORMULA}")

    def _why_not(self) -> str:
        x, weight = self.x(1.0, 8.0), self.drawn_weight()
        y = self.shell(x, weight)
        if torch.allclose(self.shell(x + 4, weight), y, rtol=1e-3, atol=1e-4):
            return "it subtracts the mean: that is a LayerNorm"
        return f"it does not compute {_FORMULA}"

    # --- where it rounds ---

    def _casting_mode(self) -> str:
        """The mode that every draw admits. With few weights two modes may agree by chance: so as many draws more."""
        dtype = torch.bfloat16
        left = list(CASTING_MODES)
        for _ in range(max(2, 64 // self.shell.width)):
            x, weight = self.x(*self.scales(dtype), dtype=dtype), self.drawn_weight(dtype)
            y = self.shell(x, weight)
            left = [mode for mode in left if self.admits(y, x, weight, mode)]
        if not left:
            raise Refused("in bfloat16 it rounds where none of the casting modes does")
        return left[0]

    def _ways(self, mode: str) -> dict[Situation, tuple[str, torch.dtype]]:
        """For each pair of dtypes, with and without autocast, the way that gives the module's own y."""
        found: dict[Situation, tuple[str, torch.dtype]] = {}
        kinds = {self.shell.device.type: self.shell.device}
        if (other := accelerator()) is not None:
            kinds.setdefault(other.type, other)
        for autocast, device in ((None, self.shell.device), *kinds.items()):
            for x_dtype in DTYPES:
                for w_dtype in DTYPES if self.shell.tensor else (None,):
                    if w_dtype is not None and (x_dtype is torch.float64) != (w_dtype is torch.float64):
                        continue
                    x = self.x(*self.scales(x_dtype), dtype=x_dtype).to(device)
                    weight = None if w_dtype is None else self.drawn_weight(w_dtype)
                    weight = weight if weight is None else weight.to(device)
                    try:
                        with torch.autocast(device.type, torch.bfloat16, enabled=autocast is not None):
                            y = self.shell(x, weight)
                    except Refused:
                        continue
                    for way in (FUSED, RAISED, APART):
                        if way == APART and (self.offset or mode != "llama"):
                            continue
                        if self.admits(y, x, weight, mode, way):
                            key = (autocast, x_dtype, w_dtype if self.weight else None)
                            found[key] = (way, y.dtype)
                            break
        return found
