"""One provider after the other at one shape after the other: held against float64, then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .correctness import Inputs, fault_of_backward, fault_of_forward
from .job import Job, Result
from .providers import Norm, Provider, in_one_line
from .timing import Call, device_time, graph_time, host_time, peak_memory

# Below this many elements a call takes a GPU about as long as the host takes to launch it: worth a CUDA graph's figure.
SMALL = 2**22


def measure(job: Job, providers: Sequence[Provider]) -> Iterator[Result]:
    """Results in the order of shapes, then providers, then passes."""
    generator = torch.Generator(job.device).manual_seed(0)
    for m, n in job.shapes:
        for provider in providers:
            yield from _measure_one(job, m, n, provider, generator)
            if job.device == "cuda":
                torch.cuda.empty_cache()


def _measure_one(job: Job, m: int, n: int, provider: Provider, generator: torch.Generator) -> Iterator[Result]:
    results = {which: Result(provider.name, provider.version, m, n, job.dtype, which) for which in job.passes}
    try:
        norm = provider.prepare()
        inputs = Inputs.drawn(m, n, job.torch_dtype, generator)
    except Exception as error:  # a shape that does not fit, or a provider that does not start
        yield from (replace(result, reason=in_one_line(error)) for result in results.values())
        return
    for which, result in results.items():
        take = _forward if which == "forward" else _backward
        try:
            yield take(job, norm, inputs, result)
        except Exception as error:  # whatever another library may raise on a shape that it does not take
            yield replace(result, reason=in_one_line(error))


def _forward(job: Job, norm: Norm, inputs: Inputs, result: Result) -> Result:
    """Without gradients."""
    fault = fault_of_forward(inputs, norm(inputs.x, inputs.weight))
    if fault:
        return replace(result, reason=fault)

    def call() -> object:
        return norm(inputs.x, inputs.weight)

    return _timed(job, result, lambda: call, call)


def _backward(job: Job, norm: Norm, inputs: Inputs, result: Result) -> Result:
    """dX and dW through autograd, of a y that is there already."""
    leaves = _leaves(inputs)

    def both() -> object:
        return _gradients(norm(*leaves), leaves, inputs.dy)

    def prepare() -> Call:
        leaves = _leaves(inputs)  # of their own, so that they belong to the stream of this y
        y = norm(*leaves)
        return lambda: _gradients(y, leaves, inputs.dy)

    fault = _fault_through_autograd(norm, inputs)
    if fault:
        return replace(result, reason=fault)
    return _timed(job, result, prepare, both)


def _fault_through_autograd(norm: Norm, inputs: Inputs) -> str:
    leaves = _leaves(inputs)
    y = norm(*leaves)
    return fault_of_forward(inputs, y.detach()) or fault_of_backward(inputs, *_gradients(y, leaves, inputs.dy))


def _leaves(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()


def _gradients(y: Tensor, leaves: tuple[Tensor, Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy, retain_graph=True)


def _timed(job: Job, result: Result, prepare: Callable[[], Call], queued: Call) -> Result:
    """``prepare`` makes what the device is timed on, ``queued`` is what the host's time is taken of."""
    call = prepare()
    result = replace(result, device_us=device_time(call, job.device, job.rep_ms))
    if job.device == "cpu":
        return result
    result = replace(result, peak_mib=peak_memory(call), host_us=host_time(queued))
    if result.m * result.n > SMALL:
        return result
    try:
        return replace(result, graph_us=graph_time(prepare))
    except Exception as error:  # not every library can be captured; its other figures stand
        return replace(result, reason=f"no CUDA graph: {in_one_line(error)}")
