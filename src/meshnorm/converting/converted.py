"""A converted module: an instance of its own class still, with another forward.

The class of the instance is replaced by a subclass of it that is made here, once for each class, under the same name.
What that keeps, and another way would lose:

- ``isinstance``, ``super()``, class attributes, class-name checks (weight initialization, sharding policies), because
  the module's class is a base of the new one. A new module in its place would lose all of it, and hooks and shared
  Parameter objects besides.
- ``copy.deepcopy``, ``pickle`` and ``torch.save``, because a class can say how its instances are rebuilt. A ``forward``
  bound to the instance cannot be pickled: what comes back has the class's forward again, silently.
- FSDP2's ``fully_shard``, which makes a subclass of the module's class in its turn, whichever of the two comes first.
- ``torch.compile``, which guards on the class and reads the recipe as constants. A ``forward`` bound to the instance
  would also be in the way of those who bind theirs later (Accelerate's hooks, kernels' ``kernelize``).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from meshnorm.checks import is_dtensor
from meshnorm.converting.promoted import scaled
from meshnorm.converting.recipe import APART, RAISED, Recipe
from meshnorm.functional import rms_norm
from meshnorm.rows import memory_order


class Converted:
    """The first base of a converted module's class, which has the other forward (``_converted_class``)."""

    _meshnorm_recipe: Recipe | None = None  # that of an instance; one that is made as type(norm)(...) is not converted
    _meshnorm_original: type[nn.Module]

    def __init_subclass__(cls, **options: Any) -> None:
        """Not the original's: a registry of classes would find ours under the same name."""

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        if self._meshnorm_recipe is None:
            return text
        ours = f"meshnorm: {described(self._meshnorm_recipe)}"
        return f"{text}, {ours}" if text else ours

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_meshnorm_original" not in type(self).__dict__:  # a subclass that someone made, such as FSDP2's
            return super().__reduce_ex__(protocol)
        getstate = getattr(self, "__getstate__", None)  # every object has one from Python 3.11 on
        return _restored, (self._meshnorm_original,), getstate() if getstate else self.__dict__.copy()


def computed(module: Any, recipe: Recipe, x: Tensor) -> Tensor | None:
    """The module's y by its recipe; None for what was not probed: its own forward knows what to do, or to say."""
    weight = None if recipe.weight is None else getattr(module, recipe.weight)
    found = recipe.way(x, weight)
    if found is None or x.layout is not torch.strided:  # a nested tensor, say
        return None
    shape = recipe.normalized_shape
    if shape is None:
        shape = tuple(x.shape[-1:]) if weight is None else tuple(weight.shape)
    if x.shape[-len(shape) :] != shape or any(getattr(module, name) != value for name, value in recipe.fixed):
        return None
    order = None if is_dtensor(x) else memory_order(x, len(shape))
    if order is not None:  # rows may be taken in any order: in that in which they lie, none is copied
        x = x.permute(order)
    way, dtype = found
    x = x.to(dtype) if way == RAISED else x
    y = rms_norm(
        x,
        None if way == APART else weight,
        recipe.eps if recipe.eps_name is None else getattr(module, recipe.eps_name),
        offset=recipe.offset,
        casting_mode=recipe.casting_mode,
        normalized_shape=shape,
        hidden=recipe.hidden,
        weight_grad=recipe.weight_grad,
    )
    if way == APART and weight is not None:
        y = scaled(y, weight, recipe.weight_grad)
    return y if order is None else y.permute(tuple(map(order.index, range(x.ndim))))


def described(recipe: Recipe) -> str:
    """The recipe in the terms of ``meshnorm.rms_norm``."""
    words = f"casting_mode={recipe.casting_mode!r}"
    if recipe.offset:
        words += f", offset={recipe.offset:g}"
    if recipe.hidden != "stats":
        words += f", hidden={recipe.hidden!r}"
    if recipe.weight_grad != "auto":
        words += f", weight_grad={recipe.weight_grad!r}"
    return words


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _converted_class(original: type[nn.Module]) -> type[nn.Module]:
    if original in _classes:
        return _classes[original]

    # Wrapped, so that those who ask for the signature of forward (torchtitan's shardings) see the class's own.
    @wraps(original.forward)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        recipe: Recipe | None = self._meshnorm_recipe
        if recipe is not None and len(args) + len(named) == 1:
            x = args[0] if args else named.get(recipe.argument)
            if isinstance(x, Tensor):
                y = computed(self, recipe, x)
                if y is not None:
                    return y
        return super(made, self).forward(*args, **named)  # type: ignore[misc]

    names = {
        "forward": forward,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_meshnorm_original": original,
    }
    made = type(original.__name__, (Converted, original), names)
    _classes[original] = made
    return made


def _restored(original: type[nn.Module]) -> nn.Module:
    """An empty instance, for pickle and copy, which then set its state."""
    module = original.__new__(original)
    module.__class__ = _converted_class(original)
    return module


def is_converted(module: nn.Module) -> bool:
    return isinstance(module, Converted) and module._meshnorm_recipe is not None


def swap(module: nn.Module, recipe: Recipe) -> None:
    """Gives the module its other forward."""
    if not isinstance(module, Converted):
        module.__class__ = _converted_class(type(module))
    module.__dict__["_meshnorm_recipe"] = recipe


def unswap(module: nn.Module) -> bool:
    """Gives a converted module its own forward again; whether it was converted."""
    if not is_converted(module):
        return False
    module.__class__ = _without(type(module))
    del module.__dict__["_meshnorm_recipe"]
    return True


def _without(kind: type) -> type:
    """The class with the converted one taken out: itself where it is one, else a subclass of it, rebuilt."""
    if "_meshnorm_original" in kind.__dict__:
        return kind.__dict__["_meshnorm_original"]
    if not issubclass(kind, Converted):
        return kind
    bases = tuple(_without(base) for base in kind.__bases__)
    names = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, names)  # type: ignore[call-arg]
