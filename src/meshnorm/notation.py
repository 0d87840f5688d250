"""Placements and meshes as short text: "S(0),R,P(avg)" and "dp=2,cp=4"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,  # its only name; FSDP2 with tensor parallelism makes them, so they have to be writable
)

from meshnorm.errors import PlacementError
from meshnorm.geometry import split_factor

REDUCTIONS = ("sum", "avg", "max", "min", "product")
_PATTERN = re.compile(r"(R|P|S|SS)(?:\(\s*([^()]*?)\s*\))?")


def parse_placement(text: str) -> Placement:
    """One placement: ``R``, ``S(dim)``, ``P`` or ``P(op)``, ``SS(dim, split_factor)`` for _StridedShard."""
    match = _PATTERN.fullmatch(text.strip())
    kind, inside = match.groups() if match else (None, None)
    try:
        if kind == "R" and inside is None:
            return Replicate()
        if kind == "P" and (inside or "sum") in REDUCTIONS:
            return Partial(inside or "sum")
        if kind == "S" and inside:
            return Shard(int(inside))
        if kind == "SS" and inside:
            dim, factor = map(int, inside.split(","))
            if factor >= 1:
                return _StridedShard(dim, split_factor=factor)
    except ValueError:
        pass
    raise PlacementError(
        f"{text!r} is no placement: write R, S(dim), P, P(op) or SS(dim, split_factor), as in 'S(0),S(1)' for two dims"
    )


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Placements separated by commas, one for each mesh dim."""
    return tuple(parse_placement(part) for part in re.split(r",(?![^()]*\))", text))


def placement_text(placements: Sequence[Placement]) -> str:
    """The text that ``parse_placements`` reads back."""
    return ",".join(map(_one, placements))


def _one(placement: Placement) -> str:
    dim = getattr(placement, "dim", None)
    if dim is not None:
        factor = split_factor(placement)
        return f"S({dim})" if factor is None else f"SS({dim},{factor})"
    if placement.is_partial():
        op = getattr(placement, "reduce_op", "sum")
        return "P" if op == "sum" else f"P({op})"
    return "R"


def parse_mesh(text: str) -> dict[str, int]:
    """ "dp=2,cp=4" as ``{"dp": 2, "cp": 4}``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not name.strip() or not size.strip().isdigit() or int(size) < 1 or name.strip() in sizes:
            raise PlacementError(f"{text!r} is no mesh: write its dims as name=size, each name once, as in dp=2,cp=4")
        sizes[name.strip()] = int(size)
    return sizes
