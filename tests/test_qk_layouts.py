"""The norms of q and k in every layout, on real ranks: against float64, and the collectives against the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from qk_ranks import QKCase, run_qk_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshnorm import plan, qk_rms_norm, rms_norm
from meshnorm.checking.case import mesh_for
from meshnorm.checking.ranks import RankPool
from meshnorm.layout import Mesh, route_of
from meshnorm.layout_qk import Exchange, exchanges_of
from meshnorm.notation import parse_placements
from meshnorm.planning import Collective

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
Ranks = Callable[[int], RankPool]
MESH, KV = (("cp", 2), ("tp", 2)), (("kv", 2), ("rep", 2))
KINDS = [(F32, "gemma"), (BF16, "llama"), (F64, "gemma"), (BF16, "none")]
PER_HEAD = ((2, 5, 8, 6), (2, 5, 2, 6))
ALL_HEADS = ((2, 5, 24), (2, 5, 8))
R, S1, S2 = Replicate(), Shard(1), Shard(2)


def expect_right(pool: RankPool, cases: list[QKCase]) -> None:
    """All in one trip to the ranks."""
    for case, *outcomes in zip(cases, *pool.run(_run_all, cases), strict=True):
        for rank, faults in enumerate(outcomes):
            assert not faults, f"rank {rank}: {faults} of {case}"


def _run_all(cases: list[QKCase]) -> list[list[str]]:
    return [run_qk_case(case) for case in cases]


def _varied(mesh: tuple, shapes: tuple, layouts: list, weights: list, outputs: bool = False) -> list[QKCase]:
    """A case for each layout and kind of weight, kinds in turn."""
    found = []
    for layout, weight in itertools.product(layouts, weights):
        dtype, mode = KINDS[len(found) % len(KINDS)]
        x, output = layout if outputs else (layout, ("", ""))
        varied = {"dtype": dtype, "casting_mode": mode, "offset": float(len(found) % 2), "seed": len(found)}
        found.append(QKCase(mesh, shapes, x, weight, output, **varied))
    return found


WEIGHTS = [("", ""), ("plain", "plain"), ("none", ""), ("plain", "none"), ("", "plain")]


@pytest.mark.parametrize("world", [2, 4])
def test_per_head_nothing_is_exchanged(ranks: Ranks, world: int) -> None:
    """Heads sharded (fewer of keys than ranks: some hold none), sequence sharded, keys replicated beside both."""
    layouts = [("S(2)", "S(2)"), ("S(1)", "S(1)"), ("S(2)", "R"), ("R", "R"), ("S(1)", "R"), ("SS(1,2)", "SS(1,2)")]
    expect_right(ranks(world), _varied((("tp", world),), PER_HEAD, layouts, WEIGHTS))
    found = plan(PER_HEAD[0], [S2], {"tp": world}, k=[R], k_shape=PER_HEAD[1])
    assert found.forward == found.backward == ()


@pytest.mark.parametrize("world", [2, 4])
def test_over_all_heads_both_are_exchanged_in_one_all_reduce(ranks: Ranks, world: int) -> None:
    layouts = [("S(2)", "S(2)"), ("S(-1)", "S(-1)"), ("S(2)", "R"), ("R", "S(2)"), ("S(1)", "S(2)")]
    expect_right(ranks(world), _varied((("tp", world),), ALL_HEADS, layouts, WEIGHTS))
    found = plan(ALL_HEADS[0], [S2], {"tp": world}, k=[S2], k_shape=ALL_HEADS[1])
    assert found.forward == found.backward == (Collective("all_reduce", "tp", 4 * (10 + 10)),)


def test_keys_that_several_ranks_hold_are_counted_once(pool4: RankPool) -> None:
    """Of 4 ranks each 2 hold the same key heads: whole, or the parts of a norm over all of them."""
    cases = _varied(KV, PER_HEAD, [("S(2),S(2)", "S(2),R")], WEIGHTS)
    cases += _varied(
        KV, ALL_HEADS, [("S(2),S(2)", "S(2),R"), ("S(2),S(2)", "R,S(2)"), ("S(2),R", "S(2),S(2)")], WEIGHTS
    )
    expect_right(pool4, cases)
    found = plan(ALL_HEADS[0], [S2, S2], dict(KV), k=[S2, R], k_shape=ALL_HEADS[1])
    assert found.forward == found.backward == (Collective("all_reduce", "kv_rep", 4 * 20),)


def test_key_gradients_arrive_partial_from_the_ranks_that_share_them(pool4: RankPool) -> None:
    """Each rank's queries give a part of dK: what a grouped-query attention on local heads hands back."""
    cases = [
        QKCase(KV, shapes, ("S(2),S(2)", k), weight, dy=("", dy), dtype=dtype, weight_grad=way, seed=seed)
        for seed, ((shapes, k, dy), weight, dtype, way) in enumerate(
            itertools.product(
                [(PER_HEAD, "S(2),R", "S(2),P"), (ALL_HEADS, "S(2),R", "S(2),P"), (ALL_HEADS, "R,R", "P,P")],
                [("", ""), ("plain", "plain")],
                [F32, BF16],
                ["auto", "reduced"],
            )
        )
    ]
    expect_right(pool4, cases)


PRODUCTS = [
    ("S(1),S(2)", "S(1),S(2)"),
    ("S(0),S(1)", "S(0),S(1)"),
    ("S(1),S(2)", "S(1),R"),
    ("S(2),S(2)", "S(2),S(2)"),
    ("S(2),S(1)", "S(2),S(2)"),  # another group for each: q has other rows along tp
]


def test_products_of_mesh_dims(pool4: RankPool) -> None:
    expect_right(pool4, _varied(MESH, ALL_HEADS, PRODUCTS, WEIGHTS) + _varied(MESH, PER_HEAD, PRODUCTS, WEIGHTS[:2]))


def test_what_is_partial_is_reduced_first(pool4: RankPool) -> None:
    layouts = [
        (("S(1),P", "S(1),P"), ("", "")),
        (("S(1),P", "S(1),S(2)"), ("S(1),S(2)", "")),
        (("P,P", "R,P(avg)"), ("S(1),R", "")),
        (("S(1),R", "S(1),P"), ("", "S(1),S(1)")),
    ]
    expect_right(pool4, _varied(MESH, ALL_HEADS, layouts, WEIGHTS[:3], outputs=True))


@pytest.mark.parametrize("shapes", [((1, 1, 1), (1, 1, 1)), ((0, 4, 8), (2, 3, 7)), ((5, 1, 6), (5, 1, 2))])
def test_uneven_shards_and_ranks_without_rows_or_columns(pool4: RankPool, shapes: tuple) -> None:
    expect_right(pool4, _varied(MESH, shapes, PRODUCTS, WEIGHTS[:2]))
    expect_right(pool4, _varied(KV, shapes, [("S(2),S(2)", "S(2),R")], WEIGHTS[:2]))


def test_every_placement_of_the_weights_and_way_to_sum_their_gradients(pool4: RankPool) -> None:
    kinds = ["", "plain", "R,S(0)", "S(0),R"]
    cases = [
        QKCase(MESH, ALL_HEADS, x, weight, weight_grad=way, dtype=BF16, seed=seed)
        for seed, (x, weight, way) in enumerate(
            itertools.product(
                [("S(1),S(2)", "S(1),S(2)"), ("S(1),S(2)", "S(1),R")],
                itertools.product(kinds, kinds[:3]),
                ["auto", "deferred", "reduced"],
            )
        )
    ]
    expect_right(pool4, cases)


def test_both_dw_are_summed_in_one_all_reduce(pool4: RankPool) -> None:
    found = plan(ALL_HEADS[0], [S1, R], dict(MESH), weight="plain", k=[S1, R], k_shape=ALL_HEADS[1], k_weight="plain")
    assert found.backward == (Collective("all_reduce", "cp", 4 * (24 + 8)),)
    expect_right(pool4, [QKCase(MESH, ALL_HEADS, ("S(1),R", "S(1),R"), ("plain", "plain"))])


def test_gradients_arrive_in_any_placement(pool4: RankPool) -> None:
    cases = [
        QKCase(MESH, ALL_HEADS, ("S(1),S(2)", "S(1),S(2)"), dy=dy, seed=seed)
        for seed, dy in enumerate(itertools.product(["", "S(1),R", "P,P", "R,S(2)"], ["", "P,S(1)", "R,R"]))
    ]
    expect_right(pool4, cases)


def test_what_is_frozen_or_not_used_costs_nothing(pool4: RankPool) -> None:
    cases = [
        QKCase(MESH, shapes, (x, k), weight, dtype=BF16, needs=needs, used=used)
        for needs, used, weight, (shapes, x, k) in itertools.product(
            [needs for needs in itertools.product([True, False], repeat=4) if any(needs)],
            [(True, True), (True, False), (False, True)],
            [("plain", "plain")],
            [(ALL_HEADS, "S(1),S(2)", "S(1),S(2)"), (PER_HEAD, "S(1),S(2)", "S(1),R")],
        )
        if any(need and used[place % 2] for place, need in enumerate(needs))
    ]
    expect_right(pool4, cases)


def test_two_normalized_dims(pool4: RankPool) -> None:
    """Heads and head_dim together: a norm over all heads, the heads sharded."""
    layouts = [("S(1),S(2)", "S(1),S(2)"), ("S(2),S(3)", "S(2),R")]
    cases = [
        QKCase(MESH, ((2, 3, 4, 6), (2, 3, 2, 6)), layout, weight, ndim=2, seed=seed)
        for seed, (layout, weight) in enumerate(itertools.product(layouts, [("", ""), ("plain", "R,S(0)")]))
    ]
    expect_right(pool4, cases)


# --- which group serves both ---


def exchanges(mesh: Mesh, q: str, k: str) -> tuple[Exchange, ...]:
    routes = [route_of(mesh, parse_placements(text), 3, 1, None) for text in (q, k)]
    return exchanges_of(mesh, *routes)


def test_one_group_serves_both_where_there_is_one() -> None:
    joint, apart = Mesh(("a", "b"), (2, 2), frozenset({(0, 1)})), Mesh(("a", "b"), (2, 2))
    both = Exchange((0, 1), True, True)
    assert exchanges(joint, "S(2),S(2)", "S(2),S(2)") == (both,) and both.is_of_all
    assert exchanges(joint, "S(2),S(2)", "S(2),R") == (Exchange((0, 1), True, True, (), (1,)),)
    assert exchanges(joint, "R,S(2)", "S(2),R") == (Exchange((0, 1), True, True, (0,), (1,)),)
    assert exchanges(apart, "S(2),S(2)", "S(2),R") == (Exchange((0,), True, True), Exchange((1,), True, False))
    # q has other rows along b: what its ranks there sum must not be added up.
    assert exchanges(joint, "S(2),S(1)", "S(2),S(2)") == (Exchange((0,), True, False), Exchange((0, 1), False, True))
    assert exchanges(joint, "S(1),R", "R,R") == ()


# --- among other code ---


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: str) -> DTensor:
    """A DTensor cut locally."""
    return distribute_tensor(whole, mesh, parse_placements(placements), src_data_rank=None).detach()


def _beside_two_norms(mesh_dims: tuple, shapes: tuple, x: tuple[str, str]) -> list[bool]:
    """Whether y and gradients have the bits of two norms."""
    mesh = mesh_for(mesh_dims)
    torch.manual_seed(1)
    xs = [torch.randn(shape).bfloat16() for shape in shapes]
    dys, weights = [torch.randn_like(t) for t in xs], [torch.randn(shape[-1]) for shape in shapes]
    results = []
    for both in (True, False):
        leaves = [placed(t, mesh, p).requires_grad_() for t, p in zip(xs, x, strict=True)]
        scales = [placed(w, mesh, "R,R").requires_grad_() for w in weights]
        if both:
            ys = qk_rms_norm(*leaves, *scales)
        else:
            ys = tuple(rms_norm(leaf, w) for leaf, w in zip(leaves, scales, strict=True))
        torch.autograd.backward(ys, [placed(t, mesh, p) for t, p in zip(dys, x, strict=True)])
        results.append([t.to_local() for t in (*ys, *(leaf.grad for leaf in (*leaves, *scales)))])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("mesh", "shapes", "x"),
    [
        (MESH, PER_HEAD, ("S(1),S(2)", "S(1),S(2)")),
        (KV, PER_HEAD, ("S(2),S(2)", "S(2),R")),
        (MESH, ALL_HEADS, ("S(1),S(2)", "S(1),S(2)")),  # sums of two: in one order only
    ],
)
def test_it_has_the_bits_of_two_norms(pool4: RankPool, mesh: tuple, shapes: tuple, x: tuple[str, str]) -> None:
    assert all(map(all, pool4.run(_beside_two_norms, mesh, shapes, x)))


def _compiled(mesh_dims: tuple, heads: bool, x: tuple[str, str], output: tuple | None) -> int:
    """How many graphs several lengths take, each giving the bits of eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = mesh_for(mesh_dims)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def norm(*tensors):
        return qk_rms_norm(*tensors, q_output_placements=output)

    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    for sequence in (4, 8, 12):
        shapes = ((2, sequence, 4, 8), (2, sequence, 2, 8)) if heads else ((2, sequence, 16), (2, sequence, 8))
        wholes = [torch.randn(shape).bfloat16() for shape in shapes] + [torch.randn(shape[-1]) for shape in shapes]
        results = []
        for call in (norm, compiled):
            leaves = [placed(t, mesh, p).requires_grad_() for t, p in zip(wholes, (*x, "R,R", "R,R"), strict=True)]
            ys = call(*leaves)
            (ys[0].sum() + ys[1].sum()).backward()
            results.append([*(y.detach() for y in ys), *(leaf.grad for leaf in leaves)])
        for eager, traced in zip(*results, strict=True):
            assert eager.placements == traced.placements
            assert torch.equal(eager.to_local(), traced.to_local())
    return counter.frame_count


@pytest.mark.parametrize(
    ("mesh", "heads", "x", "output"),
    [
        (MESH, True, ("S(1),S(2)", "S(1),S(2)"), None),
        (MESH, False, ("S(1),S(2)", "S(1),S(2)"), None),
        (KV, False, ("S(2),S(2)", "S(2),R"), None),
        (MESH, False, ("S(1),P", "S(1),R"), (Shard(1), Shard(1))),
    ],
)
def test_compiled_with_fullgraph_it_is_the_same_and_does_not_recompile_with_the_rows(pool4, mesh, heads, x, output):
    assert max(pool4.run(_compiled, mesh, heads, x, output)) <= 2  # the first length, then one graph for every other
