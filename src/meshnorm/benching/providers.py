"""Who is timed: meshnorm and every other RMSNorm that this machine has, each through its public function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6

Norm = Callable[[Tensor, Tensor], Tensor]
"""(x of shape (M, N), weight of shape (N,)) -> y of x's shape, differentiable in both."""


@dataclass(frozen=True)
class Provider:
    """``prepare`` is called once for each shape and returns the norm to run there."""

    name: str
    version: str
    prepare: Callable[[], Norm]


@dataclass(frozen=True)
class _Source:
    """Where a provider comes from: its package, whether it needs a GPU, how its norm is loaded, and whether it compiles
    kernels at their first call."""

    package: str
    needs_gpu: bool
    load: Callable[[], Callable[[], Norm]]
    compiles: bool = True


def find_providers(names: Sequence[str], device: str) -> tuple[list[Provider], dict[str, str]]:
    """Those of ``names`` that can run on ``device`` ("cpu" or "cuda"), and of the others the reason why not."""
    found, missing = [], {}
    for name in names:
        source = SOURCES[name]
        if source.needs_gpu and device == "cpu":
            missing[name] = "needs a CUDA GPU"
            continue
        try:
            found.append(Provider(name, _version(source.package), source.load()))
        except Exception as error:  # whatever another library's import may raise
            missing[name] = in_one_line(error)
    return found, missing


def in_one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(importlib.import_module(package.replace("-", "_")), "__version__", "unknown")


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _meshnorm() -> Callable[[], Norm]:
    from meshnorm import rms_norm

    return lambda: lambda x, weight: rms_norm(x, weight, EPS)


def _eager() -> Callable[[], Norm]:
    return lambda: lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)


def _compile() -> Callable[[], Norm]:
    # The compiled backward otherwise reuses rstd's memory, and refuses a second run on the same y.
    # Private, but what the refusal itself names; seen on torch 2.11 and 2.13.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False

    def prepare() -> Norm:
        torch.compiler.reset()  # or the ninth shape would fall back to eager
        return torch.compile(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS), dynamic=False)

    return prepare


def _liger() -> Callable[[], Norm]:
    norm = _function("liger_kernel.transformers.functional", "liger_rms_norm")
    # in_place would write dX over dY, which nobody else does, and every next call would get another dY.
    return lambda: lambda x, weight: norm(x, weight, EPS, 0.0, "llama", False)


def _quack() -> Callable[[], Norm]:
    norm = _function("quack.rmsnorm", "rmsnorm")
    return lambda: lambda x, weight: norm(x, weight, eps=EPS)


def _fla() -> Callable[[], Norm]:
    norm = _function("fla.modules.layernorm", "rms_norm")
    return lambda: lambda x, weight: norm(x, weight, None, eps=EPS)


SOURCES = {
    "meshnorm": _Source("meshnorm", False, _meshnorm),
    "eager": _Source("torch", False, _eager, compiles=False),
    "compile": _Source("torch", False, _compile),
    "liger": _Source("liger-kernel", True, _liger),
    "quack": _Source("quack-kernels", True, _quack),
    "fla": _Source("fla-core", True, _fla),
}
