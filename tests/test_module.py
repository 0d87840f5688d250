"""The module: a torch.nn.RMSNorm in everything but how it computes."""

from __future__ import annotations

import copy
import pickle
import zlib

import pytest
import torch
from torch import Tensor

import meshnorm
from meshnorm import rms_norm


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Fresh inputs in each run; --hypothesis-seed, which the header prints, repeats them.
    torch.manual_seed(zlib.crc32(f"{request.config.getoption('hypothesis_seed')} {request.node.nodeid}".encode()))


def _drawn(module: torch.nn.Module) -> torch.nn.Module:
    """The module with random parameters."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def _custom() -> meshnorm.RMSNorm:
    """A norm none of whose arguments is the default."""
    norm = meshnorm.RMSNorm(
        16,
        eps=1e-3,
        offset=1.0,
        casting_mode="gemma",
        hidden="gather",
        weight_grad="reduced",
        in_place=True,
    )
    return _drawn(norm)  # type: ignore[return-value]


def _assert_like_torch(found: Tensor, expected: Tensor) -> None:
    # Two float32 results of the same formula, each off by some ulp.
    torch.testing.assert_close(found, expected, rtol=16 * torch.finfo(torch.float32).eps, atol=0.0)


def test_it_is_a_torch_rmsnorm() -> None:
    norm = meshnorm.RMSNorm(16)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert list(norm.state_dict()) == list(torch.nn.RMSNorm(16).state_dict()) == ["weight"]


@pytest.mark.parametrize("arguments", [(16,), ((3, 16),), (16, 1e-3), (16, None, False)])
def test_defaults_give_what_torch_gives(arguments: tuple) -> None:
    ours, theirs = meshnorm.RMSNorm(*arguments), torch.nn.RMSNorm(*arguments)
    x = torch.randn(5, 3, 16) * 1e-3  # x² is about 1e-6: eps counts
    _assert_like_torch(ours(x), theirs(x))


def test_eps_none_is_torchs_default_and_not_that_of_the_function() -> None:
    x = torch.randn(5, 16) * 1e-3
    norm = meshnorm.RMSNorm(16)
    assert norm.eps is None
    assert torch.equal(norm(x), rms_norm(x, norm.weight, torch.finfo(torch.float32).eps))
    assert not torch.equal(norm(x), rms_norm(x, norm.weight))


def test_every_argument_reaches_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, calls = _custom(), []
    norm.output_placements = ("P",)  # type: ignore[assignment]
    monkeypatch.setattr("meshnorm.module.rms_norm", lambda *args, **kwargs: calls.append((args, kwargs)))
    x = torch.randn(5, 16)
    norm(x)
    ((args, options),) = calls
    assert args[0] is x and args[1] is norm.weight and args[2] == 1e-3
    assert options == {
        "offset": 1.0,
        "casting_mode": "gemma",
        "normalized_shape": (16,),
        "hidden": "gather",
        "weight_grad": "reduced",
        "output_placements": ("P",),
        "in_place": True,
    }


def test_forward_and_backward_are_those_of_the_function() -> None:
    norm, x, dy = _custom(), torch.randn(5, 16), torch.randn(5, 16)
    leaf, weight = x.clone().requires_grad_(), norm.weight.detach().clone().requires_grad_()
    y = rms_norm(leaf, weight, 1e-3, offset=1.0, casting_mode="gemma")
    y.backward(dy)
    x.requires_grad_()
    found = norm(x)
    assert torch.equal(found, y)
    found.backward(dy.clone())
    assert torch.equal(x.grad, leaf.grad)
    assert torch.equal(norm.weight.grad, weight.grad)


@pytest.mark.parametrize("shape", [16, (3, 16)])
def test_state_dicts_go_both_ways(shape: int | tuple[int, ...]) -> None:
    x = torch.randn(5, 3, 16)
    theirs, ours = _drawn(torch.nn.RMSNorm(shape)), meshnorm.RMSNorm(shape)
    ours.load_state_dict(theirs.state_dict())
    _assert_like_torch(ours(x), theirs(x))
    ours, theirs = _drawn(meshnorm.RMSNorm(shape)), torch.nn.RMSNorm(shape)
    theirs.load_state_dict(ours.state_dict())
    _assert_like_torch(ours(x), theirs(x))


@pytest.mark.parametrize(("offset", "start"), [(0.0, 1.0), (1.0, 0.0), (0.25, 0.75)])
def test_the_norm_starts_at_a_scale_of_one(offset: float, start: float) -> None:
    norm = meshnorm.RMSNorm(16, offset=offset)
    assert torch.equal(norm.weight, torch.full((16,), start))
    torch.nn.init.normal_(norm.weight)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.full((16,), start))
    x = torch.randn(5, 16)
    assert torch.equal(norm(x), meshnorm.RMSNorm(16)(x))


def test_repr_tells_what_differs_from_torch() -> None:
    assert (
        repr(meshnorm.RMSNorm(16, eps=1e-5))
        == "RMSNorm((16,), eps=1e-05, elementwise_affine=True, casting_mode='llama')"
    )
    words = repr(_custom())
    assert "offset=1.0" in words
    assert "casting_mode='gemma'" in words


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_the_same_norm_with_its_own_weight(copied) -> None:
    norm, x = _custom(), torch.randn(5, 16)
    twin = copied(norm)
    assert type(twin) is meshnorm.RMSNorm
    assert repr(twin) == repr(norm)
    assert (twin.hidden, twin.weight_grad, twin.in_place) == ("gather", "reduced", True)
    assert torch.equal(twin(x), norm(x))
    with torch.no_grad():
        norm.weight.add_(1.0)
    assert not torch.equal(twin(x), norm(x))


@pytest.mark.parametrize("affine", [True, False])
def test_the_class_of_a_torch_norm_can_be_swapped(affine: bool) -> None:
    norm = _drawn(torch.nn.RMSNorm(16, eps=1e-5, elementwise_affine=affine))
    x = torch.randn(5, 16)
    expected = norm(x)
    norm.__class__ = meshnorm.RMSNorm
    assert torch.equal(norm(x), rms_norm(x, norm.weight, 1e-5))
    _assert_like_torch(norm(x), expected)
    assert "casting_mode='llama'" in repr(norm)
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))
    norm.reset_parameters()


def test_a_norm_made_on_the_meta_device_can_be_materialized() -> None:
    with torch.device("meta"):
        norm = meshnorm.RMSNorm(16, offset=1.0)
    assert norm.weight.is_meta
    assert norm(torch.empty(5, 16, device="meta")).shape == (5, 16)
    norm.to_empty(device="cpu")
    norm.reset_parameters()
    x = torch.randn(5, 16)
    assert torch.equal(norm(x), meshnorm.RMSNorm(16)(x))


def test_without_affine_there_is_no_weight() -> None:
    norm = meshnorm.RMSNorm((3, 16), 1e-6, elementwise_affine=False)
    assert norm.weight is None and not list(norm.parameters()) and not norm.state_dict()
    norm.reset_parameters()
    x = torch.randn(5, 3, 16)
    assert torch.equal(norm(x), rms_norm(x, normalized_shape=(3, 16)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_are_those_of_the_weight(dtype: torch.dtype) -> None:
    norm = meshnorm.RMSNorm(16, device="meta", dtype=dtype)
    assert (norm.weight.device.type, norm.weight.dtype) == ("meta", dtype)
    norm = meshnorm.RMSNorm(16, device="cpu", dtype=dtype)
    for other in (torch.float32, torch.bfloat16):  # y has x's dtype whatever the weight's
        assert norm(torch.randn(5, 16, dtype=other)).dtype == other


def test_x_can_be_named() -> None:
    norm, x = _custom(), torch.randn(5, 16)
    assert torch.equal(norm(x=x), norm(x))


def test_a_norm_over_other_dims_is_refused() -> None:
    for norm in (meshnorm.RMSNorm(8), meshnorm.RMSNorm(8, elementwise_affine=False)):
        with pytest.raises(ValueError, match=r"normalized_shape is \(8,\), but x has shape \(5, 16\)"):
            norm(torch.randn(5, 16))


def test_symbolic_tracing_takes_the_norm_as_one_call() -> None:
    """As it takes ``torch.nn.RMSNorm``, into which it does not look either."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), meshnorm.RMSNorm(8, offset=1.0, casting_mode="gemma"))
    x = torch.randn(3, 8)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
