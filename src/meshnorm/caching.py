"""Remembering what pure functions found."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def cached(function: F) -> F:
    """``lru_cache``, but for torch.compile: it traces the function itself, since it can not see through the cache."""
    remembered = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return (function if torch.compiler.is_compiling() else remembered)(*args, **named)

    return call  # type: ignore[return-value]
