"""Who holds what of q and k, and what they exchange together. Pure, as ``layout``.

Each takes the route of its own norm. What they share is the all-reduce of their rows' numbers: where one process group
serves both, q's numbers and k's are one message.

On a mesh dim that shards q's normalized dims k may be replicated, because there are more ranks than key heads: its
ranks hold the same numbers there. In an all-reduce over a group that spans this mesh dim too, the first of them alone
contributes k's, the others zeros; so all get what an all-reduce over the other mesh dims gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshnorm.layout import Mesh, Route


@dataclass(frozen=True)
class Exchange:
    """One all-reduce of one number a row, of q, of k, or of both. ``q_once``, ``k_once``: the mesh dims of those it
    runs over on which that tensor is replicated."""

    mesh_dims: tuple[int, ...]
    has_q: bool
    has_k: bool
    q_once: tuple[int, ...] = ()
    k_once: tuple[int, ...] = ()

    @property
    def is_of_all(self) -> bool:
        """Whether every rank contributes all it has, of q and of k."""
        return self.has_q and self.has_k and not self.q_once and not self.k_once


@lru_cache(maxsize=4096)
def exchanges_of(mesh: Mesh, q: Route | None, k: Route | None) -> tuple[Exchange, ...]:
    """The all-reduces of the numbers of q and k, or of the one whose route is given, in the order in which they run."""
    dims = _hidden_dims(q), _hidden_dims(k)
    if all(dims):
        steps = mesh.groups(sorted(dims[0] | dims[1]))
        once = [tuple(tuple(sorted(set(step) - mine)) for step in steps) for mine in dims]
        parts = [tuple(bool(mine & set(step)) for step in steps) for mine in dims]
        alike = all(
            not takes_part or all(route is not None and route.y[dim].is_replicate() for dim in missing)
            for route, taking, missed in zip((q, k), parts, once, strict=True)
            for takes_part, missing in zip(taking, missed, strict=True)
        )
        if alike:
            return tuple(
                Exchange(step, has_q, has_k, q_once if has_q else (), k_once if has_k else ())
                for step, has_q, has_k, q_once, k_once in zip(steps, *parts, *once, strict=True)
            )
    own = [mesh.groups(sorted(mine)) for mine in dims]
    found = [Exchange(step, True, step in own[1]) for step in own[0]]
    return *found, *(Exchange(step, False, True) for step in own[1] if step not in own[0])


def _hidden_dims(route: Route | None) -> set[int]:
    if route is None:
        return set()
    return {split.mesh_dim for chain in route.hidden_chains for split in chain}
