"""The gated norm in every layout, on real ranks: against float64, and the collectives against the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from gated_ranks import GatedCase, run_gated_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshnorm import gated_rms_norm
from meshnorm.checking.case import mesh_for
from meshnorm.checking.ranks import RankPool
from meshnorm.layout import Mesh
from meshnorm.layout_gated import Segment, gated_route_of, segments_of
from meshnorm.notation import parse_placements

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
Ranks = Callable[[int], RankPool]
MESH = (("cp", 2), ("tp", 2))
# (x, gate, the casting mode, norm before the gate, activation)
KINDS = [
    (F32, F32, "gemma", True, "silu"),
    (BF16, BF16, "llama", False, "silu"),
    (BF16, F32, "llama", True, "sigmoid"),
    (F64, F64, "gemma", False, "sigmoid"),
    (F32, BF16, "none", False, "silu"),
]


def expect_right(pool: RankPool, cases: list[GatedCase]) -> None:
    """All in one trip to the ranks."""
    for case, *outcomes in zip(cases, *pool.run(_run_all, cases), strict=True):
        faults = [f"rank {rank}: {fault}" for rank, found in enumerate(outcomes) for fault in found]
        assert not faults, f"{case}\n" + "\n".join(faults)


def _run_all(cases: list[GatedCase]) -> list[list[str]]:
    return [run_gated_case(case) for case in cases]


def _varied(mesh: tuple, shape: tuple[int, ...], layouts: list, weights: list[str], groups: list[int]) -> list:
    """A case for each layout (x, gate, output), weight and group size, kinds in turn."""
    found = []
    for (x, gate, output), weight, group in itertools.product(layouts, weights, groups):
        dtype, gate_dtype, mode, before, activation = KINDS[len(found) % 5]
        found.append(
            GatedCase(
                mesh,
                shape,
                x,
                gate,
                weight,
                output,
                group=group,
                before=before,
                activation=activation,
                dtype=dtype,
                gate_dtype=gate_dtype,
                casting_mode=mode,
                offset=float(len(found) % 2),
                seed=len(found),
            )
        )
    return found


ONE_DIM = [
    ("R", "R", ""),
    ("S(0)", "S(0)", ""),
    ("S(1)", "S(1)", ""),
    ("S(-1)", "S(2)", ""),
    ("SS(1,2)", "SS(1,2)", ""),
    ("S(1)", "R", ""),
    ("S(2)", "R", ""),
    ("S(2)", "P", ""),
    ("P", "R", ""),
    ("P", "S(1)", ""),
    ("P", "S(2)", ""),
    ("P", "P", "S(1)"),
    ("P(avg)", "P(max)", ""),
    ("R", "P", ""),
    ("S(2)", "none", ""),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_row_of_the_table(ranks: Ranks, world: int) -> None:
    expect_right(ranks(world), _varied((("tp", world),), (3, 5, 24), ONE_DIM, ["", "plain", "none"], [0, 6]))


TWO_DIMS = [
    ("S(0),S(1)", "S(0),S(1)", ""),
    ("S(1),S(2)", "S(1),S(2)", ""),
    ("S(2),S(2)", "S(2),S(2)", ""),
    ("S(1),P", "S(1),R", ""),
    ("S(1),P", "S(1),S(2)", ""),
    ("S(1),S(2)", "R,P", ""),
    ("S(2),R", "P,P", ""),
    ("S(2),S(2)", "none", ""),
]


def test_products_of_mesh_dims(pool4: RankPool) -> None:
    expect_right(pool4, _varied(MESH, (3, 6, 20), TWO_DIMS, ["", "plain"], [0, 4, 5, 10]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 4, 8), (2, 3, 14), (5, 1, 6)])
def test_uneven_shards_and_ranks_without_rows_or_columns(pool4: RankPool, shape: tuple[int, ...]) -> None:
    groups = {1: [0], 8: [4, 8], 14: [2, 7], 6: [1, 3]}[shape[-1]]
    layouts = [TWO_DIMS[place] for place in (0, 1, 2, 4, 5, 6)]
    expect_right(pool4, _varied(MESH, shape, layouts, ["", "plain"], groups))


def test_uneven_shards_that_hold_parts_of_several_groups(ranks: Ranks) -> None:
    """22 columns over 4 ranks: 6, 6, 6, 4, in groups of 11 and 2."""
    layouts = [("S(2)", "S(2)", ""), ("S(2)", "R", "")]
    expect_right(ranks(4), _varied((("tp", 4),), (3, 5, 22), layouts, ["", "plain", "S(0)"], [2, 11, 22]))


def test_every_placement_of_the_weight_and_way_to_sum_its_gradient(pool4: RankPool) -> None:
    cases = [
        GatedCase(MESH, (3, 6, 8), "S(1),S(2)", gate, weight, weight_grad=way, dtype=BF16, group=group, seed=seed)
        for seed, (gate, weight, way, group) in enumerate(
            itertools.product(
                ["S(1),S(2)", "R,P"],
                ["", "plain", "R,S(0)", "S(0),R", "none"],
                ["auto", "deferred", "reduced"],
                [4, 8],
            )
        )
    ]
    expect_right(pool4, cases)


def test_gradients_arrive_in_any_placement(pool4: RankPool) -> None:
    cases = [
        GatedCase(MESH, (3, 6, 8), x, "S(1),R", dy=dy, group=group, before=before, seed=seed)
        for seed, (x, dy, group, before) in enumerate(
            itertools.product(
                ["S(1),S(2)", "S(1),P"], ["S(1),R", "P,P", "R,S(2)", "P,S(1)", "R,R"], [0, 4], [True, False]
            )
        )
    ]
    expect_right(pool4, cases)


def test_what_is_frozen_costs_nothing(pool4: RankPool) -> None:
    needs = [n for n in itertools.product([True, False], repeat=3) if any(n)]
    cases = [
        GatedCase(MESH, (3, 6, 8), "S(1),S(2)", gate, weight, group=group, before=before, dtype=BF16, needs=need)
        for need, gate, weight, group, before in itertools.product(
            needs, ["S(1),S(2)"], ["", "plain"], [4, 8], [True, False]
        )
    ]
    expect_right(pool4, cases)


def test_two_normalized_dims(pool4: RankPool) -> None:
    """(4, 6): a group of 6 is the last dim, one of 3 half of it, one of 12 two of them."""
    layouts = [("S(1),S(3)", "S(1),S(3)"), ("S(2),S(3)", "S(2),S(3)"), ("S(2),S(2)", "R,R"), ("S(0),P", "S(0),S(3)")]
    cases = [
        GatedCase(MESH, (2, 3, 4, 6), x, gate, weight, normalized_ndim=2, group=group, before=before, seed=group)
        for (x, gate), weight, group, before in itertools.product(
            layouts, ["", "plain", "R,S(1)"], [0, 3, 6, 12], [True, False]
        )
    ]
    expect_right(pool4, cases)


# --- which rank holds what of which group ---


def segments(shape: tuple[int, ...], placements: str, sizes: tuple[int, ...], group: int) -> list[tuple]:
    """Of each rank."""
    from meshnorm.geometry import chains

    ndim = len(shape)
    split = chains(parse_placements(placements), sizes, ndim)
    places = itertools.product(*map(range, sizes))
    return [segments_of(sizes, place, split, shape, group) for place in places]


def test_segments_of_uneven_shards() -> None:
    assert segments((10,), "S(0)", (4,), 5) == [
        (Segment(0, 3, 0, 3),),
        (Segment(0, 2, 0, 2), Segment(2, 3, 1, 1)),
        (Segment(0, 3, 1, 3),),
        (Segment(0, 1, 1, 1),),
    ]
    assert segments((12,), "S(0)", (2,), 3) == [(Segment(0, 6, 0, 3),), (Segment(0, 6, 2, 3),)]


def test_segments_hold_each_column_once(pool4: RankPool) -> None:
    """Against the columns' own numbers, cut as tensors are."""
    for shape, placements in [
        ((4, 6), "S(0),S(1)"),
        ((4, 6), "S(1),S(1)"),
        ((24,), "SS(0,2),S(0)"),
        ((3, 5), "S(1),R"),
    ]:
        columns = torch.arange(torch.Size(shape).numel()).view(shape)
        held = pool4.run(_columns_held, columns, placements)
        size = columns.numel()
        for group in (d for d in range(1, size + 1) if size % d == 0):
            for mine, found in zip(held, segments(shape, placements, (2, 2), group), strict=True):
                told = [
                    segment.group + (at - segment.start) // segment.size
                    for segment in found
                    for at in range(segment.start, segment.stop)
                ]
                assert told == (mine // group).tolist(), (shape, placements, group)


def _columns_held(columns: torch.Tensor, placements: str) -> torch.Tensor:
    from meshnorm.geometry import chains
    from meshnorm.moving import cut

    mesh = mesh_for(MESH)
    return cut(columns, chains(parse_placements(placements), (2, 2), columns.ndim), mesh).flatten()


@pytest.mark.parametrize(("group", "straddles"), [(2, False), (4, False), (8, True), (16, True), (1, False)])
def test_only_groups_on_several_ranks_are_exchanged(group: int, straddles: bool) -> None:
    mesh = Mesh.of_sizes({"tp": 4})
    route = gated_route_of(mesh, (Shard(1),), (Shard(1),), 2, (16,), group, (Replicate(),))
    assert route.straddles == straddles == bool(route.norm.statistic_steps)


# --- among other code ---


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: str) -> DTensor:
    """A DTensor cut locally."""
    return distribute_tensor(whole, mesh, parse_placements(placements), src_data_rank=None).detach()


def _bits(placements: str, before: bool, group: int) -> bool:
    mesh = mesh_for(MESH)
    torch.manual_seed(1)
    x0, dy = torch.randn(3, 6, 32).bfloat16(), torch.randn(3, 6, 32).bfloat16()
    gate0, weight = torch.randn(3, 6, 32), torch.randn(32)

    def results(place: Callable) -> list[torch.Tensor]:
        leaves = [place(t).detach().requires_grad_() for t in (x0, gate0)]
        w = weight if not isinstance(leaves[0], DTensor) else placed(weight, mesh, "R,R")
        y = gated_rms_norm(*leaves, w, norm_before_gate=before, group_size=group)
        y.backward(place(dy))
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in (y, *(leaf.grad for leaf in leaves))]

    sharded = results(lambda t: placed(t, mesh, placements))
    return all(torch.equal(a, b) for a, b in zip(sharded, results(lambda t: t), strict=True))


@pytest.mark.parametrize("placements", ["S(0),S(1)", "S(1),S(1)", "S(1),S(2)", "S(2),S(2)"])
@pytest.mark.parametrize("before", [True, False])
def test_sharding_rows_and_whole_groups_changes_no_bit(pool4: RankPool, placements: str, before: bool) -> None:
    assert all(pool4.run(_bits, placements, before, 8))


def _compiled(x_placements: str, gate_placements: str, group: int, output: tuple | None) -> int:
    """How many graphs several lengths take, each giving the bits of eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = mesh_for(MESH)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def norm(x, gate, w):
        return gated_rms_norm(x, gate, w, group_size=group, norm_before_gate=False, output_placements=output)

    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    for sequence in (4, 8, 12):
        wholes = torch.randn(2, sequence, 8).bfloat16(), torch.randn(2, sequence, 8)
        scale, results = torch.randn(8), []
        for call in (norm, compiled):
            leaves = [
                placed(t, mesh, p).requires_grad_()
                for t, p in zip((*wholes, scale), (x_placements, gate_placements, "R,R"), strict=True)
            ]
            y = call(*leaves)
            y.sum().backward()
            results.append([y.detach()] + [leaf.grad for leaf in leaves])
        for eager, traced in zip(*results, strict=True):
            assert eager.placements == traced.placements
            assert torch.equal(eager.to_local(), traced.to_local())
    return counter.frame_count


@pytest.mark.parametrize(
    ("x", "gate", "group", "output"),
    [
        ("S(0),S(1)", "S(0),S(1)", 4, None),
        ("S(1),S(2)", "S(1),S(2)", 4, None),
        ("S(1),S(2)", "S(1),R", 8, None),
        ("S(1),R", "R,R", 4, (Shard(1), Replicate())),
    ],
)
def test_compiled_with_fullgraph_it_is_the_same_and_does_not_recompile_with_the_rows(pool4, x, gate, group, output):
    assert max(pool4.run(_compiled, x, gate, group, output)) <= 2  # the first length, then one graph for every other
