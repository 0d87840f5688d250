"""Who holds what: placements and mesh sizes in, a Plan out. Pure: no tensors, no process groups.

Per mesh dim, x is replicated, row-sharded, hidden-sharded or partial, and mesh dims combine independently:

================  ==============================  ===========  ==============================  ==================
x                 forward                         y, dX        backward                        dW
================  ==============================  ===========  ==============================  ==================
replicated        nothing                         replicated   nothing                         replicated
row-sharded       nothing                         as x         nothing                         Partial(sum)
hidden-sharded    all-reduce of Σx²: one number   as x         all-reduce of Σ dY·(w+offset)·x̂  Shard along w
                  a row
partial           reduced, or reduce-scattered    as resolved  that of the resolved layout     as resolved
================  ==============================  ===========  ==============================  ==================

A *route* says which steps a call takes and needs no sizes, so that one route serves every batch; a *plan* is a route
with sizes put in. ``sharded.py`` carries out the route, and ``plan()`` prints the same route in bytes: one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshnorm.errors import PlacementError, UnreachableLayoutError
from meshnorm.geometry import Split, chains, shard_dim, split_factor

Placements = tuple[Placement, ...]
WeightPlacement = str | Placements | None  # None: no weight; "plain": a plain tensor; placements: a DTensor


@dataclass(frozen=True)
class Mesh:
    """A device mesh as far as layouts care.

    ``joint`` lists the sets of mesh dims, each sorted, that one process group spans: a reduction over such a set is one
    collective; over another set it is one a mesh dim.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    joint: frozenset[tuple[int, ...]] = frozenset()

    @classmethod
    def of_sizes(cls, sizes: dict[str, int]) -> Mesh:
        """The mesh of a ``{"dp": 2, "cp": 4}``, taken to be all ranks there are: one group spans all of it."""
        everything = tuple(dim for dim, size in enumerate(sizes.values()) if size > 1)
        return cls(tuple(sizes), tuple(sizes.values()), frozenset({everything}))

    def groups(self, dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The sets of mesh dims over which a reduction over ``dims`` runs, one collective each."""
        active = tuple(dim for dim in sorted(set(dims)) if self.sizes[dim] > 1)
        if len(active) <= 1 or active in self.joint:
            return (active,) if active else ()
        return tuple((dim,) for dim in active)


@dataclass(frozen=True)
class Step:
    """One collective, before sizes are known."""

    kind: str
    mesh_dims: tuple[int, ...]
    reduce_op: str = "sum"
    tensor_dim: int | None = None


@dataclass(frozen=True)
class Move:
    """How a tensor gets from one layout to another: collectives, then a local cut.

    ``have`` are the chains of each tensor dim before the collectives, ``cut`` the splits that are made after them.
    """

    steps: tuple[Step, ...]
    have: tuple[tuple[Split, ...], ...]
    cut: tuple[tuple[Split, ...], ...]

    @property
    def is_nothing(self) -> bool:
        return len(self.steps) == 0 and not any(self.cut)


@dataclass(frozen=True)
class Route:
    """What one call does, independent of sizes. See ``route_of``."""

    mesh: Mesh
    normalized_ndim: int
    x: Placements
    y: Placements
    dx: Placements
    dw: Placements | None
    weight: WeightPlacement
    weight_is_aligned: bool
    hidden_chains: tuple[tuple[Split, ...], ...]
    x_move: Move
    weight_move: Move | None
    statistic_steps: tuple[Step, ...]
    dw_steps: tuple[Step, ...]
    gathers: bool

    @property
    def splits_hidden(self) -> bool:
        """Whether a rank holds only a slice of each row while it normalizes, so that statistics are exchanged."""
        return any(self.hidden_chains) and not self.gathers

    @property
    def sums_whole_weight(self) -> bool:
        """Whether dW is summed at the weight's full size: where the weight is plain, or not placed as the route needs
        it.
        """
        return self.weight == "plain" or not self.weight_is_aligned


def belonging(name: str, what: str) -> str:
    """What belongs to x is called ``what``; to another, as in "q_weight"."""
    return what if name == "x" else f"{name}_{what}"


def normalize(placements: Sequence[Placement], ndim: int, mesh: Mesh, what: str) -> Placements:
    """Placements with dims counted from the front, checked against the mesh and the tensor's rank."""
    if len(placements) != len(mesh.sizes):
        raise PlacementError(
            f"{what} has {len(placements)} placements, but the mesh ({_mesh_words(mesh)}) has {len(mesh.sizes)} dims: "
            f"give one placement for each mesh dim"
        )
    found = []
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Placement):
            raise PlacementError(f"{what} has {placement!r} on mesh dim {mesh.names[mesh_dim]!r}: that is no Placement")
        dim = shard_dim(placement, ndim)
        if dim is None:
            found.append(placement)
            continue
        if not 0 <= dim < ndim:
            raise PlacementError(
                f"{what} has {placement} on mesh dim {mesh.names[mesh_dim]!r}, but the tensor has {ndim} dims"
            )
        found.append(placement if getattr(placement, "dim", None) == dim else _same_split(placement, dim))
    return tuple(found)


def _same_split(placement: Placement, dim: int) -> Placement:
    """The placement, sharding tensor dim ``dim``: Shard stays Shard, _StridedShard keeps its split_factor."""
    factor = split_factor(placement)
    return Shard(dim) if factor is None else type(placement)(dim, split_factor=factor)  # type: ignore[call-arg]


@lru_cache(maxsize=4096)
def route_of(
    mesh: Mesh,
    x: Placements,
    ndim: int,
    normalized_ndim: int,
    weight: WeightPlacement,
    hidden: str = "stats",
    weight_grad: str = "auto",
    output_placements: Placements | None = None,
    weight_requires_grad: bool = True,
    name: str = "x",
) -> Route:
    """The route of a norm over the last ``normalized_ndim`` of ``ndim`` dims of an x with placements ``x``.

    All placements have their dims counted from the front (``normalize``). Raises UnreachableLayoutError where
    ``output_placements`` differs from what the layout table gives, other than in how a partial x is reduced.
    """
    rows_ndim = ndim - normalized_ndim
    asking = f"{belonging(name, 'output_placements')} asks for"
    resolved = resolve_partial(mesh, x, ndim, output_placements, asking, name)
    kinds = [_kind(mesh, resolved, dim, rows_ndim, ndim) for dim in range(len(resolved))]
    row_dims = tuple(dim for dim, kind in enumerate(kinds) if kind == "row")
    hidden_dims = tuple(dim for dim, kind in enumerate(kinds) if kind == "hidden")
    gathers = hidden == "gather"

    y = resolved
    hidden_chains = chains(resolved, mesh.sizes, ndim)[rows_ndim:]
    if gathers:
        y = tuple(Replicate() if (d := shard_dim(p, ndim)) is not None and d >= rows_ndim else p for p in resolved)
    check_output(mesh, x, y, output_placements, ndim, rows_ndim, gathers, name)

    statistic_steps: tuple[Step, ...] = ()
    if not gathers:
        statistic_steps = tuple(Step("all_reduce", dims) for dims in mesh.groups(hidden_dims))

    wanted = tuple(() for _ in hidden_chains) if gathers else hidden_chains
    aligned, weight_move = _weight_route(mesh, weight, wanted)
    dw, dw_steps = None, ()
    if weight is not None and weight_requires_grad:
        split = [] if gathers else list(hidden_dims)
        deferred = weight_grad == "deferred" or (weight_grad == "auto" and weight != "plain")
        if weight == "plain":
            dw = tuple(Replicate() for _ in mesh.sizes)
            dw_steps = () if deferred else _dw_sum(mesh, (*row_dims, *split))
        elif aligned:
            dw = tuple(
                _same_split(p, shard_dim(p, ndim) - rows_ndim)  # type: ignore[operator]
                if dim in split
                else (Partial("sum") if dim in row_dims and deferred else Replicate())
                for dim, p in enumerate(resolved)
            )
            dw_steps = () if deferred else _dw_sum(mesh, row_dims)
        else:
            dw = tuple(p if shard_dim(p, normalized_ndim) is not None else Replicate() for p in weight)  # type: ignore[union-attr]
            dw_steps = _dw_sum(mesh, (*row_dims, *split))

    return Route(
        mesh=mesh,
        normalized_ndim=normalized_ndim,
        x=x,
        y=y,
        dx=resolved,
        dw=dw,
        weight=weight,
        weight_is_aligned=aligned,
        hidden_chains=hidden_chains,
        x_move=move(mesh, x, y, ndim),
        weight_move=weight_move,
        statistic_steps=statistic_steps,
        dw_steps=dw_steps,
        gathers=gathers and bool(hidden_dims),
    )


def _dw_sum(mesh: Mesh, dims: Sequence[int]) -> tuple[Step, ...]:
    return tuple(Step("all_reduce", group) for group in mesh.groups(dims))


def _kind(mesh: Mesh, placements: Placements, mesh_dim: int, rows_ndim: int, ndim: int) -> str:
    """ "row", "hidden" or "replicated": what a mesh dim shards, partials being resolved; size 1 shards nothing."""
    dim = shard_dim(placements[mesh_dim], ndim)
    if dim is None or mesh.sizes[mesh_dim] == 1:
        return "replicated"
    return "row" if dim < rows_ndim else "hidden"


def move(mesh: Mesh, have: Placements, want: Placements, ndim: int) -> Move:
    """How a tensor of ``ndim`` dims gets from placements ``have`` to ``want``, which has no partial dim.

    Partial mesh dims are reduced first: by a reduce-scatter where ``want`` shards there and everything that splits the
    same tensor dim earlier is in place already, else by an all-reduce. Then, for each tensor dim, the splits that
    ``have`` and ``want`` share are kept, the others gathered, last first, and what ``want`` splits further is cut
    locally.
    """
    return _move(mesh, have, chains(want, mesh.sizes, ndim))


@lru_cache(maxsize=4096)
def _move(mesh: Mesh, have: Placements, want: tuple[tuple[Split, ...], ...]) -> Move:
    ndim = len(want)
    before = chains(have, mesh.sizes, ndim)
    current = [list(chain) for chain in before]
    steps = []
    for dim, placement in enumerate(have):
        if not placement.is_partial() or mesh.sizes[dim] == 1:
            continue
        op = getattr(placement, "reduce_op", "sum")
        split = Split(dim)
        onto = next(
            (d for d, chain in enumerate(want) if split in chain and list(chain[: chain.index(split)]) == current[d]),
            None,
        )
        if onto is None:
            steps.append(Step("all_reduce", (dim,), op))
        else:
            steps.append(Step("reduce_scatter", (dim,), op, onto))
            current[onto].append(split)
    kept = []
    for d, (chain, wanted) in enumerate(zip(current, want, strict=True)):
        shared = 0
        while shared < min(len(chain), len(wanted)) and chain[shared] == wanted[shared]:
            shared += 1
        for split in reversed(chain[shared:]):
            steps.append(Step("all_gather", (split.mesh_dim,), tensor_dim=d))
        kept.append(tuple(chain[:shared]))
    cut = tuple(wanted[len(shared) :] for shared, wanted in zip(kept, want, strict=True))
    return Move(tuple(steps), before, cut)


def resolve_partial(
    mesh: Mesh,
    x: Placements,
    ndim: int,
    output: Placements | None,
    asking: str = "output_placements asks for",
    who: str = "x",
) -> Placements:
    """x's placements once its partial mesh dims are reduced, as ``output`` asks where it can be followed. ``asking``
    and ``who`` are the words of a refusal: who asks, and what is partial."""
    resolved = list(x)
    for dim, placement in enumerate(x):
        if not placement.is_partial():
            continue
        wanted = Replicate() if output is None else output[dim]
        onto = shard_dim(wanted, ndim)
        if wanted.is_partial() or (onto is not None and split_factor(wanted) is not None):
            raise UnreachableLayoutError(
                f"{asking} {wanted} on mesh dim {mesh.names[dim]!r}, where {who} is partial: "
                f"what is partial can become Replicate() or Shard(d) there"
            )
        if onto is None:
            resolved[dim] = Replicate()
            continue
        later = [d for d in range(dim + 1, len(x)) if shard_dim(x[d], ndim) == onto and mesh.sizes[d] > 1]
        if mesh.sizes[dim] > 1 and later:
            raise UnreachableLayoutError(
                f"{asking} {wanted} on mesh dim {mesh.names[dim]!r}, but the later mesh dim "
                f"{mesh.names[later[0]]!r} shards the same tensor dim already, and shards are cut in mesh order: "
                f"ask for Replicate() or another dim, or redistribute {who} first"
            )
        resolved[dim] = Shard(onto)
    return tuple(resolved)


def check_output(
    mesh: Mesh,
    x: Placements,
    y: Placements,
    output: Placements | None,
    ndim: int,
    rows_ndim: int,
    gathers: bool,
    name: str = "x",
) -> None:
    if output is None:
        return
    for dim, (wanted, given) in enumerate(zip(output, y, strict=True)):
        if wanted == given:
            continue
        held = shard_dim(x[dim], ndim)
        way_out = f"leave it as {name} is and redistribute y"
        if held is not None and held >= rows_ndim and not gathers and name == "x":
            way_out = 'pass hidden="gather" for a replicated y, or leave it as x is'
        elif gathers:
            way_out = 'hidden="gather" gives Replicate() there'
        raise UnreachableLayoutError(
            f"{belonging(name, 'output_placements')} asks for {wanted} on mesh dim {mesh.names[dim]!r}, but {name} is "
            f"{x[dim]} there and the "
            f"norm keeps its layout, which gives {given}: {way_out}"
        )


def _weight_route(
    mesh: Mesh, weight: WeightPlacement, wanted: tuple[tuple[Split, ...], ...]
) -> tuple[bool, Move | None]:
    """(whether a DTensor weight can be used without communication, how it gets to the layout that the rows need)."""
    if weight is None:
        return True, None
    if isinstance(weight, str):
        return False, _move(mesh, (Replicate(),) * len(mesh.sizes), wanted)
    found = _move(mesh, weight, wanted)
    return len(found.steps) == 0, found


def _mesh_words(mesh: Mesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
