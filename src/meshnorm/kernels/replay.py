"""Launching again, on other tensors, what a call of the same signature launched, without looking at any argument.

A call whose shapes, strides, dtypes, device and options are those of an earlier one launches the same compiled kernels
with the same grids and numbers; only addresses differ. So the first call is recorded and later ones are replayed.

A call can be replayed if all it did was to launch kernels on the tensors that it was given and on ``scratch``. A copy
that it made, or a workspace that lives on, is none of these, and then there is no replay: that is how a strided x that
has to be copied, or a row that is split over programs, go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .launching import Launched, tape
from .raw_launch import current_device, current_stream, is_watched, launcher
from .templates import template

if TYPE_CHECKING:
    from types import TracebackType

Step = tuple[Callable[..., None], tuple[int, ...], tuple, "itemgetter[Any]", tuple]


class Recording:
    """``with Recording() as recording: …`` records what this thread launches."""

    def __enter__(self) -> Recording:
        self._before = tape.launches, tape.scratch
        self.launches: list[Launched] = []
        self._scratch: list[Tensor] = []
        tape.launches, tape.scratch = self.launches, self._scratch
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tape.launches, tape.scratch = self._before

    def replay(self, *tensors: Tensor | None) -> Replay | None:
        """What was launched, to be called with the addresses of other ``tensors``; None where it cannot be."""
        places: dict[int, int] = {0: 0}  # None is at place 0
        for place, tensor in enumerate((*tensors, *self._scratch), 1):
            if tensor is not None and tensor.numel():
                if tensor.data_ptr() in places or tensor.data_ptr() % 16:
                    return None  # two that share their memory, or a kernel compiled for odd addresses
                places[tensor.data_ptr()] = place
        steps = []
        for launched in self.launches:
            step = _step(launched, places)
            if step is None:
                return None
            steps.append(step)
        if not steps:
            return None
        return Replay(self.launches[0].arguments[0].device, tuple(steps), self._scratch)


def _step(launched: Launched, places: dict[int, int]) -> Step | None:
    """(launch, grid, what comes between the stream and the addresses, which addresses, what comes after them)."""
    if launched.ready is None:
        return None
    arguments, count = launched.arguments, 0
    while count < len(arguments) and not isinstance(arguments[count], int):
        count += 1
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in arguments[:count]]
    if count < 2 or any(address not in places for address in addresses):
        return None
    if not all(argument is None or isinstance(argument, int) for argument in arguments[count:]):
        return None
    launch, fixed = launcher(launched.ready)
    which = itemgetter(*(places[address] for address in addresses))
    return launch, launched.grid, fixed, which, (*arguments[count:], *launched.constants)


class Replay:
    """See the module."""

    __slots__ = ("_device", "_scratch", "_steps")

    def __init__(self, device: torch.device, steps: tuple[Step, ...], scratch: Sequence[Tensor]) -> None:
        self._device = device.index if device.type == "cuda" else None
        self._steps = steps
        self._scratch = tuple(template(tensor) for tensor in scratch)

    def __call__(self, *addresses: int) -> bool:
        """Launches on the current stream. ``addresses`` are those of the tensors in order, multiples of 16, 0 for None.
        False, and nothing is done, where their device is not the current one, or launches are watched."""
        stream = 0
        if self._device is not None:
            if current_device() != self._device:
                return False
            stream = current_stream(self._device)
        if is_watched():
            return False
        scratch = [torch.empty_like(like) for like in self._scratch]  # held until all is launched
        places = (None, *addresses, *[tensor.data_ptr() for tensor in scratch])
        for launch, grid, fixed, which, rest in self._steps:
            launch(*grid, stream, *fixed, *which(places), *rest)
        return True
