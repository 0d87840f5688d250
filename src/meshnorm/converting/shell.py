"""A module's own forward, run on tensors that are not the module's."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshnorm.checks import DTYPES

# The width of a probe of a norm that holds no tensor and takes any width.
_WIDTH = 48
_INTERNAL = frozenset(vars(nn.Module())) | {"_is_hf_initialized"}


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

    def numbers(self) -> dict[str, float | None]:
        """The module's attributes that are numbers, or None: what could be an eps or an offset."""
        found = {}
        for name, value in vars(self.module).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in _INTERNAL and (number or value is None):
                found[name] = value
        return found

    def __call__(self, x: Tensor, tensor: Tensor | None, **attributes: Any) -> Tensor:
        """y of x, with ``tensor`` as the module's and ``attributes`` in place of its own. Raises Refused.

        The class's forward is called, not the module: no hook runs.
        """
        copied = object.__new__(type(self.module))
        state = dict(vars(self.module))
        for group in ("_parameters", "_buffers"):
            state[group] = {name: tensor if name == self.tensor else held for name, held in state[group].items()}
        copied.__dict__.update(state | attributes)
        try:
            y = type(self.module).forward(copied, x)
        except Exception as error:  # whatever the forward of a stranger raises is an answer
            said = " ".join(str(error).split())[:160]
            raise Refused(
                f"its forward fails on a {_name(x.dtype)} tensor of shape {tuple(x.shape)}: "
                f"{type(error).__name__}: {said}"
            ) from error
        if not isinstance(y, Tensor) or y.shape != x.shape:
            found = f"a tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise Refused(f"for a tensor of shape {tuple(x.shape)} its forward returns {found}")
        return y


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def signature(module: nn.Module) -> tuple[Any, ...]:
    """What a probe's answer depends on: of living modules that share it, one has to be probed."""
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.device.type)
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
    """Gradients on, autocast off, new tensors on ``device``; no warnings, torch's random state on the CPU as it was."""
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        device,
    ):
        warnings.simplefilter("ignore")
        yield


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def _argument(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        raise Refused("it is scripted: convert before torch.jit.script")
    if "forward" in vars(module):
        raise Refused("its forward was replaced on the instance: convert before whatever did that")
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Refused(f"its forward takes ({', '.join(p.name for p in parameters)}): an RMSNorm takes one tensor")
    return parameters[0].name


def _only_tensor(module: nn.Module) -> tuple[str | None, Tensor | None]:
    held = [(name, t) for group in (module._parameters, module._buffers) for name, t in group.items() if t is not None]
    if len(held) > 1:
        raise Refused(f"it holds {', '.join(name for name, _ in held)}: an RMSNorm holds one weight")
    if not held:
        return None, None
    ((name, tensor),) = held
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
