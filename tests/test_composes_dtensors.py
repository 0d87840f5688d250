"""Norms on DTensors under what looks at calls or copies modules: checkpointing, autocast, torch.func, pickle."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composed import NORMS, OURS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshnorm
from meshnorm.checking.case import mesh_for
from meshnorm.errors import TransformError
from meshnorm.parallel import HiddenParallel

TP = (("tp", 2),)
LAYOUTS = ("rows", "hidden")
EVERY = pytest.mark.parametrize(("layout", "kind"), [(layout, kind) for layout in LAYOUTS for kind in OURS])


def _norm(layout: str, kind: str, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A norm of width 8 whose weight lies as x does: replicated beside sharded rows, else sharded."""
    norm = NORMS[kind](8)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    if kind == "converted":
        assert meshnorm.convert(norm).swapped
    norm.to(dtype)
    return distribute_module(norm, mesh) if layout == "rows" else parallelize_module(norm, mesh, HiddenParallel())


def _whole(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def _x(layout: str, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> Tensor:
    placement = Shard(1) if layout == "rows" else Shard(2)
    return distribute_tensor(_whole(dtype), mesh, [placement], src_data_rank=None).requires_grad_()


def _exact(layout: str, kind: str, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """(dX, dW) of ``Σ sin(norm(2x))³`` in one process, by torch's norm."""
    norm = nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)
    norm.weight.data = _norm(layout, kind, mesh).weight.full_tensor().detach()  # type: ignore[operator]
    x = _whole().requires_grad_()
    norm(x * 2).sin().pow(3).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
    return x.grad, norm.weight.grad


def _assert_gradients(layout: str, kind: str, mesh: DeviceMesh, spread: Callable[[nn.Module, Tensor], Tensor]) -> None:
    norm, x = _norm(layout, kind, mesh), _x(layout, mesh)
    spread(norm, x).pow(3).sum().backward()
    for found, expected in zip((x.grad, norm.weight.grad), _exact(layout, kind, mesh), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-11, atol=1e-12)  # type: ignore[union-attr]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops.append(func._opname)
        return func(*args, **(kwargs or {}))


# --- checkpointing ---


def _checkpointed(layout: str, kind: str, use_reentrant: bool) -> None:
    def spread(norm: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: norm(x * 2).sin(), x, use_reentrant=use_reentrant)  # type: ignore[return-value]

    _assert_gradients(layout, kind, mesh_for(TP), spread)


@pytest.mark.parametrize("use_reentrant", [False, True])
@EVERY
def test_a_checkpointed_norm_has_the_gradients_of_one_process(pool2, layout, kind, use_reentrant) -> None:
    pool2.run(_checkpointed, layout, kind, use_reentrant)


def _selectively_checkpointed(layout: str, kind: str, kept: tuple[str, ...]) -> list[str]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op._opname in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def spread(norm: nn.Module, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(lambda x: norm(x * 2).sin(), x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    _assert_gradients(layout, kind, mesh_for(TP), spread)
    with _Seen() as seen:
        norm, x = _norm(layout, kind, mesh_for(TP)), _x(layout, mesh_for(TP))
        spread(norm, x).pow(3).sum().backward()
    return [op for op in seen.ops if op in ("forward", "statistic", "all_reduce", "apply")]


@pytest.mark.parametrize("kind", OURS)
def test_selective_checkpointing_may_keep_a_row_sharded_norm(pool2, kind) -> None:
    assert pool2.run(_selectively_checkpointed, "rows", kind, ()) == [["forward"] * 2] * 2
    assert pool2.run(_selectively_checkpointed, "rows", kind, ("forward",)) == [["forward"]] * 2


@pytest.mark.parametrize("kind", OURS)
def test_selective_checkpointing_may_keep_a_hidden_sharded_norm_or_what_it_exchanged(pool2, kind) -> None:
    """All is recomputed; all is kept; the norm is recomputed without a second exchange. The backward's comes last."""
    once = ["statistic", "all_reduce", "apply"]
    exchanged = ("statistic", "all_reduce", "wait_tensor")
    for kept, expected in (
        ((), [*once, *once, "all_reduce"]),
        ((*exchanged, "apply"), [*once, "all_reduce"]),
        (exchanged, [*once, "apply", "all_reduce"]),
    ):
        assert pool2.run(_selectively_checkpointed, "hidden", kind, kept) == [expected] * 2


# --- autocast ---


def _autocast(layout: str, kind: str) -> None:
    mesh = mesh_for(TP)
    norm = _norm(layout, kind, mesh, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for enabled in (False, True):
            x = _x(layout, mesh, dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y = norm(x)
            y.float().square().sum().backward()
            found.append((y.to_local(), x.grad.to_local()))  # type: ignore[union-attr]
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


@EVERY
def test_autocast_changes_nothing_on_dtensors(pool2, layout, kind) -> None:
    pool2.run(_autocast, layout, kind)


# --- torch.func, torch.export ---


def _transforms(layout: str, kind: str) -> None:
    mesh = mesh_for(TP)
    norm, x = _norm(layout, kind, mesh), _x(layout, mesh).detach()
    weights = {"weight": norm.weight.detach()}  # type: ignore[operator]

    def call(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(norm, weights, (x,))

    refused: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda w: call(w, x).square().sum())(weights),
        lambda: torch.func.grad(lambda x: norm(x).square().sum())(x),
        lambda: torch.func.vmap(norm)(x),
        lambda: torch.func.vjp(norm, x),
    ]
    for transformed in refused:
        with pytest.raises(TransformError, match=r"use torch\.autograd"):
            transformed()
    with pytest.raises(NotImplementedError):  # torch's: no DTensor can be made dual
        torch.func.jvp(norm, (x,), (x,))
    torch.testing.assert_close(call(weights, x), norm(x))  # no transform, and not refused


@EVERY
def test_transforms_of_dtensors_are_refused_in_words(pool2, layout, kind) -> None:
    pool2.run(_transforms, layout, kind)


class _Wrapping(nn.Module):
    def forward(self, x: Any) -> DTensor:
        return DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements, run_check=False)


def _exported(layout: str, kind: str) -> None:
    mesh = mesh_for(TP)
    for module in (_Wrapping(), _norm(layout, kind, mesh)):
        with pytest.raises(RuntimeError, match="DTensorSpec"):
            torch.export.export(module, (_x(layout, mesh).detach(),))


@EVERY
def test_export_of_a_dtensor_call_fails_as_from_local_alone_does(pool2, layout, kind) -> None:
    pool2.run(_exported, layout, kind)


# --- copies, files, the meta device ---


def _saved(norm: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _copied(layout: str, kind: str) -> None:
    mesh = mesh_for(TP)
    norm, x = _norm(layout, kind, mesh), _x(layout, mesh)
    if layout == "hidden":  # without the hooks of parallelize_module
        bare = NORMS[kind](8)
        if kind == "converted":
            meshnorm.convert(bare)
        bare.weight = nn.Parameter(norm.weight.detach().clone())  # type: ignore[operator]
        norm = bare
    for copied in (copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm)), _saved):
        twin = copied(norm)
        assert type(twin) is type(norm) and repr(twin) == repr(norm)
        assert twin.weight is not norm.weight and twin.weight.placements == norm.weight.placements  # type: ignore[union-attr]
        assert torch.equal(twin(x).to_local(), norm(x).to_local())


@EVERY
def test_copies_of_a_norm_with_a_dtensor_weight_give_what_it_gives(pool2, layout, kind) -> None:
    pool2.run(_copied, layout, kind)


def _parallelized(layout: str, kind: str) -> None:
    mesh = mesh_for(TP)
    norm = NORMS[kind](8)
    if kind == "converted":
        meshnorm.convert(norm)
    style = SequenceParallel(use_local_output=False) if layout == "rows" else HiddenParallel()
    parallelize_module(norm, mesh, style)
    x = _x(layout, mesh, torch.float32)
    assert torch.equal(copy.deepcopy(norm)(x).to_local(), norm(x).to_local())
    with pytest.raises(AttributeError, match="distribute_module"):
        pickle.dumps(norm)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded["weight"].to_local(), norm.weight.to_local())  # type: ignore[operator]


@EVERY
def test_after_parallelize_module_the_state_dict_is_saved_and_not_the_module(pool2, layout, kind) -> None:
    """torch hangs local functions on the module, which pickle refuses, whatever the module."""
    pool2.run(_parallelized, layout, kind)


def _from_the_meta_device(layout: str, kind: str, shards: bool) -> None:
    mesh = mesh_for(TP)
    with torch.device("meta"):
        norm = nn.RMSNorm(7, eps=1e-6) if kind == "converted" else meshnorm.RMSNorm(7, eps=1e-6, offset=0.25)
    if kind == "converted":
        assert meshnorm.convert(norm).swapped
    if shards:
        fully_shard(norm, mesh=mesh)
    else:
        parallelize_module(norm, mesh, HiddenParallel() if layout == "hidden" else SequenceParallel())
    norm.to_empty(device="cpu")
    nn.init.constant_(norm.weight, float("nan"))
    norm.reset_parameters()
    expected = torch.full((7,), 1.0 if kind == "converted" else 0.75)
    assert isinstance(norm.weight, DTensor) and torch.equal(norm.weight.full_tensor().detach(), expected)
    x = _whole(torch.float32)[..., :7]
    placement = Shard(2) if layout == "hidden" else Shard(1)
    given = x if shards else distribute_tensor(x, mesh, [placement], src_data_rank=None)
    y = norm(given)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    torch.testing.assert_close(y, nn.functional.rms_norm(x, (7,), eps=1e-6))


@EVERY
def test_a_norm_parallelized_on_the_meta_device_can_be_materialized(pool2, layout, kind) -> None:
    pool2.run(_from_the_meta_device, layout, kind, False)


@pytest.mark.parametrize("kind", OURS)
def test_a_norm_that_fsdp2_sharded_on_the_meta_device_can_be_materialized(pool2, kind) -> None:
    pool2.run(_from_the_meta_device, "plain", kind, True)
