"""A module's own forward, run on tensors that are not the module's."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes  # private; FakeTensorMode has no public way out

from meshnorm.checks import DTYPES

# The width of a probe of a norm that holds no tensor and takes any width.
_WIDTH = 48
_INTERNAL = frozenset(vars(nn.Module())) | {"_is_hf_initialized"}
_CONTAINERS = (list, dict, set)


class Refused(Exception):
    """The module is not one that ``meshnorm.rms_norm`` can stand in for; the message says why."""


class Shell:
    """Copies of a module that share its attributes and hold a given tensor where the module holds its weight.

    ``argument`` is the name of the forward's one argument, ``tensor`` that of the one tensor the module holds (None if
    it holds none), ``shape`` the sizes of the dims that such a tensor can scale, ``device`` where a probe should run.
    Raises Refused for a module that takes more arguments or holds more tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.argument = _argument(module)
        self.tensor, held = _only_tensor(module)
        self.dtype = None if held is None else held.dtype
        self.device = _device(held)
        given = getattr(module, "normalized_shape", None)
        self.given_shape: tuple[int, ...] | None = None
        if isinstance(given, (tuple, list)) and given and all(isinstance(size, int) for size in given):
            self.given_shape = tuple(given)
        self.shape = tuple(held.shape) if held is not None else self.given_shape or (_WIDTH,)
        self.ndim, self.width = len(self.shape), math.prod(self.shape)

    def attributes(self) -> dict[str, Any]:
        """The module's own attributes, and those of its class."""
        found: dict[str, Any] = {}
        for kind in type(self.module).__mro__:
            if kind is nn.Module:
                break
            found = vars(kind) | found
        found |= vars(self.module)
        return {name: value for name, value in found.items() if name not in _INTERNAL}

    def numbers(self) -> dict[str, float | None]:
        """The attributes that are numbers, or None: what could be an eps or an offset."""
        return {name: value for name, value in self.attributes().items() if value is None or _is_number(value)}

    def __call__(self, x: Tensor, tensor: Tensor | None, **attributes: Any) -> Tensor:
        """y of x, with ``tensor`` as the module's and ``attributes`` in place of its own. Raises Refused.

        The class's forward is called, not the module: no hook runs.
        """
        copied = object.__new__(type(self.module))
        state = {
            name: copy(value) if type(value) in _CONTAINERS else value for name, value in vars(self.module).items()
        }
        for group in ("_parameters", "_buffers"):
            state[group] = {name: tensor if name == self.tensor else held for name, held in state[group].items()}
        state |= attributes
        copied.__dict__.update(state)
        sizes = {name: len(value) for name, value in state.items() if type(value) in _CONTAINERS}
        try:
            y = type(self.module).forward(copied, x)
        except Exception as error:  # whatever the forward of a stranger raises is an answer
            said = " ".join(str(error).split())[:160]
            raise Refused(
                f"its forward fails on a {_name(x.dtype)} tensor of shape {tuple(x.shape)}: "
                f"{type(error).__name__}: {said}"
            ) from error
        for name, value in vars(copied).items():
            if value is not state.get(name, self) or (name in sizes and len(value) != sizes[name]):
                raise Refused(f"its forward sets its {name}, which would no longer be set")
        if not isinstance(y, Tensor) or y.shape != x.shape:
            found = f"a tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise Refused(f"for a tensor of shape {tuple(x.shape)} its forward returns {found}")
        return y


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """What a probe's answer depends on: of living modules that share it, one has to be probed."""
    tensors = tuple(
        (name, () if is_lazy(tensor) else tuple(tensor.shape), tensor.dtype, tensor.device.type)
        for group in (module._parameters, module._buffers)
        for name, tensor in group.items()
        if tensor is not None
    )
    attributes = tuple(
        (name, type(value), value if _is_plain(value) else id(value))
        for name, value in sorted(vars(module).items())
        if name not in _INTERNAL
    )
    return type(module), tensors, attributes


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Gradients on, autocast off, new tensors on ``device`` and with values; nothing compiled; no warnings, torch's
    random state on the CPU as it was."""
    with (
        ExitStack() as others,
        _disable_current_modes(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        device,
    ):
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # else there is no compiled forward, and importing it takes seconds
            others.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def _argument(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        raise Refused("it is scripted: convert before torch.jit.script")
    if "parametrizations" in module._modules:
        raise Refused("its weight is parametrized: convert before that, or remove the parametrization")
    if "forward" in vars(module):
        raise Refused("its forward was replaced on the instance: convert before whatever did that")
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Refused(f"its forward takes ({', '.join(p.name for p in parameters)}): an RMSNorm takes one tensor")
    return parameters[0].name


def _only_tensor(module: nn.Module) -> tuple[str | None, Tensor | None]:
    loose = next((name for name, value in vars(module).items() if isinstance(value, Tensor)), None)
    if loose is not None:
        raise Refused(f"its {loose} is a tensor that is neither parameter nor buffer")
    held = [(name, t) for group in (module._parameters, module._buffers) for name, t in group.items() if t is not None]
    if len(held) > 1:
        raise Refused(f"it holds {', '.join(name for name, _ in held)}: an RMSNorm holds one weight")
    if not held:
        return None, None
    ((name, tensor),) = held
    if is_lazy(tensor):
        raise Refused(f"its {name} has no shape yet: convert after its first forward")
    if tensor.dtype not in DTYPES:
        raise Refused(f"its {name} has dtype {_name(tensor.dtype)}")
    if tensor.ndim == 0 or 0 in tensor.shape:
        raise Refused(f"its {name} has shape {tuple(tensor.shape)}: an RMSNorm's weight is the size of its last dims")
    return name, tensor


def accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _device(tensor: Tensor | None) -> torch.device:
    """Where the tensor lies; where the model is likely to run if it lies nowhere."""
    if tensor is not None and not tensor.is_meta:
        return tensor.device
    return accelerator() or torch.device("cpu")
