"""``convert``: what is recognised and what is refused, that values stay what they were, and that the modules stay."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import weakref

import pytest
import torch
from norms import (
    CachingNorm,
    ChannelsFirstNorm,
    ClampedEpsNorm,
    ConstantEpsNorm,
    DetachedStatisticNorm,
    EpsOutsideNorm,
    GatedNorm,
    GemmaStyleNorm,
    GroupedNorm,
    LlamaNorm,
    NoneStyleNorm,
    OddOffsetNorm,
    OffsetInHalfNorm,
    OtherwiseIn4DNorm,
    OtherwiseInEvaluationNorm,
    RootAndDivisionNorm,
    RoundedStatisticNorm,
    SumNorm,
    T5StyleNorm,
    TwoWeightsNorm,
    Unnamed,
    UnusedBufferNorm,
    WeightlessNorm,
    WideUnderAutocastNorm,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import meshnorm
from meshnorm.converting import converted
from meshnorm.converting.rounding import admits
from meshnorm.errors import OptionError

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


def _drawn(module: nn.Module) -> nn.Module:
    for tensor in (*module.parameters(), *module.buffers()):
        torch.nn.init.normal_(tensor)
    return module


def _ours(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of each call of rms_norm that a converted module makes."""
    calls: list[tuple] = []

    def counted(*args, **kwargs):
        calls.append((args, kwargs))
        return meshnorm.rms_norm(*args, **kwargs)

    monkeypatch.setattr(converted, "rms_norm", counted)
    return calls


# --- what is recognised ---

KINDS = [
    (lambda: nn.RMSNorm(24), "gemma", 0.0, None),
    (lambda: nn.RMSNorm(24, eps=0.0), "gemma", 0.0, 0.0),
    (lambda: nn.RMSNorm((3, 8), eps=1e-5), "gemma", 0.0, 1e-5),
    (lambda: nn.RMSNorm((3, 8), eps=1e-5, elementwise_affine=False), "llama", 0.0, 1e-5),
    (lambda: LlamaNorm(24, 1e-5), "llama", 0.0, 1e-5),
    (lambda: LlamaNorm(24, 0), "llama", 0.0, 0),
    (lambda: RootAndDivisionNorm(24), "gemma", 0.0, 1e-5),
    (lambda: GemmaStyleNorm(24), "gemma", 1.0, 1e-6),
    (lambda: NoneStyleNorm(24), "none", 1.0, 1e-6),
    (lambda: T5StyleNorm(24), "llama", 0.0, 1e-6),
    (lambda: ConstantEpsNorm(24, 1e-6), "llama", 0.0, 1.5625e-7),
    (lambda: WeightlessNorm(), "llama", 0.0, 1e-6),
    (lambda: UnusedBufferNorm(24), "llama", 0.0, 1e-6),
]


@pytest.mark.parametrize("kind", KINDS, ids=range(len(KINDS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_order_offset_and_eps_are_found_by_what_the_norm_computes(kind, dtype) -> None:
    make, mode, offset, eps = kind
    for _ in range(3):  # fresh draws: the answer does not depend on them
        report = meshnorm.convert(make().to(dtype), dry_run=True)
        assert not report.left
        (found,) = report.swapped
        assert (found.casting_mode, found.offset, found.eps) == (mode, offset, eps)


@pytest.mark.parametrize("kind", KINDS, ids=range(len(KINDS)))
@pytest.mark.parametrize("x_dtype", (torch.float64, *DTYPES))
@pytest.mark.parametrize("w_dtype", (torch.float64, *DTYPES))
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_converted_norm_gives_what_it_gave_in_every_dtype(kind, x_dtype, w_dtype, scale) -> None:
    make, mode, offset, eps = kind
    norm = _drawn(make()).to(w_dtype)
    tensors = [t for t in (*norm.parameters(), *norm.buffers())] if not isinstance(norm, UnusedBufferNorm) else []
    shape = getattr(norm, "normalized_shape", (24,))
    x = (torch.randn(5, 7, *shape, dtype=torch.float64) * scale).to(x_dtype)
    expected = norm(x)
    assert meshnorm.convert(norm).swapped
    found = norm(x)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    eps = torch.finfo(torch.float64 if x_dtype == torch.float64 else torch.float32).eps if eps is None else eps
    weight = tensors[0].detach() if tensors else None
    for y in (expected, found):  # the same rounding of the same formula, to the last bits of float32
        if y.dtype == x_dtype:
            assert admits(y.detach(), x, weight, eps, offset, mode, len(shape), "fused")
    if x_dtype in HALVES and w_dtype == x_dtype:
        assert (found != expected).float().mean() < 0.01
    close = torch.finfo(expected.dtype).eps if expected.dtype in HALVES else 1e-5
    torch.testing.assert_close(found, expected, rtol=2 * close, atol=1e-6)


@pytest.mark.parametrize("make", [kind[0] for kind in KINDS[:-1]], ids=range(len(KINDS) - 1))
def test_gradients_are_those_of_the_norm_before(make) -> None:
    norm = _drawn(make())
    shape = getattr(norm, "normalized_shape", (24,))
    x, dy = torch.randn(5, 7, *shape), torch.randn(5, 7, *shape)
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        norm(leaf).backward(dy)
        found.append((leaf.grad, *(p.grad for p in norm.parameters())))
        meshnorm.convert(norm)
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_gradients_are_no_further_from_float64_than_the_norms_own() -> None:
    for make, *_ in KINDS[:-2]:
        norm = _drawn(make()).bfloat16()
        shape = getattr(norm, "normalized_shape", (24,))
        x, dy = torch.randn(64, *shape).bfloat16(), torch.randn(64, *shape).bfloat16()
        exact = copy.deepcopy(norm).double()
        meshnorm.convert(exact)
        errors: list[list[float]] = []
        leaf = x.double().requires_grad_()
        exact(leaf).backward(dy.double())
        best = (leaf.grad, *(p.grad for p in exact.parameters()))
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            norm.zero_grad()
            norm(leaf).backward(dy)
            gradients = (leaf.grad, *(p.grad for p in norm.parameters()))
            errors.append([(g.double() - b).norm().item() for g, b in zip(gradients, best, strict=True)])
            meshnorm.convert(norm)
        for theirs, ours, b in zip(*errors, best, strict=True):
            assert ours <= theirs + 2.0**-9 * b.norm().item()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.LayerNorm(24), "it holds weight, bias"),
        (lambda: nn.LayerNorm(24, bias=False), "it subtracts the mean"),
        (lambda: nn.LayerNorm(24, elementwise_affine=False), "it subtracts the mean"),
        (lambda: nn.BatchNorm1d(24), "it holds weight, bias, running_mean"),
        (lambda: GatedNorm(24), r"its forward takes \(hidden_states, gate\)"),
        (lambda: SumNorm(24), "it does not compute"),
        (lambda: GroupedNorm(24), "it does not compute"),
        (lambda: EpsOutsideNorm(24), "it does not compute"),
        (lambda: ClampedEpsNorm(24), "it does not compute"),
        (lambda: RoundedStatisticNorm(24), "in bfloat16 it rounds where none of the casting modes does"),
        (lambda: OffsetInHalfNorm(24), "in bfloat16 it rounds where none of the casting modes does"),
        (lambda: DetachedStatisticNorm(24), "the gradient of its x is not that of"),
        (lambda: OtherwiseInEvaluationNorm(24), "it does not compute"),
        (lambda: ChannelsFirstNorm(24), r"its forward fails on a float32 tensor of shape \(1, 4, 22, 24\)"),
        (lambda: OtherwiseIn4DNorm(24), "for an x of 4 dims it computes something other"),
        (lambda: OddOffsetNorm(24), "it adds about 0.3 to its weight"),
        (lambda: TwoWeightsNorm(24), "it holds weight, bias"),
        (lambda: LlamaNorm(24).to(torch.float8_e4m3fn), "its weight has dtype float8_e4m3fn"),
        (lambda: meshnorm.RMSNorm(24), "it is meshnorm's already"),
    ],
)
def test_what_is_no_such_norm_is_left_with_the_reason(make, reason) -> None:
    norm = make()
    kind, state = type(norm), dict(vars(norm))
    report = meshnorm.convert(norm)
    assert not report.swapped
    (left,) = report.left
    assert re.match(reason, left.reason), left.reason
    assert type(norm) is kind and vars(norm) == state


def test_where_dtypes_meet_that_have_no_match_the_norms_own_forward_runs(monkeypatch) -> None:
    norm = _drawn(T5StyleNorm(24)).bfloat16()
    x = torch.randn(5, 24)
    expected = norm(x)
    meshnorm.convert(norm)
    calls = _ours(monkeypatch)
    assert torch.equal(norm(x), expected) and not calls  # it rounds a float32 x̂ to bfloat16: nothing of ours does
    norm(x.bfloat16())
    assert len(calls) == 1


def test_an_attribute_changed_later_counts() -> None:
    norm, x = _drawn(LlamaNorm(24)), torch.randn(5, 24) * 1e-3
    meshnorm.convert(norm)
    norm.variance_epsilon = 0.5
    assert torch.equal(norm(x), meshnorm.rms_norm(x, norm.weight, 0.5))


def test_an_attribute_that_is_not_read_does_not_count() -> None:
    norm, x = _drawn(ConstantEpsNorm(24, 1.5625e-7)), torch.randn(5, 24) * 1e-3
    expected = norm(x)
    meshnorm.convert(norm)
    norm.variance_epsilon = 0.5
    torch.testing.assert_close(norm(x), expected)


def test_autocast_gives_what_it_gave(monkeypatch) -> None:
    x, calls = torch.randn(5, 24), _ours(monkeypatch)
    for make in (lambda: LlamaNorm(24), lambda: nn.RMSNorm(24), lambda: WideUnderAutocastNorm(24)):
        norm = _drawn(make())
        for inputs in (x, x.bfloat16()):
            calls.clear()
            with torch.autocast("cpu", torch.bfloat16):
                expected = norm(inputs)
                meshnorm.convert(norm)
                found = norm(inputs)
                meshnorm.revert(norm)
            assert found.dtype == expected.dtype and len(calls) == 1
            torch.testing.assert_close(found, expected, rtol=1e-2 if found.dtype != torch.float32 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [2, 3, 515, 4096])
@pytest.mark.parametrize("make", [LlamaNorm, RootAndDivisionNorm, GemmaStyleNorm, NoneStyleNorm])
def test_the_cast_order_is_found_at_any_width(make, width) -> None:
    expected = {LlamaNorm: "llama", RootAndDivisionNorm: "gemma", GemmaStyleNorm: "gemma", NoneStyleNorm: "none"}
    for _ in range(5):
        (found,) = meshnorm.convert(make(width)).swapped
        assert found.casting_mode == expected[make]


# --- the model around it ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = LlamaNorm(24)
        self.second = nn.RMSNorm(24)
        self.linear = nn.Linear(24, 24)
        self.layer_norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.linear(self.second(self.first(hidden_states=x))))


def test_the_report_says_what_was_swapped_and_what_was_left() -> None:
    model = nn.Sequential(Block(), Block())
    report = meshnorm.convert(model)
    assert [entry.name for entry in report.swapped] == ["0.first", "0.second", "1.first", "1.second"]
    assert [(entry.name, entry.class_name) for entry in report.left] == [
        ("0.layer_norm", "LayerNorm"),
        ("1.layer_norm", "LayerNorm"),
    ]
    assert repr(report).splitlines() == [
        "4 norms swapped, 2 left",
        "    2 × LlamaNorm(24): casting_mode='llama', eps=1e-06  [0.first, 1.first]",
        "    2 × RMSNorm(24): casting_mode='gemma', eps=None  [0.second, 1.second]",
        "    2 × LayerNorm, left: it holds weight, bias: an RMSNorm holds one weight  [0.layer_norm, 1.layer_norm]",
    ]
    again = meshnorm.convert(model)
    assert not again.swapped and {entry.reason for entry in again.left[:2]} == {"it is converted already"}


def test_a_kind_is_probed_once(monkeypatch) -> None:
    from meshnorm.converting import convert as walk

    probed = []
    monkeypatch.setattr(walk, "recipe_of", lambda module, real=walk.recipe_of: probed.append(module) or real(module))
    model = nn.ModuleList([*(LlamaNorm(24) for _ in range(20)), LlamaNorm(16), LlamaNorm(24, 1e-5), nn.LayerNorm(8)])
    model.append(nn.LayerNorm(8))
    assert len(meshnorm.convert(model).swapped) == 22
    assert len(probed) == 4


def test_a_dry_run_changes_nothing() -> None:
    model = Block()
    report = meshnorm.convert(model, dry_run=True)
    assert len(report.swapped) == 2 and str(report).startswith("2 norms would be swapped, 1 left")
    assert type(model.first) is LlamaNorm and not vars(model.first).keys() ^ vars(LlamaNorm(24)).keys()


def test_where_picks_the_norms() -> None:
    model = Block()
    report = meshnorm.convert(model, where=lambda name, module: name == "second")
    assert [entry.name for entry in report.swapped] == ["second"]
    assert report.left[0].reason == "where() excludes it"


def test_options_reach_the_norm_and_wrong_ones_are_refused(monkeypatch) -> None:
    model, calls = Block(), _ours(monkeypatch)
    meshnorm.convert(model, hidden="gather", weight_grad="reduced")
    model(torch.randn(5, 24))
    assert [(kwargs["hidden"], kwargs["weight_grad"]) for _, kwargs in calls] == [("gather", "reduced")] * 2
    with pytest.raises(OptionError, match="hidden is 'keep'"):
        meshnorm.convert(Block(), hidden="keep")
    with pytest.raises(OptionError, match="weight_grad is 'none'"):
        meshnorm.convert(Block(), weight_grad="none")
    with pytest.raises(TypeError, match="model is a list"):
        meshnorm.convert([Block()])  # type: ignore[arg-type]


@pytest.mark.parametrize("undo", ["report", "function"])
def test_it_can_be_undone(undo, monkeypatch) -> None:
    model, x = Block(), torch.randn(5, 24)
    expected, words, states = model(x), repr(model), [dict(vars(m)) for m in model.modules()]
    report, calls = meshnorm.convert(model), _ours(monkeypatch)
    model(x)
    assert len(calls) == 2
    if undo == "report":
        report.revert()
    else:
        assert meshnorm.revert(model) == ("first", "second")
        assert meshnorm.revert(model) == ()
    assert type(model.first) is LlamaNorm and type(model.second) is nn.RMSNorm and repr(model) == words
    assert [dict(vars(m)) for m in model.modules()] == states
    assert torch.equal(model(x), expected) and len(calls) == 2


def test_a_report_keeps_no_model_alive() -> None:
    model = Block()
    report, gone = meshnorm.convert(model), weakref.ref(model.first)
    del model
    gc.collect()
    assert gone() is None
    report.revert()


def test_the_modules_stay_what_they_were() -> None:
    model = Block().eval()
    model.second.weight = model.first.weight
    model.first.weight.requires_grad_(False)
    modules, parameters = list(model.modules()), dict(model.named_parameters(remove_duplicate=False))
    buffers, keys = list(model.buffers()), list(model.state_dict())
    state = torch.get_rng_state()
    meshnorm.convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(parameters) and all(after[name] is parameters[name] for name in after)
    assert model.first.weight is model.second.weight and not model.first.weight.requires_grad
    assert list(model.buffers()) == buffers and list(model.state_dict()) == keys
    assert isinstance(model.first, LlamaNorm) and isinstance(model.second, nn.RMSNorm)
    assert type(model.first).__name__ == "LlamaNorm" and not model.first.training
    assert repr(model.first) == "LlamaNorm(meshnorm: casting_mode='llama')"
    assert repr(model.second) == "RMSNorm((24,), eps=None, elementwise_affine=True, meshnorm: casting_mode='gemma')"


def test_hooks_fire_as_before_and_not_in_the_probe() -> None:
    norm, seen = LlamaNorm(24), []
    norm.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    norm.register_forward_hook(lambda module, args, y: seen.append("forward") or 2 * y)
    norm.register_full_backward_hook(lambda module, dx, dy: seen.append("backward"))
    norm.register_full_backward_pre_hook(lambda module, dy: seen.append("backward pre"))
    x = torch.randn(5, 24, requires_grad=True)
    expected = norm(x).detach()
    seen.clear()
    meshnorm.convert(norm)
    assert not seen
    y = norm(x)
    torch.testing.assert_close(y.detach(), expected)
    y.sum().backward()
    assert seen == ["pre", "forward", "backward pre", "backward"]


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_a_copy_is_converted_too(copied, monkeypatch) -> None:
    model, x = Block(), torch.randn(5, 24)
    _drawn(model.first)
    meshnorm.convert(model)
    for norm in (model.first, model.second):
        twin, calls = copied(norm), _ours(monkeypatch)
        assert type(twin) is type(norm) and repr(twin) == repr(norm)
        assert torch.equal(twin(x), norm(x)) and len(calls) == 2
        assert meshnorm.revert(twin) == ("",) and type(twin) is type(norm).__mro__[2]
        assert meshnorm.convert(twin).swapped
    assert copied(model)(x).shape == (5, 24)


def test_a_class_that_says_what_of_it_is_pickled_is_heard() -> None:
    norm = _drawn(CachingNorm(24))
    meshnorm.convert(norm)
    norm.cache = torch.ones(3)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert twin.cache is None and meshnorm.revert(twin) and torch.equal(twin.weight, norm.weight)


def test_what_a_class_does_with_super_still_works() -> None:
    class WithResetNorm(nn.RMSNorm):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            self.resets = getattr(self, "resets", 0) + 1

    norm = WithResetNorm(24)
    meshnorm.convert(norm)
    norm.reset_parameters()
    assert norm.resets == 2


def test_a_norm_that_someone_has_replaced_is_left() -> None:
    norm = LlamaNorm(24)
    norm.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]
    (left,) = meshnorm.convert(norm).left
    assert left.reason.startswith("its forward was replaced on the instance")


def test_forward_has_the_signature_it_had() -> None:
    norm = LlamaNorm(24)
    before = inspect.signature(type(norm).forward)
    meshnorm.convert(norm)
    assert inspect.signature(type(norm).forward) == before and list(before.parameters) == ["self", "hidden_states"]


def test_wrong_calls_are_told_as_before() -> None:
    norm = LlamaNorm(24)
    messages = []
    for _ in range(2):
        for arguments, named in (((), {}), ((torch.ones(24),) * 2, {}), ((), {"nothing": torch.ones(24)})):
            with pytest.raises(TypeError) as raised:
                norm(*arguments, **named)
            messages.append(str(raised.value))
        meshnorm.convert(norm)
    assert messages[:3] == messages[3:]


@pytest.mark.parametrize("make", [lambda: LlamaNorm(24), lambda: nn.RMSNorm(24), lambda: GemmaStyleNorm(24)])
def test_a_model_on_the_meta_device_is_converted_before_it_has_values(make) -> None:
    with torch.device("meta"):
        norm = make()
    assert meshnorm.convert(norm).swapped and norm.weight.is_meta
    assert norm(torch.empty(5, 24, device="meta")).shape == (5, 24)
    norm.to_empty(device="cpu")
    twin = make()
    norm.load_state_dict(_drawn(twin).state_dict())
    x = torch.randn(5, 24)
    torch.testing.assert_close(norm(x), twin(x))


def test_a_norm_whose_name_says_nothing_is_not_looked_at() -> None:
    report = meshnorm.convert(nn.Sequential(Unnamed(24), nn.Linear(24, 24)))
    assert not report.swapped and not report.left


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_whole(dynamic) -> None:
    torch.compiler.reset()
    model = Block()
    meshnorm.convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for rows in (5, 7):
            x = torch.randn(rows, 24, dtype=dtype)
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("make", [lambda: LlamaNorm(24), lambda: T5StyleNorm(24)])
def test_mixed_dtypes_compile_whole(make) -> None:
    torch.compiler.reset()
    norm = _drawn(make())
    meshnorm.convert(norm)
    x = torch.randn(5, 24).bfloat16().requires_grad_()
    y = torch.compile(norm, backend="aot_eager", fullgraph=True)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, norm(x))
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    norm.bfloat16()  # T5 has no match for a float32 x then: its own forward is compiled
    x = torch.randn(5, 24)
    torch.testing.assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(x), norm(x))


def test_layers_compiled_one_by_one_share_their_code_as_before() -> None:
    counts = []
    for converts in (False, True):
        torch.compiler.reset()
        layers = nn.ModuleList(nn.Sequential(LlamaNorm(24), nn.Linear(24, 24)) for _ in range(10))
        if converts:
            meshnorm.convert(layers)
            layers = copy.deepcopy(layers)  # each with a recipe of its own
        counter = CompileCounterWithBackend("aot_eager")
        x = torch.randn(5, 24)
        for layer in layers:
            layer.compile(backend=counter, fullgraph=True)
            x = layer(x)
        counts.append(counter.frame_count)
    assert counts[1] == counts[0] < 10


def test_it_exports() -> None:
    model, x = Block(), torch.randn(5, 24)
    meshnorm.convert(model)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
