"""Calls on DTensors of a layout and signature seen before: what is remembered of the first changes no result."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import meshnorm
from meshnorm import collectives, dtensors, errors, functional
from meshnorm.checking.case import mesh_for
from meshnorm.notation import parse_placements

CP_TP = (("cp", 2), ("tp", 2))
# x, the weight ("plain", or its placements), what else is given
CALLS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "rows": ("S(1),R", "R,R", {}),
    "rows_twice": ("S(0),S(1)", "R,R", {}),
    "reduced": ("S(0),S(1)", "R,R", {"weight_grad": "reduced"}),
    "plain_weight": ("S(1),R", "plain", {}),
    "deferred_plain_weight": ("S(1),R", "plain", {"weight_grad": "deferred"}),
    "no_weight": ("S(1),R", None, {}),
    "replicated": ("R,R", "R,R", {}),
    "hidden": ("S(1),S(2)", "R,R", {}),
    "aligned_weight": ("S(1),S(2)", "R,S(0)", {}),
    "gathered_weight": ("S(1),R", "S(0),R", {}),
    "partial": ("S(1),P", "R,R", {}),
    "in_place": ("S(1),R", "R,R", {"in_place": True}),
    "gemma": ("S(1),R", "R,R", {"casting_mode": "gemma", "offset": 1.0}),
}


class _Counted:
    """Counts the collectives, without a dispatch mode: that would be seen, and nothing remembered be used."""

    def __enter__(self) -> _Counted:
        self.seen: list[str] = []
        self._patch = pytest.MonkeyPatch()
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            self._patch.setattr(collectives, name, self._counting(name, getattr(collectives, name)))
        return self

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.seen.append(name)
            return function(*args)

        return counted

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def _placed(whole: torch.Tensor, mesh: DeviceMesh, placements: str, requires_grad: bool = True) -> DTensor:
    if "P" in placements:
        found = DTensor.from_local(whole[:, : whole.shape[1] // 2].contiguous(), mesh, parse_placements(placements))
    else:
        found = distribute_tensor(whole, mesh, parse_placements(placements), src_data_rank=None)
    return found.detach().requires_grad_(requires_grad)


def _inputs(mesh: DeviceMesh, x: str, weight: str | None, rows: int, frozen: bool) -> tuple[Any, Any]:
    w = None if weight is None else torch.randn(8)
    if w is not None:
        w = w.requires_grad_(not frozen) if weight == "plain" else _placed(w, mesh, weight, not frozen)  # type: ignore[arg-type]
    return _placed(torch.randn(3, rows, 8), mesh, x), w


def _outcome(x: Any, weight: Any, options: dict[str, Any], dy: Any = None) -> tuple[list[Any], list[str]]:
    """(y and gradients with their layouts, collectives)."""
    with _Counted() as counted:
        y = meshnorm.rms_norm(x, weight, **options)
        if dy is None:
            dy = y.detach().clone()
        wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
        found = [y.detach(), *torch.autograd.grad(y, wanted, dy)]
        with torch.no_grad():
            found.append(meshnorm.rms_norm(x, weight, **options))
    return found, counted.seen


def _assert_same(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert type(one) is type(other) and one.shape == other.shape and one.stride() == other.stride()
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad
        if isinstance(one, DTensor):
            assert one.placements == other.placements and one.device_mesh is other.device_mesh
            assert dtensors.layout(one)[2] == one.shape
            one, other = one.to_local(), other.to_local()
        assert torch.equal(one, other)


def _again(call: str) -> None:
    mesh = mesh_for(CP_TP)
    x, weight, options = CALLS[call]
    torch.manual_seed(0)
    cases = [_inputs(mesh, x, weight, rows, frozen) for rows in (4, 5, 4, 4, 5) for frozen in (True, False)]
    expected = []
    for each in cases:
        functional._known.clear()
        expected.append(_outcome(*each, options))
    functional._known.clear()
    for _ in range(2):
        for each, (found, collectives_seen) in zip(cases, expected, strict=True):
            again, seen = _outcome(*each, options)
            _assert_same(again, found)
            assert seen == collectives_seen
    assert bool(functional._known) == (call != "partial")
    gc.collect()


@pytest.mark.parametrize("call", CALLS)
def test_a_second_call_gives_the_bits_the_layouts_and_the_collectives_of_the_first(pool4, call):
    pool4.run(_again, call)


def _without(name: str) -> None:
    """The public ways alone."""
    mesh = mesh_for(CP_TP)
    x, weight = _inputs(mesh, "S(1),R", "R,R", 4, False)
    functional._known.clear()
    expected, _ = _outcome(x, weight, {})
    functional._known.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtensors, name, lambda x: None)
        for _ in range(3):
            _assert_same(_outcome(x, weight, {})[0], expected)
    functional._known.clear()


@pytest.mark.parametrize("name", ["is_open", "reusable_spec"])
def test_dtensors_that_keep_their_parts_elsewhere_are_served_too(pool4, name):
    pool4.run(_without, name)


def _takes_no_detour() -> None:
    mesh = mesh_for(CP_TP)
    x, weight = _inputs(mesh, "S(1),R", "R,R", 4, False)
    first, _ = _outcome(x, weight, {})
    dy = first[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "from_local", lambda *a, **k: pytest.fail("the slow way"))
        patch.setattr(functional, "check_normalized", lambda *a: pytest.fail("checked again"))
        _assert_same(_outcome(x, weight, {}, dy)[0], _outcome(x, weight, {}, dy)[0])


def test_a_second_call_makes_its_dtensors_the_short_way(pool4):
    pool4.run(_takes_no_detour)


def _results_are_independent() -> None:
    """What is done to one y does not show in another."""
    mesh = mesh_for(CP_TP)
    x, weight = _inputs(mesh, "S(1),R", "R,R", 4, False)
    with torch.no_grad():
        ys = [meshnorm.rms_norm(x, weight) for _ in range(3)]
        expected = ys[0].full_tensor().clone()
        ys[1].mul_(2)
        redistributed = ys[2].redistribute(mesh, parse_placements("R,R"))
    for y in (ys[0], ys[2], redistributed, meshnorm.rms_norm(x, weight)):
        assert y.shape == expected.shape and torch.equal(y.full_tensor(), expected)


def test_what_is_done_to_one_result_does_not_show_in_another(pool4):
    pool4.run(_results_are_independent)


def _errors_are_raised_again() -> None:
    mesh, other = mesh_for(CP_TP), init_device_mesh("cpu", (4,))
    x, weight = _inputs(mesh, "S(1),R", "R,R", 4, False)
    elsewhere = _placed(torch.randn(8), other, "R")
    bad: list[tuple[type[Exception], tuple, dict[str, Any]]] = [
        (errors.MeshMismatchError, (x, elsewhere), {}),
        (errors.MixedTensorError, (x.to_local(), weight), {}),
        (errors.WeightShapeError, (x, _placed(torch.randn(4), mesh, "R,R")), {}),
        (errors.PlacementError, (x, weight), {"output_placements": 3}),
        (errors.UnreachableLayoutError, (x, weight), {"output_placements": parse_placements("S(0),R")}),
        (errors.OptionError, (x, weight), {"weight_grad": "no"}),
        (errors.EpsError, (x, weight, -1.0), {}),
    ]
    for error, args, options in bad:
        messages = set()
        for _ in range(2):
            meshnorm.rms_norm(x, weight)
            with pytest.raises(error) as caught:
                meshnorm.rms_norm(*args, **options)
            messages.add(str(caught.value))
        assert len(messages) == 1


def test_an_error_is_raised_again_and_after_a_good_call(pool4):
    pool4.run(_errors_are_raised_again)


def _meshes_are_told_apart() -> None:
    """Equal meshes are not the same one, and a mesh that is gone leaves its place in memory to another."""
    local = torch.randn(3, 4, 8)
    for _ in range(8):
        for dims in (CP_TP, (("a", 4),), CP_TP):
            mesh = init_device_mesh("cpu", tuple(size for _, size in dims))
            x = DTensor.from_local(local, mesh, parse_placements(",".join(["S(0)"] * len(dims))))
            for _ in range(2):
                assert meshnorm.rms_norm(x).device_mesh is mesh
            del mesh, x
            gc.collect()


def test_meshes_are_told_apart(pool4):
    pool4.run(_meshes_are_told_apart)


def _launches() -> None:
    import triton
    from fake_driver import with_driver

    # Triton 3.6's interpreter fails on the backward's loop with NumPy 2.4 (and is not patched on ranks).
    without_loops = triton.__version__.startswith("3.6.")
    mesh = mesh_for(CP_TP)
    functional._known.clear()
    x, weight = _inputs(mesh, "S(1),R", "R,R", 4, False)
    with pytest.MonkeyPatch.context() as patch:
        driver = with_driver(patch)
        for _ in range(2):
            with torch.no_grad():
                y = meshnorm.rms_norm(x, weight)
        assert driver.counts() == (1, 1)
        if not without_loops:
            first, _ = _outcome(x, weight, {})
            assert driver.counts() == (2, 1)
            again, _ = _outcome(x, weight, {})
            assert driver.counts() == (0, 3)
            _assert_same(again, first)
            _assert_same([again[0]], [y])
    functional._known.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are compiled here, not interpreted")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_second_call_replays_its_launches(pool4):
    pool4.run(_launches)
