"""What ``convert`` did: which norms it swapped and as what, which it left, and why."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from meshnorm.converting.converted import unswap


@dataclass(frozen=True)
class Swapped:
    """A norm that meshnorm computes now (or would, after a dry run). ``name`` is as in ``model.named_modules()``."""

    name: str
    class_name: str
    casting_mode: str
    offset: float
    eps: float | None
    shape: tuple[int, ...] | None  # of the weight; None for a norm that takes any width


@dataclass(frozen=True)
class Left:
    """A norm that computes as it did, and the reason."""

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What became of the norms of a model. ``print`` it; ``revert()`` undoes it."""

    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]
    dry_run: bool
    modules: Sequence[weakref.ref[nn.Module]] = field(repr=False, compare=False, default=())

    def revert(self) -> None:
        """Gives the norms that this conversion swapped their own forward again."""
        for reference in self.modules:
            module = reference()
            if module is not None:
                unswap(module)

    def __str__(self) -> str:
        verb = "would be swapped" if self.dry_run else "swapped"
        lines = [f"{_norms(len(self.swapped))} {verb}, {len(self.left)} left"]
        kinds: dict[str, list[str]] = {}
        for entry in self.swapped:
            shape = "any width" if entry.shape is None else ", ".join(map(str, entry.shape))
            words = f"{entry.class_name}({shape}): casting_mode={entry.casting_mode!r}"
            words += f", offset={entry.offset:g}" if entry.offset else ""
            kinds.setdefault(f"{words}, eps={entry.eps}", []).append(entry.name)
        lines += [f"  {len(names):>3} × {kind}  {_listed(names)}" for kind, names in kinds.items()]
        reasons: dict[str, list[str]] = {}
        for entry in self.left:
            reasons.setdefault(f"{entry.class_name}, left: {entry.reason}", []).append(entry.name)
        lines += [f"  {len(names):>3} × {reason}  {_listed(names)}" for reason, names in reasons.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _norms(count: int) -> str:
    return f"{count} norm{'' if count == 1 else 's'}"


def _listed(names: list[str]) -> str:
    names = [name or "the model itself" for name in names]
    return f"[{', '.join(names)}]" if len(names) <= 3 else f"[{names[0]}, {names[1]}, …, {names[-1]}]"
