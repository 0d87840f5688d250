"""The norm among the DTensor code around it: linears, embeddings, SequenceParallel, optimizers, torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import meshnorm
from meshnorm.checking.case import mesh_for
from meshnorm.checking.collectives import Recorder
from meshnorm.errors import DoubleBackwardError, MeshMismatchError, PlacementError
from meshnorm.notation import parse_placements

CP_TP = (("cp", 2), ("tp", 2))


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: str) -> DTensor:
    """A leaf DTensor, cut locally."""
    found = distribute_tensor(whole, mesh, parse_placements(placements), src_data_rank=None)
    return found.detach().requires_grad_(whole.is_floating_point())


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-12)


# --- neighbours ---


def _column_norm_row() -> None:
    """A column-parallel linear, the norm on its hidden-sharded output, a row-parallel linear."""
    mesh = mesh_for(CP_TP)
    torch.manual_seed(0)
    x0, first, second, scale = drawn(4, 6, 5), drawn(8, 5), drawn(7, 8), drawn(8)
    wholes = [t.clone().requires_grad_() for t in (x0, first, second, scale)]
    out = F.linear(meshnorm.rms_norm(F.linear(wholes[0], wholes[1]), wholes[3]), wholes[2])
    out.square().sum().backward()

    x = placed(x0, mesh, "S(0),R")
    w1, w2, scale_d = placed(first, mesh, "R,S(0)"), placed(second, mesh, "R,S(1)"), placed(scale, mesh, "R,R")
    with Recorder(mesh) as recorder:
        inner = F.linear(x, w1)
        assert inner.placements == (Shard(0), Shard(2)) and not inner.is_leaf
        y = meshnorm.rms_norm(inner, scale_d)
        assert y.placements == (Shard(0), Shard(2))
        result = F.linear(y, w2)
    rows = 2 * 6
    assert [vars(c) for c in recorder.seen] == [{"kind": "all_reduce", "mesh_dim": "tp", "bytes": 8 * rows}]
    assert result.placements == (Shard(0), Partial("sum"))
    result.redistribute(mesh, [Shard(0), Replicate()]).square().sum().backward()
    for sharded, whole in zip((x, w1, w2, scale_d), wholes, strict=True):
        assert_same(sharded.grad, whole.grad)


def test_between_a_column_parallel_and_a_row_parallel_linear_no_activation_moves(pool4):
    pool4.run(_column_norm_row)


def _row_linear_norm_on_sequence() -> None:
    """A row-parallel linear's partial output, reduce-scattered onto the sequence before the norm."""
    mesh = mesh_for(CP_TP)
    torch.manual_seed(0)
    x0, matrix, scale = drawn(4, 8, 6), drawn(10, 6), drawn(10)
    wholes = [t.clone().requires_grad_() for t in (x0, matrix, scale)]
    meshnorm.rms_norm(F.linear(wholes[0], wholes[1]), wholes[2]).square().sum().backward()
    x, w, s = placed(x0, mesh, "S(0),S(2)"), placed(matrix, mesh, "R,S(1)"), placed(scale, mesh, "R,R")
    partial = F.linear(x, w)
    assert partial.placements == (Shard(0), Partial("sum"))
    y = meshnorm.rms_norm(partial, s, output_placements=[Shard(0), Shard(1)])
    assert y.placements == (Shard(0), Shard(1))
    y.square().sum().backward()
    for sharded, whole in zip((x, w, s), wholes, strict=True):
        assert_same(sharded.grad, whole.grad)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 cannot differentiate a linear whose output is sequence-sharded",
)
def test_a_row_parallel_linear_is_reduce_scattered_onto_the_sequence(pool4):
    pool4.run(_row_linear_norm_on_sequence)


def _vocabulary_sharded_embedding() -> None:
    """A vocabulary-sharded embedding's output is a partial of its own kind, which masks as it is reduced."""
    mesh = mesh_for((("tp", 2),))
    torch.manual_seed(0)
    table, scale, tokens = drawn(11, 6), drawn(6), torch.randint(0, 11, (3, 5))
    whole_table, whole_scale = table.clone().requires_grad_(), scale.clone().requires_grad_()
    meshnorm.rms_norm(F.embedding(tokens, whole_table), whole_scale).pow(3).sum().backward()
    for output in (None, [Shard(1)]):
        t, s = placed(table, mesh, "S(0)"), placed(scale, mesh, "R")
        ids = distribute_tensor(tokens, mesh, [Replicate()], src_data_rank=None)
        embedded = F.embedding(ids, t)
        assert embedded.placements[0].is_partial()
        expected = meshnorm.plan(embedded, weight=s, output_placements=output)
        with Recorder(mesh) as recorder:
            y = meshnorm.rms_norm(embedded, s, output_placements=output)
        assert tuple(recorder.seen) == expected.forward
        assert y.placements == (tuple(output) if output else (Replicate(),))
        assert_same(y.detach(), meshnorm.rms_norm(F.embedding(tokens, table), scale))
        y.pow(3).sum().backward()
        assert_same(t.grad, whole_table.grad)
        assert_same(s.grad, whole_scale.grad)


def test_after_a_vocabulary_sharded_embedding(pool2):
    pool2.run(_vocabulary_sharded_embedding)


class Block(torch.nn.Module):
    def __init__(self, norm: type[torch.nn.RMSNorm]):
        super().__init__()
        self.norm = norm(8, eps=1e-6, dtype=torch.float64)
        self.up = torch.nn.Linear(8, 12, bias=False, dtype=torch.float64)
        self.down = torch.nn.Linear(12, 8, bias=False, dtype=torch.float64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _sequence_parallel() -> None:
    mesh = mesh_for((("tp", 2),))
    torch.manual_seed(0)
    plain, ours = Block(torch.nn.RMSNorm), Block(meshnorm.RMSNorm)
    ours.load_state_dict(plain.state_dict())
    styles = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(ours, mesh, styles)
    whole = drawn(2, 6, 8)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (plain, ours)]
    for _ in range(3):
        expected = plain(whole)
        found = ours(distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None))
        assert_same(found.detach(), expected.detach())
        for optimizer, out in zip(optimizers, (expected, found), strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert_same(q.detach(), p.detach())
        assert name


def test_in_torchs_sequence_parallel_style_it_trains_as_one_process(pool2):
    pool2.run(_sequence_parallel)


def _norm_weight_gradients_over_steps(weight_grad: str) -> None:
    """Gradients are clipped and stepped on; the weight must not drift between ranks nor from one process."""
    mesh = mesh_for(CP_TP)
    torch.manual_seed(0)
    data = drawn(4, 6, 8)
    ours, plain = (norm(8, eps=1e-6, dtype=torch.float64) for norm in (meshnorm.RMSNorm, torch.nn.RMSNorm))
    ours.weight_grad = weight_grad
    distribute_module(ours, mesh)
    x = distribute_tensor(data, mesh, [Shard(1), Shard(2)], src_data_rank=None)
    steps = [torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False) for model in (ours, plain)]
    for _ in range(50):
        for model, inputs, optimizer in ((ours, x, steps[0]), (plain, data, steps[1])):
            optimizer.zero_grad()
            (model(inputs) - 0.5).square().mean().backward()
            for parameter in model.parameters():  # a gradient in the parameter's own placement is what clipping expects
                if isinstance(parameter.grad, DTensor):
                    parameter.grad = parameter.grad.redistribute(mesh, parameter.placements)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
            optimizer.step()
    assert_same(ours.weight.detach(), plain.weight.detach())
    local = ours.weight.to_local().detach()
    spread = local.clone()
    dist.all_reduce(spread)
    torch.testing.assert_close(spread / dist.get_world_size(), local, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weight_grad", ["auto", "reduced"])
def test_the_weight_follows_one_process_over_50_clipped_steps(pool4, weight_grad):
    pool4.run(_norm_weight_gradients_over_steps, weight_grad)


def _plain_local_tensors() -> None:
    """Most context-parallel trainers hand the norm plain local tensors and reduce gradients themselves."""
    mesh = mesh_for((("cp", 2),))
    torch.manual_seed(0)
    whole, scale = drawn(2, 6, 8), drawn(8)
    local = whole.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    weight = scale.clone().requires_grad_()
    with Recorder(mesh) as recorder:
        meshnorm.rms_norm(local, weight).sum().backward()
    assert not recorder.seen
    total = weight.grad.clone()
    dist.all_reduce(total)
    reference = scale.clone().requires_grad_()
    meshnorm.rms_norm(whole, reference).sum().backward()
    assert_same(total, reference.grad)


def test_plain_local_tensors_never_communicate(pool2):
    pool2.run(_plain_local_tensors)


# --- meshes ---


def _flattened_group() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten()
    torch.manual_seed(0)
    whole, scale = drawn(4, 6, 8), drawn(8)
    x, w = placed(whole, mesh, "S(0),S(1),S(2)"), placed(scale, mesh, "R,R,R")
    expected = meshnorm.plan(x, weight=w, weight_grad="reduced")
    with Recorder(mesh) as recorder:
        meshnorm.rms_norm(x, w, weight_grad="reduced").sum().backward()
    assert tuple(recorder.seen) == expected.forward + expected.backward
    assert [c.mesh_dim for c in expected.backward] == ["tp", "dp_cp"]


def test_a_group_that_a_trainer_flattened_is_used_for_one_collective(pool8):
    pool8.run(_flattened_group)


def _part_of_the_world() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([1, 2]), mesh_dim_names=("tp",))
    for placements in ("S(1)", "S(2)", "P"):
        parts = parse_placements(placements)
        local = torch.ones(3, 4 // (1 + (placements == "S(1)")), 6 // (1 + (placements == "S(2)")), dtype=torch.float64)
        x = DTensor.from_local(local, mesh, parts, run_check=False).requires_grad_()
        w = distribute_tensor(torch.ones(6, dtype=torch.float64), mesh, [Replicate()], src_data_rank=None)
        for weight in (w.detach().requires_grad_(), torch.ones(6, dtype=torch.float64, requires_grad=True)):
            y = meshnorm.rms_norm(x, weight, weight_grad="reduced")
            assert y.shape == (3, 4, 6)
            y.sum().backward()
            assert weight.grad is not None and weight.grad.shape == (6,)
        if dist.get_rank() in (1, 2):
            torch.testing.assert_close(y.to_local(), torch.ones_like(y.to_local()), rtol=1e-5, atol=1e-5)


def test_ranks_outside_the_mesh_pass_by(pool4):
    pool4.run(_part_of_the_world)


def _after_new_groups(shift: int) -> None:
    """Groups made in another order have other names; an equal mesh of before must not lend it its own."""
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for _ in range(shift):
        dist.new_group([0, 1, 2, 3])
    second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    from meshnorm.meshes import group_name

    assert first == second
    for mesh in (first, second):
        meshnorm.rms_norm(placed(drawn(2, 4, 8), mesh, "S(1),S(2)"), None).sum().backward()
        assert group_name(mesh, (1,)) == mesh.get_group(1).group_name


def test_equal_meshes_with_other_groups_use_their_own(pool4):
    pool4.run(_after_new_groups, 3)


def _forgotten() -> int:
    import gc

    from meshnorm import meshes

    for _ in range(5):
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
        x = placed(drawn(2, 4, 8), mesh, "S(1),S(2)").detach()
        meshnorm.rms_norm(x, None)
        del mesh, x
    gc.collect()
    return sum(known.mesh() is None for known in meshes._known.values())


def test_what_is_known_of_a_mesh_goes_with_the_mesh(pool4):
    assert pool4.run(_forgotten) == [0] * 4


def _gradient_on_another_mesh(placements: str) -> None:
    mesh = mesh_for(CP_TP)
    other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("cp", "tp"))
    y = meshnorm.rms_norm(placed(drawn(4, 4, 8), mesh, placements), None)
    dy = distribute_tensor(drawn(4, 4, 8), other, y.placements, src_data_rank=None)
    with pytest.raises(MeshMismatchError, match="gradient of y is on"):
        y.backward(dy)


@pytest.mark.parametrize("placements", ["S(1),S(2)", "S(0),S(1)"])
def test_a_gradient_on_another_mesh_is_refused(pool4, placements):
    pool4.run(_gradient_on_another_mesh, placements)


def _in_place(placements: str, in_place: bool) -> None:
    mesh = mesh_for(CP_TP)
    torch.manual_seed(0)
    x, w = placed(drawn(4, 6, 8), mesh, placements), placed(drawn(8), mesh, "R,R")
    y = meshnorm.rms_norm(x, w, in_place=in_place)
    dy = placed(drawn(4, 6, 8), mesh, placements).detach()
    before = dy.to_local().clone()
    (dx,) = torch.autograd.grad(y, x, dy)
    assert (dx.to_local().data_ptr() == dy.to_local().data_ptr()) == in_place
    assert torch.equal(dy.to_local(), before) != in_place


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("placements", ["S(0),S(1)", "S(1),S(2)"])
def test_dx_takes_dys_memory_only_where_that_is_asked(pool4, placements, in_place):
    pool4.run(_in_place, placements, in_place)


# --- promises ---


def _what_is_saved(placements: str) -> None:
    mesh = mesh_for((("tp", 2),))
    x, w = placed(drawn(3, 4, 8), mesh, placements), placed(drawn(8), mesh, "R")
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = meshnorm.rms_norm(x, w)
    local, weight = x.to_local(), w.to_local()
    saved = [t.to_local() if isinstance(t, DTensor) else t for t in saved]
    new = [
        t
        for t in saved
        if t.untyped_storage().data_ptr()
        not in (local.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr())
    ]
    assert [t.numel() for t in new] == [local.numel() // local.size(-1)], "more than x, w and one number a row is saved"
    assert y.requires_grad


@pytest.mark.parametrize("placements", ["S(1)", "S(2)", "R"])
def test_only_x_the_weight_and_one_number_a_row_are_saved(pool2, placements):
    pool2.run(_what_is_saved, placements)


def _double_backward() -> None:
    mesh = mesh_for((("tp", 2),))
    x, w = placed(drawn(3, 4, 8), mesh, "S(2)"), placed(drawn(8), mesh, "R")
    (dx,) = torch.autograd.grad(meshnorm.rms_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="create_graph=False"):
        dx.to_local().sum().backward()


def test_double_backward_is_refused_in_words(pool2):
    pool2.run(_double_backward)


def _compiled(x_placements: str, weight_placements: str, options: dict) -> int:
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = mesh_for(CP_TP)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def norm(x, w):
        return meshnorm.rms_norm(x, w, **options)

    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    for sequence in (4, 8, 12, 16):
        whole, scale = torch.randn(2, sequence, 8), torch.randn(8)
        results = []
        for call in (norm, compiled):
            x = placed(whole, mesh, x_placements)
            w = (
                scale.clone().requires_grad_()
                if weight_placements == "plain"
                else placed(scale, mesh, weight_placements)
            )
            y = call(x, w)
            y.sum().backward()
            results.append((y.detach(), x.grad, w.grad))
        for eager, traced in zip(*results, strict=True):
            assert getattr(eager, "placements", None) == getattr(traced, "placements", None)
            locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in (eager, traced)]
            assert torch.equal(*locals_)
    return counter.frame_count


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        ("S(0),S(1)", "R,R", {}),
        ("S(1),S(2)", "R,S(0)", {}),
        ("S(1),S(2)", "plain", {}),
        ("S(1),S(2)", "S(0),R", {}),
        ("S(1),S(2)", "R,R", {"hidden": "gather"}),
        ("S(1),R", "R,R", {"weight_grad": "reduced"}),
        ("R,S(1)", "R,R", {"output_placements": (Replicate(), Shard(1))}),
        ("R,S(1)", "R,R", {"output_placements": [Replicate(), Shard(1)]}),
    ],
)
def test_compiled_with_fullgraph_it_is_the_same_and_does_not_recompile_with_the_rows(pool4, x, weight, options):
    frames = pool4.run(_compiled, x, weight, options)
    assert max(frames) <= 2  # the first length, then one graph for every other


def _compiled_with_no_placement(name: str, output: list) -> None:
    mesh = mesh_for(CP_TP)
    x, w = placed(torch.randn(2, 4, 8), mesh, "S(0),S(1)"), placed(torch.randn(8), mesh, "R,R")
    calls = {
        "rms_norm": lambda x, w: meshnorm.rms_norm(x, w, output_placements=output),
        "add_rms_norm": lambda x, w: meshnorm.add_rms_norm(x, x, w, output_placements=output),
        "gated_rms_norm": lambda x, w: meshnorm.gated_rms_norm(x, x, w, output_placements=output),
        "qk_rms_norm": lambda x, w: meshnorm.qk_rms_norm(x, x, w, w, k_output_placements=output),
    }
    with pytest.raises(PlacementError, match="output_placements"):
        torch.compile(calls[name], backend="eager")(x, w)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "gated_rms_norm", "qk_rms_norm"])
def test_what_is_no_placement_is_refused_under_compile_too(pool4, name: str) -> None:
    pool4.run(_compiled_with_no_placement, name, [[Shard(0)], 1])
