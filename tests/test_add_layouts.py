"""The norm behind an addition in every layout, on real ranks: against float64, and the collectives against the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from add_ranks import AddCase, run_add_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshnorm import add_rms_norm, rms_norm
from meshnorm.checking.case import mesh_for
from meshnorm.checking.ranks import RankPool
from meshnorm.local_add import is_only_read
from meshnorm.notation import parse_placements

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
Ranks = Callable[[int], RankPool]
LINEARS = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 runs no linear on a sequence-sharded DTensor of 3 dims"
)
DTYPES = [(F32, F32), (BF16, F32), (F64, F64), (BF16, BF16), (F32, BF16)]
MODES = [("llama", 0.0), ("gemma", 1.0)]
MESH = (("cp", 2), ("tp", 2))


def expect_right(pool: RankPool, cases: list[AddCase]) -> None:
    """All in one trip to the ranks."""
    for case, *outcomes in zip(cases, *pool.run(_run_all, cases), strict=True):
        faults = [f"rank {rank}: {fault}" for rank, found in enumerate(outcomes) for fault in found]
        assert not faults, f"{case}\n" + "\n".join(faults)


def _run_all(cases: list[AddCase]) -> list[list[str]]:
    return [run_add_case(case) for case in cases]


def _varied(mesh: tuple, shape: tuple[int, ...], layouts: list[tuple[str, str, str]], weights: list[str]) -> list:
    """A case for each layout (x, residual, output) and weight, dtypes and modes in turn."""
    found = []
    for (x, residual, output), weight in itertools.product(layouts, weights):
        dtypes, mode = DTYPES[len(found) % 5], MODES[len(found) % 2]
        found.append(
            AddCase(
                mesh,
                shape,
                x,
                residual,
                weight,
                output,
                dtype=dtypes[0],
                residual_dtype=dtypes[1],
                casting_mode=mode[0],
                offset=mode[1],
                leaf=len(found) % 3 > 0,
                seed=len(found),
            )
        )
    return found


# (x, residual, output_placements) on one mesh dim: everything that is not refused.
ONE_DIM = [
    ("R", "R", ""),
    ("S(0)", "S(0)", ""),
    ("S(1)", "S(1)", ""),
    ("S(-1)", "S(2)", ""),
    ("SS(1,2)", "SS(1,2)", ""),
    ("S(1)", "R", ""),
    ("S(2)", "R", ""),
    ("P", "R", ""),
    ("P", "S(1)", ""),
    ("P", "S(2)", ""),
    ("P", "P", ""),
    ("P(avg)", "P(max)", ""),
    ("R", "P", ""),
    ("S(1)", "P", ""),
    ("S(2)", "P", ""),
    ("P", "R", "S(1)"),
    ("P", "P", "S(1)"),
    ("P", "P", "S(2)"),
    ("R", "P", "S(0)"),
    ("P", "S(1)", "S(1)"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_every_row_of_the_table(ranks: Ranks, world: int) -> None:
    expect_right(ranks(world), _varied((("tp", world),), (3, 5, 18), ONE_DIM, ["", "plain", "none"]))


def test_a_mesh_dim_of_size_1_costs_nothing(ranks: Ranks) -> None:
    layouts = [("S(1)", "R", ""), ("P", "R", ""), ("R", "S(1)", ""), ("S(0)", "S(1)", ""), ("P", "P", "S(1)")]
    expect_right(
        ranks(2),
        _varied(
            (("one", 1), ("tp", 2)), (3, 5, 18), [(f"{x},R", f"{r},R", o and f"{o},R") for x, r, o in layouts], [""]
        ),
    )


TWO_DIMS = [
    ("S(0),S(1)", "S(0),S(1)", ""),
    ("S(1),S(2)", "S(1),S(2)", ""),
    ("S(2),S(2)", "S(2),S(2)", ""),
    ("S(1),P", "S(1),R", ""),  # a row-parallel linear's output, the residual replicated over tp
    ("S(1),P", "S(1),S(1)", ""),  # and sharded along the sequence
    ("S(1),P", "S(1),S(2)", ""),
    ("S(1),P", "S(1),R", "S(1),S(1)"),
    ("P,P", "R,R", ""),
    ("P,P", "S(1),S(1)", ""),
    ("P,P", "P,P", "S(1),S(2)"),
    ("S(1),R", "R,P", ""),
    ("S(1),S(1)", "R,P", ""),
    ("P,S(0)", "S(1),R", ""),
    ("P,S(2)", "R,S(2)", ""),
]


def test_products_of_mesh_dims(pool4: RankPool) -> None:
    expect_right(pool4, _varied(MESH, (3, 6, 10), TWO_DIMS, ["", "plain"]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 4, 8), (2, 3, 7), (5, 1, 3)])
def test_uneven_shards_and_ranks_without_rows_or_columns(pool4: RankPool, shape: tuple[int, ...]) -> None:
    layouts = [TWO_DIMS[place] for place in (0, 1, 2, 4, 8, 11)]
    expect_right(pool4, _varied(MESH, shape, layouts, ["", "plain"]))


def test_every_placement_of_the_weight_and_way_to_sum_its_gradient(pool4: RankPool) -> None:
    cases = [
        AddCase(MESH, (3, 6, 8), x, residual, weight, weight_grad=weight_grad, dtype=BF16, seed=seed)
        for seed, ((x, residual), weight, weight_grad) in enumerate(
            itertools.product(
                [("S(1),S(2)", "S(1),S(2)"), ("S(1),P", "S(1),S(1)")],
                ["", "plain", "R,S(0)", "S(0),R", "none"],
                ["auto", "deferred", "reduced"],
            )
        )
    ]
    expect_right(pool4, cases)


def test_gradients_arrive_in_any_placement(pool4: RankPool) -> None:
    arriving = ["S(1),R", "P,P", "R,S(2)", "P,S(1)", "R,R"]
    cases = [
        AddCase(MESH, (3, 6, 8), "S(1),P", "S(1),R", output="S(1),S(1)", dy=dy, d_residual_out=d_out, seed=seed)
        for seed, (dy, d_out) in enumerate(itertools.product(arriving, ["", "none", *arriving]))
    ]
    cases.append(AddCase(MESH, (3, 6, 8), "S(1),S(2)", "S(1),S(2)", dy="none"))
    expect_right(pool4, cases)


def test_what_is_frozen_or_unused_costs_nothing(pool4: RankPool) -> None:
    needs = [n for n in itertools.product([True, False], repeat=3) if any(n)]
    cases = [
        AddCase(MESH, (3, 6, 8), x, r, weight, d_residual_out=d, dtype=BF16, residual_dtype=dtype, needs=need)
        for (x, r), need, dtype, (d, weight) in itertools.product(
            [("S(1),S(2)", "S(1),S(2)"), ("S(1),P", "S(1),S(1)")], needs, [BF16, F32], [("", ""), ("none", "plain")]
        )
    ]
    expect_right(pool4, cases)


def test_two_normalized_dims(pool4: RankPool) -> None:
    layouts = [("S(1),S(3)", "S(1),S(3)"), ("S(2),S(3)", "S(2),S(3)"), ("S(0),P", "S(0),S(3)")]
    cases = [
        AddCase(MESH, (2, 3, 5, 6), x, residual, weight, normalized_ndim=2, dtype=BF16)
        for (x, residual), weight in itertools.product(layouts, ["", "plain", "R,S(1)"])
    ]
    expect_right(pool4, cases)


# --- among other code ---


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: str) -> DTensor:
    """A DTensor cut locally."""
    return distribute_tensor(whole, mesh, parse_placements(placements), src_data_rank=None).detach()


def _blocks(residual_placements: str) -> bool:
    """Two row-parallel linears with norms behind their additions, as one process computes them."""
    mesh = mesh_for(MESH)
    torch.manual_seed(0)
    x0, r0 = (torch.randn(2, 8, 6, dtype=F64) for _ in range(2))
    weights, scales = torch.randn(2, 6, 6, dtype=F64), torch.randn(2, 6, dtype=F64)

    def run(x, residual, weights, scales, add: Callable) -> list[torch.Tensor]:
        leaves = [x, residual, *weights, *scales]
        for leaf in leaves:
            leaf.requires_grad_()
        for weight, scale in zip(weights, scales, strict=True):
            hidden, residual = add(F.linear(x, weight), residual, scale)
            x = hidden * 0.5 + hidden
            if isinstance(x, DTensor):
                x = x.redistribute(mesh, parse_placements("S(0),S(2)"))
        (x.square().sum() + residual.sin().sum()).backward()
        return [leaf.grad for leaf in leaves]

    def added(x, residual, scale):
        return rms_norm(x + residual, scale), x + residual

    expected = run(x0.clone(), r0.clone(), list(weights.clone().unbind()), list(scales.clone().unbind()), added)

    found = run(
        placed(x0, mesh, "S(0),S(2)"),
        placed(r0, mesh, residual_placements),
        [placed(w, mesh, "R,S(1)") for w in weights],
        [placed(s, mesh, "R,R") for s in scales],
        add_rms_norm,
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-11, atol=1e-11)
    return True


@pytest.mark.parametrize("residual", ["S(0),R", pytest.param("S(0),S(1)", marks=LINEARS)])
def test_behind_row_parallel_linears_it_trains_as_one_process(pool4: RankPool, residual: str) -> None:
    assert all(pool4.run(_blocks, residual))


def _bits(x: str) -> bool:
    mesh = mesh_for(MESH)
    torch.manual_seed(1)
    x0, dy = torch.randn(3, 6, 33).bfloat16(), torch.randn(3, 6, 33).bfloat16()
    r0, d_out, weight = torch.randn(3, 6, 33), torch.randn(3, 6, 33), torch.randn(33)

    def results(place: Callable) -> list[torch.Tensor]:
        leaves = [place(t).detach().requires_grad_() for t in (x0, r0)]
        w = weight if not isinstance(leaves[0], DTensor) else distribute_tensor(weight, mesh, [Replicate()] * 2)
        outputs = add_rms_norm(*leaves, w)
        torch.autograd.backward(outputs, [place(dy), place(d_out)])
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in (*outputs, *(leaf.grad for leaf in leaves))]

    placements = parse_placements(x)
    sharded = results(lambda t: distribute_tensor(t, mesh, placements, src_data_rank=None))
    return all(torch.equal(a, b) for a, b in zip(sharded, results(lambda t: t), strict=True))


@pytest.mark.parametrize("x", ["S(0),S(1)", "S(1),S(1)", "S(1),R", "R,R"])
def test_sharding_rows_changes_no_bit(pool4: RankPool, x: str) -> None:
    assert all(pool4.run(_bits, x))


def _compiled(x_placements: str, residual_placements: str, output: tuple | None) -> int:
    """How many graphs several lengths take, each giving the bits of eager."""
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = mesh_for(MESH)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def norm(x, residual, w):
        return add_rms_norm(x, residual, w, output_placements=output)

    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    for sequence in (4, 8, 12):
        wholes = torch.randn(2, sequence, 8).bfloat16(), torch.randn(2, sequence, 8)
        scale, results = torch.randn(8), []
        for call in (norm, compiled):
            leaves = [
                placed(t, mesh, p).requires_grad_()
                for t, p in zip((*wholes, scale), (x_placements, residual_placements, "R,R"), strict=True)
            ]
            outputs = call(*leaves)
            (outputs[0].sum() + outputs[1].sum()).backward()
            results.append([t.detach() for t in outputs] + [leaf.grad for leaf in leaves])
        for eager, traced in zip(*results, strict=True):
            assert eager.placements == traced.placements
            assert torch.equal(eager.to_local(), traced.to_local())
    return counter.frame_count


@pytest.mark.parametrize(
    ("x", "residual", "output"),
    [
        ("S(0),S(1)", "S(0),S(1)", None),
        ("S(1),S(2)", "S(1),S(2)", None),
        ("S(1),R", "R,R", (Shard(1), Replicate())),
    ],
)
def test_compiled_with_fullgraph_it_is_the_same_and_does_not_recompile_with_the_rows(pool4, x, residual, output):
    assert max(pool4.run(_compiled, x, residual, output)) <= 2  # the first length, then one graph for every other


def _compiled_behind_a_row_parallel_linear() -> bool:
    """A partial x, which no graph can have as an input."""
    mesh = mesh_for(MESH)

    def block(x, residual, weight, scale):
        return add_rms_norm(F.linear(x, weight), residual, scale)

    results = []
    for call in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        leaves = [
            placed(torch.randn(shape), mesh, p).requires_grad_()
            for shape, p in (((4, 8, 6), "S(0),S(2)"), ((4, 8, 5), "S(0),S(1)"), ((5, 6), "R,S(1)"), ((5,), "R,R"))
        ]
        outputs = call(*leaves)
        (outputs[0].sum() + outputs[1].sum()).backward()
        results.append([t.detach() for t in outputs] + [leaf.grad for leaf in leaves])
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(*results, strict=True))


@LINEARS
def test_compiled_behind_a_row_parallel_linear_it_is_the_same(pool4: RankPool) -> None:
    assert all(pool4.run(_compiled_behind_a_row_parallel_linear))


def _one_gradient_for_both() -> bool:
    """Behind linears in both branches one DTensor is handed out twice; of leaves each has its own."""
    mesh = mesh_for(MESH)
    x0, r0, w = (
        placed(torch.randn(s), mesh, p).requires_grad_()
        for s, p in (((4, 6, 8), "S(0),S(1)"), ((4, 6, 8), "S(0),S(1)"), ((8, 8), "R,R"))
    )
    made = x0 * 2.0, r0 * 3.0
    y, residual_out = add_rms_norm(*made)
    first, second = torch.autograd.grad(y.sum() + residual_out.sum(), made)
    behind_views = x0.view(4, 6, 2, 4), r0.view(4, 6, 2, 4)
    y, residual_out = add_rms_norm(*behind_views)
    (y.sum() + residual_out.sum()).backward()
    own = x0.grad.to_local().data_ptr() != r0.grad.to_local().data_ptr()
    return first is second and own and is_only_read(F.linear(placed(torch.randn(4, 6, 8), mesh, "S(0),R"), w))


def test_one_gradient_serves_both_where_that_is_safe(pool4: RankPool) -> None:
    assert all(pool4.run(_one_gradient_for_both))
