"""Launch settings: a ladder over the row's width and dtype.

Never over the number of rows: a row's sum is added up in an order that follows from the tile, the block and the warps,
and a row's bits must not depend on the batch that it came in. What may depend on the number of rows, and on the device,
is decided in ``gpu``: the number of programs and of pipeline stages, which change no row's sum.

Each ladder holds (widest row, settings); the first that is wide enough is taken. A float64 is two registers wide, so
that a float64 row is looked up as one of twice its width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TypeVar

import torch


@dataclass(frozen=True)
class RowSettings:
    """A program's tile: ``rows`` × ``block`` elements, on ``warps`` warps. A row wider than ``block`` is worked through
    in chunks of ``block`` columns."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class PersistentSettings(RowSettings):
    """A tile of a persistent program: up to ``per_sm`` programs a multiprocessor, up to ``stages`` tiles in flight."""

    per_sm: int
    stages: int


# Widest row that the forward holds in registers. One program a row reaches 93–97% of copy bandwidth up to 32768
# columns, padded to a power of two (prototype, H200).
# Narrow rows: tiles of 4096 elements, 16 KB of loads and stores in flight a program.
FORWARD = (
    (16, RowSettings(rows=256, block=16, warps=4)),
    (32, RowSettings(rows=128, block=32, warps=4)),
    (64, RowSettings(rows=64, block=64, warps=4)),
    (128, RowSettings(rows=32, block=128, warps=4)),
    (256, RowSettings(rows=16, block=256, warps=4)),
    (512, RowSettings(rows=8, block=512, warps=4)),
    (1024, RowSettings(rows=4, block=1024, warps=4)),
    (2048, RowSettings(rows=1, block=2048, warps=4)),
    (4096, RowSettings(rows=1, block=4096, warps=4)),
    (8192, RowSettings(rows=1, block=8192, warps=8)),
    (16384, RowSettings(rows=1, block=16384, warps=16)),
    (32768, RowSettings(rows=1, block=32768, warps=32)),
)
# Beyond: two passes over the row, the second from L2.
FORWARD_WIDE = RowSettings(rows=1, block=8192, warps=16)

# Backward in one pass, three stages in flight: 90–93% of copy bandwidth up to 8192 columns; 3 stages 93% at 8192,
# 1 stage 71% (prototype, H200).
BACKWARD = (
    (16, PersistentSettings(rows=256, block=16, warps=4, per_sm=4, stages=3)),
    (32, PersistentSettings(rows=128, block=32, warps=4, per_sm=4, stages=3)),
    (64, PersistentSettings(rows=64, block=64, warps=4, per_sm=4, stages=3)),
    (128, PersistentSettings(rows=32, block=128, warps=4, per_sm=4, stages=3)),
    (256, PersistentSettings(rows=16, block=256, warps=4, per_sm=4, stages=3)),
    (512, PersistentSettings(rows=8, block=512, warps=4, per_sm=4, stages=3)),
    (1024, PersistentSettings(rows=4, block=1024, warps=4, per_sm=4, stages=3)),
    (2048, PersistentSettings(rows=1, block=2048, warps=4, per_sm=4, stages=3)),
    (4096, PersistentSettings(rows=1, block=4096, warps=8, per_sm=2, stages=3)),
    (8192, PersistentSettings(rows=1, block=8192, warps=16, per_sm=2, stages=3)),
    (16384, PersistentSettings(rows=1, block=16384, warps=16, per_sm=1, stages=3)),
)

# Given the row's total, a chunk of columns needs nothing of the others: rows up to NARROW as above, wider ones in
# chunks.
NARROW = 1024
STATISTIC_WIDE = RowSettings(rows=1, block=4096, warps=8)
APPLY_WIDE = RowSettings(rows=1, block=4096, warps=4)
BACKWARD_APPLY_WIDE = PersistentSettings(rows=2, block=2048, warps=8, per_sm=2, stages=3)

# Partial dW rows are added 32 at a time; 32 columns a program, so that narrow rows still make some programs.
SUM_PARTIALS = RowSettings(rows=32, block=32, warps=4)


Settings = TypeVar("Settings", bound=RowSettings)


def _step(ladder: tuple[tuple[int, Settings], ...], n: int, dtype: torch.dtype) -> Settings | None:
    """The ladder's first settings for rows of ``n``, or None where the widest is too narrow."""
    registers = 2 if dtype == torch.float64 else 1
    for widest, settings in ladder:
        if n * registers <= widest:
            return replace(settings, block=settings.block // registers)
    return None


@functools.cache
def forward_settings(n: int, dtype: torch.dtype) -> RowSettings:
    return _step(FORWARD, n, dtype) or FORWARD_WIDE


@functools.cache
def statistic_settings(n: int, dtype: torch.dtype) -> RowSettings:
    return (_step(FORWARD, n, dtype) if n <= NARROW else None) or STATISTIC_WIDE


@functools.cache
def apply_settings(n: int, dtype: torch.dtype) -> RowSettings:
    return (_step(FORWARD, n, dtype) if n <= NARROW else None) or APPLY_WIDE


@functools.cache
def backward_settings(n: int, dtype: torch.dtype) -> PersistentSettings | None:
    """None: the row is too wide for one program; its statistic is taken first."""
    return _step(BACKWARD, n, dtype)


@functools.cache
def backward_apply_settings(n: int, dtype: torch.dtype) -> PersistentSettings:
    return (_step(BACKWARD, n, dtype) if n <= NARROW else None) or BACKWARD_APPLY_WIDE
