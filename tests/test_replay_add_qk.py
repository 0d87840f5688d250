"""Norms of a sum, and of q and k, of a signature seen before launch what the first one launched, and give its bits: see
``test_replay``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import FakeDriver, with_driver
from test_kernels_triton import interpreter_does_as_the_hardware  # noqa: F401

from meshnorm import add_rms_norm, errors, functional, functional_qk, ops_add, ops_qk, qk_rms_norm
from meshnorm.kernels import gpu, qk

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
N = 64
BF16, F32 = torch.bfloat16, torch.float32
NORMS: dict[str, Callable[..., Any]] = {"add": add_rms_norm, "qk": qk_rms_norm}


def forget() -> None:
    functional._known_sums.clear()
    functional_qk._known.clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    if CUDA:
        pytest.skip("Triton's kernels are compiled here, and the driver is a real one: see the tests marked gpu")
    forget()
    for module in (ops_add, qk):
        monkeypatch.setattr(module, "kernels_for", lambda device: gpu)
    yield with_driver(monkeypatch)
    forget()


def drawn(name: str, rows: int, device: str = "cpu", n: int = N) -> list[Tensor]:
    """The inputs of a norm, and a gradient for each output."""
    if name == "add":
        shapes, dtypes = [(rows, n), (rows, n), (n,)], (BF16, F32, F32)
    else:
        shapes, dtypes = [(rows, 4, n), (rows, 2, n), (n,), (n,)], (BF16, BF16, F32, F32)
    inputs = [torch.randn(s, device=device).to(d).requires_grad_() for s, d in zip(shapes, dtypes, strict=True)]
    return [*inputs, *(torch.randn_like(t) for t in inputs[:2])]


def results(name: str, *given: Tensor, **options: Any) -> list[Tensor]:
    """The outputs, and the gradients of what requires one."""
    *inputs, first, second = given
    outputs = NORMS[name](*inputs, **options)
    wanted = [t for t in inputs if t.requires_grad]
    used = [(y, dy) for y, dy in zip(outputs, (first, second), strict=True) if y.requires_grad]
    gradients = torch.autograd.grad([y for y, _ in used], wanted, [dy for _, dy in used])
    return [*(t.detach() for t in outputs), *gradients]


def assert_same(some: Any, others: Any) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "frozen"), [("add", f) for f in ((), (0,), (1,), (2,), (0, 1))] + [("qk", f) for f in ((), (2, 3), (3,))]
)
@pytest.mark.parametrize("rows", [3, 300])
def test_a_second_call_launches_the_same_and_gives_the_same_bits(driver, name: str, frozen: tuple, rows: int) -> None:
    def inputs() -> list[Tensor]:
        given = drawn(name, rows)
        for place in frozen:
            given[place].requires_grad_(False)
        return given

    given = inputs()
    first = results(name, *given)
    ordinary, replayed = driver.counts()
    assert ordinary >= 2 and replayed == 0
    assert_same(results(name, *given), first)
    assert driver.counts() == (0, ordinary)
    other = inputs()
    again = results(name, *other)
    forget()
    assert_same(again, results(name, *other))


@pytest.mark.parametrize("name", NORMS)
def test_a_call_without_gradients_is_one_launch_and_has_no_rstd(driver, monkeypatch, name: str) -> None:
    given = [t.detach() for t in drawn(name, 5)[:-2]]
    op = ops_add.add_forward if name == "add" else ops_qk.qk_forward
    expected = op.direct(*given, 1e-6, 0.0, "llama", *((1,) if name == "add" else (1, 1)))[:2]  # type: ignore[attr-defined]
    driver.counts()
    for module in (ops_add, ops_qk):
        monkeypatch.setattr(module, "empty_per_row", lambda *a: pytest.fail("rstd is allocated"))
    for counts in ((1, 0), (0, 1)):
        assert_same(NORMS[name](*given), expected)
        assert driver.counts() == counts


@pytest.mark.parametrize("name", NORMS)
def test_one_output_alone_and_then_both_have_gradients(driver, name: str) -> None:
    *inputs, first, second = drawn(name, 5)

    def gradients(dys: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        used = [(y, dy) for y, dy in zip(NORMS[name](*inputs), dys, strict=True) if dy is not None]
        return torch.autograd.grad([y for y, _ in used], inputs, [dy for _, dy in used], allow_unused=True)

    which = (first, None), (None, second), (first, second)
    expected = []
    for dys in which:
        forget()
        expected.append(gradients(dys))
    for _ in range(3):
        for dys, exact in zip(which, expected, strict=True):
            for a, b in zip(gradients(dys), exact, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def test_transposed_heads_of_a_fused_projection_are_replayed_and_stay_so(driver) -> None:
    fused = torch.randn(2, 5, 6, N)
    q, k = (t.transpose(1, 2) for t in (fused[:, :, :4], fused[:, :, 4:]))
    first = qk_rms_norm(q, k)
    driver.counts()
    second = qk_rms_norm(q, k)
    assert driver.counts() == (0, 1)
    assert_same(second, first)
    assert second[0].transpose(1, 2).is_contiguous()


def test_x_and_the_residual_may_be_one_tensor_after_two(driver) -> None:
    x, residual, weight = torch.randn(3, N), torch.randn(3, N), torch.randn(N)
    add_rms_norm(x, residual, weight)
    expected = add_rms_norm(x, x.clone(), weight)
    assert_same(add_rms_norm(x, x, weight), expected)


@pytest.mark.parametrize(("name", "which"), [*(("add", p) for p in range(3)), *(("qk", p) for p in range(4))])
def test_other_alignments_take_the_ordinary_way_and_come_back(driver, name: str, which: int) -> None:
    given = [t.detach() for t in drawn(name, 3)[:-2]]
    odd, moved = list(given), given[which]
    odd[which] = torch.empty(moved.numel() + 1, dtype=moved.dtype)[1:].view(moved.shape).copy_(moved)
    expected = NORMS[name](*given)
    driver.counts()
    for call, replays in ((odd, False), (given, True), (odd, False)):
        assert_same(NORMS[name](*call), expected)
        ordinary, replayed = driver.counts()
        assert bool(replayed) == replays and bool(ordinary) != replays


@pytest.mark.parametrize("options", [{"eps": 1e-1}, {"offset": 1.0}, {"casting_mode": "none"}], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_call_is_not_taken_for_another_one(driver, name: str, options: dict[str, Any]) -> None:
    given = [t.detach() for t in drawn(name, 3)[:-2]]
    plain, other = NORMS[name](*given), NORMS[name](*given, **options)
    assert not torch.equal(plain[0], other[0])
    assert_same(NORMS[name](*given), plain)
    assert_same(NORMS[name](*given, **options), other)


@pytest.mark.parametrize("wrong", [{"eps": -1.0}, {"casting_mode": "fp32"}, {"offset": 0j}, {"weight_grad": "none"}])
@pytest.mark.parametrize("name", NORMS)
def test_an_error_is_raised_after_a_good_call(driver, name: str, wrong: dict[str, Any]) -> None:
    given = [t.detach() for t in drawn(name, 3)[:-2]]
    NORMS[name](*given)
    for _ in range(2):
        with pytest.raises(errors.MeshnormError):
            NORMS[name](*given, **wrong)


@pytest.mark.parametrize("name", NORMS)
def test_what_is_remembered_is_bounded(driver, monkeypatch, name: str) -> None:
    monkeypatch.setattr(functional, "MOST_KNOWN", 4)
    monkeypatch.setattr(functional_qk, "MOST_KNOWN", 4)
    for rows in range(1, 12):
        NORMS[name](*(t.detach() for t in drawn(name, rows)[:-2]))
        assert len(functional._known_sums) <= 4 and len(functional_qk._known) <= 4


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("n", [128, 4096, 16384])
@pytest.mark.parametrize("name", NORMS)
def test_replays_give_the_bits_of_the_first_call(name: str, n: int) -> None:
    given = drawn(name, 300, "cuda", n)
    forget()
    first = results(name, *given)
    for _ in range(3):
        assert_same(results(name, *given), first)
        with torch.no_grad():
            assert_same(NORMS[name](*given[:-2]), first[:2])
