"""``convert`` on norms that are unusual: left with the reason, or right when what was probed no longer holds."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from norms import GemmaStyleNorm, LlamaNorm
from torch import Tensor, nn
from torch.nn.utils import parametrize

import meshnorm
from meshnorm.converting import converted


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The x of each call of rms_norm that converted modules make."""
    seen: list[Tensor] = []

    def counted(x, *args, **kwargs):
        seen.append(x)
        return meshnorm.rms_norm(x, *args, **kwargs)

    monkeypatch.setattr(converted, "rms_norm", counted)
    return seen


# --- weights that scale something other than whole rows ---


class BroadcastNorm(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight = nn.Parameter(torch.randn(1, 1, size))


class ScaleNorm(LlamaNorm):
    """One number scales rows of any width."""

    def __init__(self) -> None:
        super().__init__(1)


class EachHeadNorm(LlamaNorm):
    """x holds the heads side by side, the weight is one head's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.unflatten(-1, (-1, self.weight.shape[0]))).flatten(-2)


class ChannelNorm(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight = nn.Parameter(torch.randn(size, 1, 1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-3, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: BroadcastNorm(24), (2, 5, 24)),
        (lambda: ScaleNorm(), (2, 5, 24)),
        (lambda: EachHeadNorm(8), (2, 5, 24)),
        (lambda: ChannelNorm(8), (2, 8, 4, 4)),
    ],
    ids=["broadcast", "one number", "each head", "channels"],
)
def test_a_weight_that_scales_parts_of_rows_or_any_row_is_left(make, shape) -> None:
    norm, x = make(), torch.randn(shape)
    expected = norm(x)
    (left,) = meshnorm.convert(norm).left
    assert re.match(r"its weight of shape \(.+\) scales wider rows too: parts of them, or any", left.reason)
    assert torch.equal(norm(x), expected)


def test_a_norm_of_one_column_that_takes_no_other_is_converted() -> None:
    assert meshnorm.convert(nn.RMSNorm(1)).swapped


def test_an_x_of_another_width_is_told_as_before() -> None:
    norm = LlamaNorm(24)
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            norm(torch.randn(2, 23))
        messages.append(str(raised.value))
        meshnorm.convert(norm)
    assert messages[0] == messages[1]


# --- attributes ---


class ClassEpsNorm(LlamaNorm):
    variance_epsilon: float = 1e-5

    def __init__(self, size: int) -> None:
        super().__init__(size)
        del self.variance_epsilon


@pytest.mark.parametrize("make", [lambda: LlamaNorm(24, np.float32(1e-5)), lambda: ClassEpsNorm(24)])  # type: ignore[arg-type]
def test_an_eps_of_the_class_or_of_numpy_is_read_at_each_call(make) -> None:
    norm = make()
    (found,) = meshnorm.convert(norm).swapped
    assert found.eps == pytest.approx(1e-5)
    norm.variance_epsilon = np.float32(0.5)
    x = torch.randn(3, 24) * 1e-2
    torch.testing.assert_close(norm(x), LlamaNorm(24, 0.5)(x))


class SwitchedNorm(LlamaNorm):
    """What else changes y: a number and a switch."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.temperature, self.doubles, self.size = 1.0, False, size

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = super().forward(hidden_states) * self.temperature
        return 2 * y if self.doubles else y


@pytest.mark.parametrize(("name", "value"), [("temperature", 3.0), ("doubles", True)])
def test_when_an_attribute_changes_that_y_depends_on_the_norms_own_forward_runs(monkeypatch, name, value) -> None:
    norm, x, calls = SwitchedNorm(24), torch.randn(3, 24), _calls(monkeypatch)
    own = copy.deepcopy(norm)
    assert meshnorm.convert(norm).swapped
    norm.size = 12  # nothing reads it
    torch.testing.assert_close(norm(x), own(x))
    assert len(calls) == 1
    for each in (norm, own):
        setattr(each, name, value)
    torch.testing.assert_close(norm(x), own(x))
    assert len(calls) == 1


def test_an_offset_that_an_attribute_holds_may_change_later() -> None:
    class OffsetNorm(GemmaStyleNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.offset = 0.5

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return (wide * (self.offset + self.weight.float())).type_as(x)

    norm, x = OffsetNorm(24), torch.randn(3, 24)
    own = copy.deepcopy(norm)
    assert meshnorm.convert(norm).swapped[0].offset == 0.5
    for offset in (0.5, 2.0):
        norm.offset = own.offset = offset
        torch.testing.assert_close(norm(x), own(x))


def test_a_loose_tensor_is_no_eps() -> None:
    norm = LlamaNorm(24)
    norm.variance_epsilon = torch.tensor(1e-6)  # type: ignore[assignment]
    (left,) = meshnorm.convert(norm).left
    assert left.reason == "its variance_epsilon is a tensor that is neither parameter nor buffer"


class CountingNorm(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls, self.seen = 0, []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden_states)


class RememberingNorm(CountingNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        self.seen.append(hidden_states)
        return LlamaNorm.forward(self, hidden_states)


@pytest.mark.parametrize(("kind", "name"), [(CountingNorm, "calls"), (RememberingNorm, "seen")])
def test_a_norm_that_keeps_something_of_its_calls_is_left_and_sees_none_of_the_probe(kind, name) -> None:
    norm = kind(24)
    (left,) = meshnorm.convert(norm).left
    assert left.reason == f"its forward sets its {name}, which would no longer be set"
    assert norm.calls == 0 and norm.seen == []


# --- classes and modules ---


def test_a_lazy_norm_is_left() -> None:
    class LazyNorm(LlamaNorm):
        def __init__(self) -> None:
            super().__init__(1)
            self.weight = nn.UninitializedParameter()

    report = meshnorm.convert(nn.ModuleList([nn.LazyBatchNorm1d(), LazyNorm(), LlamaNorm(24)]))
    assert [entry.name for entry in report.swapped] == ["2"]
    assert report.left[1].reason == "its weight has no shape yet: convert after its first forward"


def test_a_parametrized_norm_is_left_and_a_converted_one_may_be_parametrized() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    norm, x = LlamaNorm(24), torch.randn(3, 24)
    expected = 2 * norm(x)
    meshnorm.convert(norm)
    parametrize.register_parametrization(norm, "weight", Doubled())
    torch.testing.assert_close(norm(x), expected)
    late = parametrize.register_parametrization(LlamaNorm(24), "weight", Doubled())
    (left,) = meshnorm.convert(late).left
    assert left.reason.startswith("its weight is parametrized")


def test_a_norm_that_is_made_of_a_converted_ones_class_is_one_that_is_not_converted(monkeypatch) -> None:
    norm, calls = LlamaNorm(24), _calls(monkeypatch)
    meshnorm.convert(norm)
    twin = type(norm)(16)
    assert twin(torch.randn(3, 16)).shape == (3, 16) and not calls
    assert repr(twin) == "LlamaNorm()" and meshnorm.revert(twin) == ()
    assert copy.deepcopy(twin)(torch.randn(3, 16)).shape == (3, 16) and not calls
    assert meshnorm.convert(twin).swapped and twin(torch.randn(3, 16)).shape == (3, 16) and len(calls) == 1
    assert meshnorm.revert(twin) == ("",) and type(twin) is LlamaNorm


def test_a_class_that_registers_its_subclasses_finds_none_of_ours() -> None:
    registry: dict[str, type] = {}

    class Registered(LlamaNorm):
        def __init_subclass__(cls, *, tag: str, **options: object) -> None:
            super().__init_subclass__(**options)
            registry[tag] = cls

    class TaggedNorm(Registered, tag="first"):
        pass

    norm = TaggedNorm(24)
    assert meshnorm.convert(norm).swapped and isinstance(norm, TaggedNorm)
    assert registry == {"first": TaggedNorm}


def test_parameters_from_outside_are_used() -> None:
    norm, x = LlamaNorm(24), torch.randn(3, 24)
    expected = 3 * norm(x)
    meshnorm.convert(norm)
    torch.testing.assert_close(torch.func.functional_call(norm, {"weight": torch.full((24,), 3.0)}, x), expected)


def test_a_nested_tensor_is_the_norms_own_business() -> None:
    norm = LlamaNorm(24)
    x = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(5, 24)], layout=torch.jagged)
    expected = norm(x)
    meshnorm.convert(norm)
    torch.testing.assert_close(norm(x).values(), expected.values())


def test_models_are_converted_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        norm = LlamaNorm(24, 1e-5)
        (found,) = meshnorm.convert(norm).swapped
        assert (found.casting_mode, found.eps) == ("llama", 1e-5)
        assert norm(torch.randn(2, 24)).shape == (2, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        modes = [meshnorm.convert(kind(24)).swapped[0].casting_mode for kind in (LlamaNorm, GemmaStyleNorm)]
    finally:
        torch.set_default_dtype(before)
    assert modes == ["llama", "gemma"]


# --- strides ---


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 5, 3, 24).transpose(1, 2),
        torch.randn(2, 5, 9, 24)[:, :, 3:6].transpose(1, 2),
        torch.randn(2, 5, 72)[..., 24:48],
        torch.randn(5, 2, 24).transpose(0, 1),
        torch.randn(2, 1, 24).expand(2, 5, 24),
        torch.randn(1, 5, 1, 24).transpose(1, 2),
    ],
    ids=["heads", "heads of a fused QKV", "a part of a fused QKV", "sequence first", "expanded", "one head"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_y_has_the_strides_it_had(x, dtype) -> None:
    norm, dy = LlamaNorm(24), torch.randn(x.shape).to(dtype)
    nn.init.normal_(norm.weight)
    norm, x = norm.to(dtype), x.to(dtype)
    found = []
    for _ in range(2):
        leaf = x.detach().requires_grad_()
        y = norm(leaf)
        found.append((y, *torch.autograd.grad(y, [leaf, norm.weight], dy)))
        meshnorm.convert(norm)
    (own_y, own_dx, own_dw), (y, dx, dw) = found
    strides, own_strides = ([t.stride(dim) for dim in range(t.ndim) if t.shape[dim] > 1] for t in (y, own_y))
    assert torch.equal(y, own_y) and strides == own_strides
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(dx, own_dx, **tolerance)
    torch.testing.assert_close(dw, own_dw, **({"rtol": 2e-2, "atol": 5e-2} if tolerance else {}))


def test_rows_in_another_order_are_not_copied(monkeypatch) -> None:
    norm, calls = LlamaNorm(24), _calls(monkeypatch)
    meshnorm.convert(norm)
    x = torch.randn(2, 5, 3, 24)
    y = norm(x.transpose(1, 2))
    assert calls[0].is_contiguous() and calls[0].data_ptr() == x.data_ptr()
    y.transpose(1, 2).view(2, 5, 72)  # as a model may go on


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_transposed_x_compiles_whole(dynamic) -> None:
    torch.compiler.reset()
    norm = LlamaNorm(24)
    meshnorm.convert(norm)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for sequence in (5, 7):
        x = torch.randn(2, sequence, 3, 24).transpose(1, 2)
        y = compiled(x)
        assert torch.equal(y, norm(x)) and y.stride() == norm(x).stride()


# --- torch.compile ---


def test_the_probe_compiles_nothing() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        compiled.append(graph)
        return graph

    class CompiledNorm(LlamaNorm):
        forward = torch.compile(LlamaNorm.forward, backend=backend)

    norm = CompiledNorm(24)
    assert meshnorm.convert(norm).swapped and not compiled
    norm(torch.randn(3, 24))
    assert not compiled
    CompiledNorm(24)(torch.randn(3, 24))
    assert len(compiled) == 1


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_what_was_compiled_before_follows_the_conversion_and_its_revert(monkeypatch, how) -> None:
    torch.compiler.reset()
    norm, x, calls = LlamaNorm(24), torch.randn(3, 24), _calls(monkeypatch)
    expected = norm(x)
    if how == "in place":
        norm.compile(backend="aot_eager")
        call: nn.Module = norm
    else:
        call = torch.compile(nn.Sequential(norm), backend="aot_eager")
    call(x)
    report = meshnorm.convert(call)
    assert len(report.swapped) == 1
    torch.testing.assert_close(call(x), expected)
    assert len(calls) == 1
    report.revert()
    torch.testing.assert_close(call(x), expected)
    assert len(calls) == 1
