"""Gated norms of a signature seen before launch what the first one launched, and give its bits: see ``test_replay``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import FakeDriver, with_driver
from test_kernels_triton import interpreter_does_as_the_hardware  # noqa: F401

from meshnorm import errors, functional_gated, gated_rms_norm, ops_gated

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
N = 64
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    if CUDA:
        pytest.skip("Triton's kernels are compiled here, and the driver is a real one: see the tests marked gpu")
    functional_gated._known.clear()
    yield with_driver(monkeypatch)
    functional_gated._known.clear()


def results(x: Tensor, gate: Tensor | None, weight: Tensor | None, dy: Tensor, **options: Any) -> list[Tensor]:
    """y, and the gradients of what requires one."""
    y = gated_rms_norm(x, gate, weight, **options)
    wanted = [t for t in (x, gate, weight) if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"norm_before_gate": False, "group_size": 16}], ids=str)
@pytest.mark.parametrize("frozen", ["", "x", "gate", "weight", "x gate"])
@pytest.mark.parametrize("rows", [3, 300])
def test_a_second_call_launches_the_same_and_gives_the_same_bits(driver, rows, frozen, options) -> None:
    def drawn() -> tuple[Tensor, ...]:
        x, gate = torch.randn(rows, N, dtype=BF16), torch.randn(rows, N)
        weight = torch.randn(N)
        for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
            tensor.requires_grad_(name not in frozen.split())
        return x, gate, weight, torch.randn(rows, N, dtype=BF16)

    given = drawn()
    first = results(*given, **options)
    ordinary, replayed = driver.counts()
    assert ordinary in (2, 3) and replayed == 0
    assert_same(results(*given, **options), first)
    assert driver.counts() == (0, ordinary)
    other = drawn()
    again = results(*other, **options)
    functional_gated._known.clear()
    assert_same(again, results(*other, **options))


def test_a_call_without_gradients_is_one_launch_and_has_no_rstd(driver) -> None:
    x, gate, weight = torch.randn(5, N), torch.randn(5, N), torch.randn(N)
    expected, _ = ops_gated.gated_forward.direct(x, gate, weight, 1e-6, 0.0, "llama", True, "silu", N, 1)  # type: ignore[attr-defined]
    driver.counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops_gated, "_per_group", lambda *a: pytest.fail("rstd is allocated"))
        ys = [gated_rms_norm(x, gate, weight) for _ in range(2)]
    assert driver.counts() == (1, 1)
    assert_same(ys, [expected] * 2)


def test_without_a_gate_or_weight_and_in_slices_of_a_projection_it_is_replayed(driver) -> None:
    both = torch.randn(4, 6, 2 * N)
    for x, gate, weight in (
        (torch.randn(4, 6, N), None, None),
        (torch.randn(4, 6, 4, 16), torch.randn(4, 6, 4, 16), torch.randn(4, 16)),
        (both[..., :N], both[..., N:], torch.randn(N)),
    ):
        dy = torch.randn(x.shape)
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, gate, weight)]
        first = results(*leaves, dy, group_size=16)  # type: ignore[arg-type]
        driver.counts()
        assert_same(results(*leaves, dy, group_size=16), first)  # type: ignore[arg-type]
        assert driver.counts()[0] == 0


@pytest.mark.parametrize("which", range(3))
def test_other_alignments_take_the_ordinary_way_and_come_back(driver, which: int) -> None:
    given = [torch.randn(3, N), torch.randn(3, N), torch.randn(N)]
    odd = list(given)
    odd[which] = torch.empty(given[which].numel() + 1)[1:].view(given[which].shape).copy_(given[which])
    expected = gated_rms_norm(*given)  # type: ignore[arg-type]
    driver.counts()
    for call, counts in ((odd, (1, 0)), (given, (0, 1)), (odd, (1, 0))):
        assert_same([gated_rms_norm(*call)], [expected])  # type: ignore[arg-type]
        assert driver.counts() == counts


CALLS: dict[str, dict[str, Any]] = {
    "eps": {"eps": 1e-2},
    "order": {"norm_before_gate": False},
    "activation": {"activation": "sigmoid"},
    "groups": {"group_size": 16},
    "offset": {"offset": 1.0},
    "mode": {"casting_mode": "none"},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_not_taken_for_another_one(driver, name: str) -> None:
    given = [torch.randn(3, N).to(BF16) for _ in range(2)] + [torch.randn(N)]
    plain = gated_rms_norm(*given)
    other = gated_rms_norm(*given, **CALLS[name])
    assert not torch.equal(plain, other)
    assert_same([gated_rms_norm(*given), gated_rms_norm(*given, **CALLS[name])], [plain, other])
    without = gated_rms_norm(given[0], None, given[2])
    assert not torch.equal(plain, without)
    assert_same([gated_rms_norm(*given)], [plain])


def test_a_gate_that_is_x_itself_is_told_apart_from_another(driver) -> None:
    x, gate, weight = torch.randn(3, N), torch.randn(3, N), torch.randn(N)
    for _ in range(2):
        mine = gated_rms_norm(x, x, weight)
        torch.testing.assert_close(mine, gated_rms_norm(x, x.clone(), weight))
        assert not torch.equal(mine, gated_rms_norm(x, gate, weight))


@pytest.mark.parametrize("wrong", [{"group_size": 16.0}, {"group_size": 48}, {"activation": "relu"}, {"eps": -1.0}])
def test_an_error_is_raised_after_a_good_call(driver, wrong: dict[str, Any]) -> None:
    given = torch.randn(3, N), torch.randn(3, N), torch.randn(N)
    gated_rms_norm(*given, group_size=16)
    for _ in range(2):
        with pytest.raises(errors.MeshnormError):
            gated_rms_norm(*given, **wrong)


def test_what_is_remembered_is_bounded(driver, monkeypatch) -> None:
    monkeypatch.setattr(functional_gated, "MOST_KNOWN", 4)
    for rows in range(1, 20):
        gated_rms_norm(torch.randn(rows, N), torch.randn(rows, N))
        assert len(functional_gated._known) <= 4


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("n", "group"), [(128, 0), (8192, 1024), (8192, 0), (12288, 0), (16384, 0), (131072, 0)])
def test_replays_give_the_bits_of_the_op(n: int, group: int, before: bool) -> None:
    group = group or n
    x, gate, dy = (torch.randn(300, n, device="cuda", dtype=BF16) for _ in range(3))
    weight = torch.randn(n, device="cuda", dtype=BF16)
    leaves: Any = [t.requires_grad_() for t in (x, gate, weight)]
    options: Any = {"norm_before_gate": before, "group_size": group}
    y, rstd = ops_gated.gated_forward.op(*leaves, 1e-6, 0.0, "llama", before, "silu", group, 1)  # type: ignore[attr-defined]
    with torch.no_grad():
        gradients = ops_gated.gated_backward.op(  # type: ignore[attr-defined]
            *(dy, *leaves, rstd, 0.0, before, "silu", group, 1, True, True, BF16)
        )
    for _ in range(3):
        assert_same(results(*leaves, dy, **options), [y, *gradients])
        with torch.no_grad():
            assert_same([gated_rms_norm(*leaves, **options)], [y])
