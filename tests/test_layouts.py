"""Every layout, forward and backward, on real ranks: against float64, and the collectives against the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnorm.checking.case import Case, Outcome, run_case
from meshnorm.checking.ranks import RankPool
from meshnorm.errors import UnreachableLayoutError
from meshnorm.layout import Mesh, normalize, route_of
from meshnorm.notation import parse_placements

MODES = [("llama", 0.0), ("gemma", 1.0)]
Ranks = Callable[[int], RankPool]


def expect_right(pool: RankPool, case: Case) -> list[Outcome]:
    outcomes = pool.run(run_case, case)
    faults = [f"rank {rank}: {fault}" for rank, outcome in enumerate(outcomes) for fault in outcome.faults]
    assert not faults, f"{case}\n" + "\n".join(faults)
    return outcomes


# --- the shapes the feature was first asked for ---

ASKED_FOR = [(2, 2, 8, 16), (4, 2, 16, 32), (2, 3, 6, 17)]


@pytest.mark.parametrize("weight", ["", "plain"])
@pytest.mark.parametrize(("casting_mode", "offset"), MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "batch", "sequence", "hidden"), ASKED_FOR)
def test_context_parallel_equals_unsharded(
    ranks: Ranks, world, batch, sequence, hidden, dtype, casting_mode, offset, weight
):
    case = Case(
        (("cp", world),),
        (batch, sequence, hidden),
        x="S(1)",
        dy="S(1)",
        dtype=dtype,
        casting_mode=casting_mode,
        offset=offset,
        weight=weight,
        seed=sequence,
    )
    outcomes = expect_right(ranks(world), case)
    assert all(not [c for c in outcome.seen if weight == ""] for outcome in outcomes)


@pytest.mark.parametrize(("casting_mode", "offset"), MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 16), (2, 16, 32), (3, 6, 17)])
@pytest.mark.parametrize(("names", "x"), [(("dp", "cp"), "S(0),S(1)"), (("cp", "tp"), "S(1),S(2)")])
def test_batch_by_sequence_and_sequence_by_hidden(pool4: RankPool, names, x, shape, dtype, casting_mode, offset):
    for weight in ("", "plain", "none"):
        mesh = ((names[0], 2), (names[1], 2))
        expect_right(pool4, Case(mesh, shape, x, weight, dtype=dtype, casting_mode=casting_mode, offset=offset))


# --- the contract table and its products ---


def _products(
    mesh: tuple[tuple[str, int], ...], shape: tuple[int, ...], each: list[str], weights: list[str]
) -> list[Case]:
    found = []
    for placements in itertools.product(each, repeat=len(mesh)):
        for weight in weights:
            modes = MODES[len(found) % 2]
            dtype = (torch.float32, torch.bfloat16, torch.float64, torch.float16)[len(found) % 4]
            x = ",".join(placements)
            found.append(
                Case(mesh, shape, x, weight, dtype=dtype, casting_mode=modes[0], offset=modes[1], seed=len(found))
            )
    return found


ROWS_HIDDEN = ["R", "S(0)", "S(1)", "S(-1)", "P"]


@pytest.mark.parametrize(
    "mesh",
    [
        (("cp", 2),),
        (("tp", 4),),
        (("dp", 2), ("tp", 2)),
        (("one", 1), ("tp", 4)),
        (("dp", 2), ("one", 1)),
        (("dp", 2), ("cp", 2), ("tp", 2)),
        (("dp", 1), ("cp", 4), ("tp", 2)),
    ],
    ids=lambda mesh: "x".join(str(size) for _, size in mesh),
)
def test_every_row_of_the_table_and_every_product(ranks: Ranks, mesh):
    world = 1
    for _, size in mesh:
        world *= size
    weights = ["", "plain", "none"] if len(mesh) < 3 else ["", "plain"]
    for case in _products(mesh, (3, 5, 18), ROWS_HIDDEN, weights):
        expect_right(ranks(world), case)
        if "S(-1)" in case.x and len(mesh) < 3:
            expect_right(ranks(world), replace(case, hidden="gather"))


MESH = (("cp", 2), ("tp", 2))
LAYOUTS = [
    "S(0),S(1)",
    "S(1),S(2)",
    "S(2),S(2)",
    "R,S(2)",
    "S(1),R",
    "P,S(1)",
    "P,S(2)",
    "SS(1,2),S(1)",
    "SS(2,2),S(2)",
]
VARIANTS = {
    "deferred": {"weight_grad": "deferred"},
    "reduced": {"weight_grad": "reduced"},
    "gather": {"hidden": "gather"},
    "frozen x": {"x_requires_grad": False},
    "frozen weight": {"weight_requires_grad": False},
    "in place": {"in_place": True},
    "dY replicated": {"dy": "R,R"},
    "dY partial": {"dy": "P,P"},
    "dY avg": {"dy": "P(avg),R"},
    "dY elsewhere": {"dy": "S(2),S(0)"},
    "everything frozen": {"x_requires_grad": False, "weight_requires_grad": False},
}
WEIGHTS = ["", "plain", "none", "S(0),R", "R,S(0)", "S(0),S(0)", "P,R", "R,P(avg)", "P,S(0)"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("x", LAYOUTS)
def test_every_option_beside_every_weight(pool4: RankPool, x, variant):
    for seed, weight in enumerate(WEIGHTS):
        expect_right(pool4, Case(MESH, (3, 6, 8), x, weight, seed=seed, **VARIANTS[variant]))


@pytest.mark.parametrize("weight", ["", "plain", "R,S(0)"])
@pytest.mark.parametrize("x", ["S(0),S(1)", "S(1),S(2)", "S(2),R", "R,R", "SS(1,2),S(1)"])
def test_an_x_that_is_no_leaf(pool4: RankPool, x, weight):
    expect_right(pool4, Case(MESH, (3, 6, 8), x, weight, leaf=False))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize(
    ("x", "output"),
    [
        ("P({op}),R", ""),
        ("P({op}),R", "S(1),R"),
        ("P({op}),S(2)", "S(1),S(2)"),
        ("S(1),P({op})", "S(1),S(1)"),
        ("R,P({op})", "R,S(2)"),
        ("P({op}),P({op})", "S(0),S(1)"),
        ("P({op}),P({op})", "S(1),S(1)"),
    ],
)
def test_a_partial_x_is_reduced_onto_the_asked_layout(pool4: RankPool, op, x, output):
    for shape in ((4, 6, 8), (3, 5, 7)):
        for weight in ("", "plain"):
            expect_right(pool4, Case(MESH, shape, x.format(op=op), weight, output=output))


@pytest.mark.parametrize("output", ["S(2),R", "S(1),R"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_deferred_plain_weight_beside_a_partial_x(pool4: RankPool, frozen, output):
    case = Case(MESH, (3, 5, 7), "P,R", "plain", output=output, weight_grad="deferred", x_requires_grad=not frozen)
    expect_right(pool4, case)


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 1, 5), (0, 4, 6), (3, 0, 6), (1, 3, 1)])
@pytest.mark.parametrize("x", ["S(0),R", "S(1),S(1)", "S(1),S(2)", "S(2),S(2)", "P,S(0)"])
def test_ranks_without_rows_or_columns_join_in(pool4: RankPool, x, shape):
    for weight, options in (
        ("", {}),
        ("plain", {}),
        ("none", {}),
        ("", {"hidden": "gather"}),
        ("", {"weight_grad": "reduced"}),
    ):
        expect_right(pool4, Case(MESH, shape, x, weight, **options))


@pytest.mark.parametrize("x", ["S(2),R", "S(2),S(3)", "S(3),S(2)", "S(2),S(2)", "S(1),S(3)", "SS(3,2),S(3)"])
def test_two_normalized_dims(pool4: RankPool, x):
    for weight in ("", "plain", "S(0),R", "R,S(1)", "S(0),S(1)", "S(1),S(0)"):
        for options in ({}, {"hidden": "gather"}, {"weight_grad": "reduced"}):
            expect_right(pool4, Case(MESH, (2, 3, 5, 6), x, weight, normalized_ndim=2, **options))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("x", ["S(0),S(1)", "S(1),S(2)"])
def test_a_weight_of_another_dtype(pool4: RankPool, x, weight_dtype):
    for weight in ("", "plain", "R,S(0)"):
        for mode in ("llama", "gemma", "none"):
            case = Case(MESH, (3, 6, 8), x, weight, dtype=torch.bfloat16, weight_dtype=weight_dtype, casting_mode=mode)
            expect_right(pool4, case)


# --- drawn at random ---


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(
        st.sampled_from([(2,), (4,), (8,), (2, 2), (1, 4), (2, 4), (4, 2), (8, 1), (2, 2, 2), (2, 1, 4), (1, 2, 2)])
    )
    mesh = tuple((f"m{dim}", size) for dim, size in enumerate(sizes))
    rows = draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    hidden = draw(st.lists(st.integers(1, 11), min_size=1, max_size=2))
    if draw(st.booleans()):
        hidden[-1] = draw(st.integers(12, 80))
    shape = (*rows, *hidden)
    ndim = draw(st.integers(1, len(hidden)))
    if ndim == 1 and len(hidden) == 2:
        ndim = 1
    op = draw(st.sampled_from(["sum", "sum", "avg", "max", "min"]))

    def placement(allowed_dims: int, partial: str | None) -> st.SearchStrategy[str]:
        shard = st.integers(0, allowed_dims - 1)
        options = [st.just("R"), shard.map(lambda d: f"S({d})"), shard.map(lambda d: f"S({d - allowed_dims})")]
        options.append(st.builds(lambda d, f: f"SS({d},{f})", shard, st.integers(2, 3)))
        if partial:
            options.append(st.just(f"P({partial})"))
        return st.one_of(options)

    def placements(dims: int, partial: str | None) -> str:
        return ",".join(draw(placement(dims, partial)) for _ in sizes)

    x = placements(len(shape), op)
    kind = draw(st.sampled_from(["", "plain", "none", "placed"]))
    weight = kind if kind != "placed" else placements(ndim, draw(st.sampled_from(["sum", "avg"])))
    output = ""
    if "P" in x and draw(st.booleans()):
        given = parse_placements(x)
        output = ",".join(
            draw(st.sampled_from(["R", *(f"S({d})" for d in range(len(shape)))])) if p.is_partial() else text
            for p, text in zip(given, _texts(x), strict=True)
        )
    return Case(
        mesh,
        shape,
        x,
        weight=weight,
        dy=draw(st.sampled_from(["", "", "any"])).replace("any", placements(len(shape), "sum")),
        output=output,
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        weight_dtype=draw(st.sampled_from([None, None, torch.float32, torch.bfloat16, torch.float64])),
        casting_mode=draw(st.sampled_from(["llama", "gemma", "none"])),
        offset=draw(st.sampled_from([0.0, 1.0, -0.5])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        normalized_ndim=ndim,
        hidden=draw(st.sampled_from(["stats", "stats", "gather"])),
        weight_grad=draw(st.sampled_from(["auto", "deferred", "reduced"])),
        in_place=draw(st.booleans()),
        leaf="P" in x or draw(st.booleans()),
        x_requires_grad=draw(st.sampled_from([True, True, True, False])),
        weight_requires_grad=draw(st.sampled_from([True, True, True, False])),
        seed=draw(st.integers(0, 2**31)),
    )


def _texts(placements: str) -> list[str]:
    from meshnorm.notation import placement_text

    return [placement_text([p]) for p in parse_placements(placements)]


def _reachable(case: Case) -> bool:
    mesh = Mesh.of_sizes(dict(case.mesh))
    x = normalize(parse_placements(case.x), len(case.shape), mesh, "x")
    output = normalize(parse_placements(case.output), len(case.shape), mesh, "output") if case.output else None
    try:
        route_of(mesh, x, len(case.shape), case.normalized_ndim, None, case.hidden, output_placements=output)
    except UnreachableLayoutError:
        return False
    return True


@given(case=cases())
def test_any_layout_equals_float64_and_its_plan(ranks: Ranks, case: Case):
    if not _reachable(case):
        case = Case(**{**case.__dict__, "output": ""})
    world = 1
    for _, size in case.mesh:
        world *= size
    expect_right(ranks(world), case)
