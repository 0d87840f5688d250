"""Plans: pure arithmetic, checked against the contract table and against torch's own way of cutting tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

import meshnorm
from meshnorm import Collective, plan
from meshnorm.errors import DTypeError, NormalizedShapeError, OptionError, PlacementError, UnreachableLayoutError
from meshnorm.geometry import Split, held
from meshnorm.notation import parse_mesh, parse_placements, placement_text

SHAPE = (8, 8192, 4096)
MESH = {"dp": 2, "cp": 4}
P, R, S = Partial, Replicate, Shard


# --- the contract table ---


def test_row_sharded_costs_nothing_and_leaves_dw_partial():
    found = plan(SHAPE, [S(0), S(1)], MESH)
    assert found.forward == found.backward == ()
    assert found.y == found.dx == (S(0), S(1))
    assert found.dw == (P("sum"), P("sum"))


def test_reduced_dw_is_one_collective_over_all_row_dims_in_float32():
    found = plan(SHAPE, [S(0), S(1)], MESH, weight_grad="reduced")
    assert found.backward == (Collective("all_reduce", "dp_cp", 4 * 4096),)
    assert found.dw == (R(), R())


def test_a_plain_weight_is_reduced_by_default_and_not_where_deferred():
    assert plan(SHAPE, [S(0), S(1)], MESH, weight="plain").backward == (Collective("all_reduce", "dp_cp", 4 * 4096),)
    assert plan(SHAPE, [S(0), S(1)], MESH, weight="plain", weight_grad="deferred").backward == ()


def test_a_group_that_does_not_exist_is_summed_one_mesh_dim_at_a_time():
    mesh = {"dp": 2, "cp": 4, "tp": 8}
    found = plan(SHAPE, [S(0), S(1), R()], mesh, weight_grad="reduced")
    assert found.backward == (Collective("all_reduce", "dp", 16384), Collective("all_reduce", "cp", 16384))


def test_hidden_sharded_exchanges_one_float32_a_row_each_way():
    found = plan(SHAPE, [S(0), S(2)], MESH)
    rows = 4 * 8192
    assert found.forward == found.backward == (Collective("all_reduce", "cp", 4 * rows),)
    assert found.y == found.dx == (S(0), S(2))
    assert found.dw == (P("sum"), S(0))
    assert (found.rows, found.columns) == (rows, 1024)


def test_a_float64_x_exchanges_float64():
    assert plan(SHAPE, [R(), S(2)], MESH, dtype=torch.float64).forward == (Collective("all_reduce", "cp", 8 * 65536),)


def test_several_hidden_dims_share_one_exchange():
    found = plan(SHAPE, [S(2), S(2)], MESH)
    assert found.forward == (Collective("all_reduce", "dp_cp", 4 * 65536),)
    assert found.dw == (S(0), S(0))


def test_replicated_costs_nothing():
    found = plan(SHAPE, [R(), R()], MESH)
    assert found.forward == found.backward == ()
    assert found.dw == (R(), R())


def test_partial_is_reduced_first_or_reduce_scattered_where_asked():
    size = 8 * 8192 * 4096 * 2
    reduced = plan(SHAPE, [R(), P()], MESH)
    assert reduced.forward == (Collective("all_reduce", "cp", size),)
    assert reduced.y == (R(), R()) and reduced.dw == (R(), R())
    scattered = plan(SHAPE, [R(), P()], MESH, output_placements=[R(), S(1)])
    assert scattered.forward == (Collective("reduce_scatter", "cp", size),)
    assert scattered.y == scattered.dx == (R(), S(1)) and scattered.dw == (R(), P("sum"))
    onto_hidden = plan(SHAPE, [R(), P()], MESH, output_placements=[R(), S(-1)])
    assert [c.kind for c in onto_hidden.forward] == ["reduce_scatter", "all_reduce"]


def test_gather_gathers_x_and_replicates_y():
    found = plan(SHAPE, [S(1), S(2)], MESH, hidden="gather")
    assert found.forward == (Collective("all_gather", "cp", 8 * 4096 * 1024 * 2),)
    assert found.y == (S(1), R()) and found.dx == (S(1), S(2)) and found.backward == ()


def test_a_mesh_dim_of_size_1_costs_nothing():
    for placement in (S(0), S(1), S(2), P()):
        found = plan(SHAPE, [placement, R()], {"one": 1, "cp": 4}, weight_grad="reduced")
        assert found.forward == found.backward == ()


def test_what_is_frozen_communicates_nothing():
    assert plan(SHAPE, [S(0), S(2)], MESH, x_requires_grad=False).backward == ()
    frozen = plan(SHAPE, [S(0), S(1)], MESH, weight_grad="reduced", weight_requires_grad=False)
    assert frozen.dw is None and frozen.backward == ()
    assert plan(SHAPE, [S(0), S(1)], MESH, weight=None).dw is None


def test_a_weight_sharded_like_x_is_used_as_it_is_and_another_is_gathered():
    assert plan(SHAPE, [R(), S(2)], MESH, weight=[R(), S(0)]).forward == (Collective("all_reduce", "cp", 4 * 65536),)
    other = plan(SHAPE, [R(), S(2)], MESH, weight=[S(0), R()])
    assert other.forward[0] == Collective("all_gather", "dp", 2048 * 2)
    assert other.dw == (S(0), R())


def test_a_dy_in_another_placement_is_counted_when_it_is_named():
    assert plan(SHAPE, [R(), S(1)], MESH, dy_placements=[R(), P()]).backward == (
        Collective("reduce_scatter", "cp", 8 * 8192 * 4096 * 2),
    )


def test_negative_dims_count_from_the_end():
    assert plan(SHAPE, [S(-3), S(-2)], MESH) == plan(SHAPE, [S(0), S(1)], MESH)


def test_strided_shards_count_as_the_shards_they_are():
    found = plan(SHAPE, [_StridedShard(2, split_factor=4), S(2)], MESH)
    assert found.forward == (Collective("all_reduce", "dp_cp", 4 * 65536),)
    assert found.dw == (_StridedShard(0, split_factor=4), S(0))
    rows = plan(SHAPE, [_StridedShard(1, split_factor=4), S(1)], MESH)
    assert rows.forward == () and rows.dw == (P("sum"), P("sum"))


def test_uneven_shards_are_stated_for_each_rank():
    shape = (5, 3, 10)
    first = plan(shape, [S(0), S(2)], {"dp": 4, "tp": 4})
    last = plan(shape, [S(0), S(2)], {"dp": 4, "tp": 4}, coordinate=(3, 3))
    assert (first.rows, first.columns) == (2 * 3, 3) and (last.rows, last.columns) == (0, 1)
    assert first.forward[0].bytes == 4 * 6 and last.forward[0].bytes == 0


def test_equal_layouts_give_equal_hashable_plans():
    first, second = plan(SHAPE, [S(0), S(1)], MESH), plan(list(SHAPE), (S(0), S(-2)), dict(MESH))
    assert first == second and hash(first) == hash(second) and len({first, second}) == 1
    assert first != plan(SHAPE, [S(0), S(1)], {"dp": 4, "cp": 2})


def test_a_mesh_of_16384_ranks_is_planned_in_words():
    found = str(plan((64, 131072, 16384), [S(0), S(1), S(2)], {"dp": 64, "cp": 32, "tp": 8}))
    for word in ("dp=64", "all_reduce over tp", "gathering", "dW"):
        assert word in found


def test_gathering_is_what_gathering_would_move():
    found = plan(SHAPE, [S(0), S(2)], MESH)
    local = math.prod(SHAPE) // 8 * 2
    assert found.gathering == (Collective("all_gather", "dp", local), Collective("all_gather", "cp", 2 * local))


# --- what cannot be planned ---


@pytest.mark.parametrize(
    ("x", "output", "words"),
    [
        ([S(0), R()], [R(), R()], "redistribute y"),
        ([R(), R()], [R(), S(1)], "redistribute y"),
        ([R(), S(2)], [R(), R()], 'hidden="gather"'),
        ([P(), S(1)], [S(1), S(1)], "'cp'"),
        ([P(), R()], [P(), R()], "Replicate() or Shard(d)"),
        ([P(), R()], [_StridedShard(1, split_factor=2), R()], "Replicate() or Shard(d)"),
    ],
)
def test_an_unreachable_output_says_where_and_what_to_do(x, output, words):
    with pytest.raises(UnreachableLayoutError, match="output_placements asks for") as caught:
        plan(SHAPE, x, MESH, output_placements=output)
    assert words in str(caught.value)


def test_misfit_placements_are_refused():
    with pytest.raises(PlacementError, match=r"1 placements, but the mesh .* has 2 dims"):
        plan(SHAPE, [S(0)], MESH)
    with pytest.raises(PlacementError, match=r"'cp'.*3 dims"):
        plan(SHAPE, [S(0), S(3)], MESH)
    with pytest.raises(PlacementError, match="no Placement"):
        plan(SHAPE, [S(0), "S(1)"], MESH)
    with pytest.raises(PlacementError, match="give placements and a mesh"):
        plan(SHAPE)
    with pytest.raises(NormalizedShapeError):
        plan(SHAPE, [S(0), S(1)], MESH, normalized_shape=17)
    with pytest.raises(NormalizedShapeError, match="size 0"):
        plan((8, 0), [S(0)], {"dp": 2})
    with pytest.raises(PlacementError, match="0 or more"):
        plan((8, -16), [S(0)], {"dp": 2})
    with pytest.raises(PlacementError, match="1 or more"):
        plan(SHAPE, [S(0)], {"dp": 0})
    for coordinate in ((5,), (0, 0, 0)):
        with pytest.raises(PlacementError, match="no such rank"):
            plan(SHAPE, [S(0)], {"dp": 2}, coordinate=coordinate)
    with pytest.raises(DTypeError, match="int32"):
        plan(SHAPE, [S(0), S(1)], MESH, dtype=torch.int32)
    with pytest.raises(OptionError):
        plan(SHAPE, [S(0), S(1)], MESH, weight="sliced")
    with pytest.raises(OptionError):
        plan(SHAPE, [S(0), S(1)], MESH, hidden="guess")


# --- cutting ---


@given(
    size=st.integers(0, 40),
    splits=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([None, 2, 3])), min_size=0, max_size=3),
    data=st.data(),
)
def test_held_ranges_are_what_torch_cuts(size, splits, data):
    mesh = tuple(parts for parts, _ in splits)
    coordinate = tuple(data.draw(st.integers(0, parts - 1)) for parts in mesh)
    chain = [Split(dim, factor) for dim, (_, factor) in enumerate(splits)]
    ranges = held(size, chain, mesh, coordinate)
    expected = torch.arange(size)
    for (parts, factor), index in zip(splits, coordinate, strict=True):
        placement = S(0) if factor is None else _StridedShard(0, split_factor=factor)
        pieces, _ = placement._split_tensor(expected, parts, with_padding=False, contiguous=False)
        expected = pieces[index]
    assert [i for start, stop in ranges for i in range(start, stop)] == expected.tolist()


# --- text ---


@pytest.mark.parametrize("text", ["R", "S(0),R,P", "P(avg),S(-1)", "SS(1,2),S(1)"])
def test_placement_text_reads_back(text):
    assert placement_text(parse_placements(text)) == text


@pytest.mark.parametrize("text", ["", "S", "S()", "S(a)", "Q", "SS(1)", "S(0);R", "R(1)"])
def test_text_that_is_no_placement_is_refused(text):
    with pytest.raises(PlacementError, match="no placement"):
        parse_placements(text)


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=x", "=2", "dp=2,dp=2", ""])
def test_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(PlacementError, match="no mesh"):
        parse_mesh(text)


def test_the_public_names():
    names = {"AddRMSNorm", "Collective", "Plan", "RMSNorm", "add_rms_norm", "convert", "plan", "revert", "rms_norm"}
    names |= {"GatedRMSNorm", "QKRMSNorm", "gated_rms_norm", "qk_rms_norm"}
    assert set(meshnorm.__all__) == names
    assert all(hasattr(meshnorm, name) for name in meshnorm.__all__)
