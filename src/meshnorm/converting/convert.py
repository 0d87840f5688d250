"""The walk over a model: each norm is recognised, probed once for its kind, and swapped or left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from meshnorm.checks import HIDDEN, WEIGHT_GRADS
from meshnorm.converting.converted import is_converted, swap, unswap
from meshnorm.converting.probe import recipe_of
from meshnorm.converting.recipe import Recipe
from meshnorm.converting.report import Left, Report, Swapped
from meshnorm.converting.shell import Refused, signature
from meshnorm.errors import OptionError
from meshnorm.module import RMSNorm


def convert(
    model: nn.Module,
    *,
    dry_run: bool = False,
    where: Callable[[str, nn.Module], bool] | None = None,
    hidden: str = "stats",
    weight_grad: str = "auto",
) -> Report:
    """Has meshnorm compute every RMSNorm of a model.

    A norm is recognised by what it computes: its own forward is run once for each kind of norm, on small random tensors
    of each dtype, and meshnorm takes its place if it gives the same values, rounded at the same places, with the same
    gradient. Any other norm is left as it is, with the reason. Where dtypes meet that the probe found no match for, a
    converted module runs its own forward.

    The modules stay: the same objects, parameters (sharded ones too), hooks, names and state-dict keys, instances of
    their own class. They can be copied, pickled, wrapped by ``fully_shard`` and compiled. A model whose parameters are
    on the meta device can be converted. To be called before whatever replaces a module's forward on the instance
    (Accelerate's device hooks, kernel replacements), and on every rank alike.

    Args:
        model: any module; a norm itself too.
        dry_run: only report.
        where: takes the name and the module of a norm; norms for which it is false are left.
        hidden, weight_grad: as in ``meshnorm.rms_norm``, for all of them.

    Returns:
        A report: ``swapped``, ``left`` and ``revert()``; printed, it lists both by kind.

    Raises:
        OptionError: ``hidden`` or ``weight_grad`` has a value that does not exist.
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    if hidden not in HIDDEN:
        raise OptionError(f"hidden is {hidden!r}: choose one of {', '.join(map(repr, HIDDEN))}")
    if weight_grad not in WEIGHT_GRADS:
        raise OptionError(f"weight_grad is {weight_grad!r}: choose one of {', '.join(map(repr, WEIGHT_GRADS))}")
    swapped: list[Swapped] = []
    left: list[Left] = []
    modules: list[weakref.ref[nn.Module]] = []
    known: dict[tuple[Any, ...], Recipe | Refused] = {}
    for name, module in list(model.named_modules()):
        if not _is_norm(module):
            continue
        class_name = type(module).__name__
        found = _judged(name, module, where, known)
        if isinstance(found, Refused):
            left.append(Left(name, class_name, str(found)))
            continue
        eps = found.eps if found.eps_name is None else getattr(module, found.eps_name)
        weight = None if found.weight is None else getattr(module, found.weight)
        shape = found.normalized_shape if weight is None else tuple(weight.shape)
        swapped.append(Swapped(name, class_name, found.casting_mode, found.offset, eps, shape))
        if not dry_run:
            swap(module, replace(found, hidden=hidden, weight_grad=weight_grad))
            modules.append(weakref.ref(module))
    return Report(tuple(swapped), tuple(left), dry_run, tuple(modules))


def revert(model: nn.Module) -> tuple[str, ...]:
    """Gives every converted norm of a model its own forward again; the names of those that were converted."""
    return tuple(name for name, module in list(model.named_modules()) if unswap(module))


def _is_norm(module: nn.Module) -> bool:
    """A module without submodules whose class, or a base of it, is called a norm. Wrappers hold submodules."""
    if module._modules.keys() - {"parametrizations"}:
        return False
    return any("norm" in kind.__name__.lower() for kind in type(module).__mro__)


def _judged(
    name: str,
    module: nn.Module,
    where: Callable[[str, nn.Module], bool] | None,
    known: dict[tuple[Any, ...], Recipe | Refused],
) -> Recipe | Refused:
    if isinstance(module, RMSNorm) or type(module).__module__.partition(".")[0] == "meshnorm":
        return Refused("it is meshnorm's already")
    if is_converted(module):
        return Refused("it is converted already")
    if where is not None and not where(name, module):
        return Refused("where() excludes it")
    key = signature(module)
    if key not in known:
        try:
            known[key] = recipe_of(module)
        except Refused as refused:
            known[key] = refused.with_traceback(None)
    return known[key]
