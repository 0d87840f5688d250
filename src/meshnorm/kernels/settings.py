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


@dataclass(frozen=True)
class SplitSettings(PersistentSettings):
    """A row split over programs of ``block`` columns each, ``lookahead`` rows of which wait for their sums."""

    lookahead: int


# Percentages are of the copy bandwidth measured in the same run: one H200, torch 2.11, Triton 3.6, bfloat16, cold L2,
# kernels alone, 2026-11-30 (benchmarks/results/h200_kernels.txt has the runs).
FORWARD = (
    (16, RowSettings(rows=256, block=16, warps=4)),
    (32, RowSettings(rows=128, block=32, warps=4)),
    (64, RowSettings(rows=64, block=64, warps=4)),
    (128, RowSettings(rows=16, block=128, warps=2)),  # 97%; 32 rows on 4 warps 95%
    (256, RowSettings(rows=16, block=256, warps=4)),
    (512, RowSettings(rows=8, block=512, warps=4)),  # 96%
    (1024, RowSettings(rows=2, block=1024, warps=4)),  # 95%; 4 rows 94%
    (2048, RowSettings(rows=1, block=2048, warps=4)),  # 97%
    (4096, RowSettings(rows=1, block=4096, warps=8)),  # 94%; 4 warps 93%
    (8192, RowSettings(rows=1, block=8192, warps=4)),  # 94% at 8192 and at 5120, there 89% on 8 warps
    (12288, RowSettings(rows=1, block=4096, warps=16)),  # in three chunks 91%; padded to 16384 87%
    (16384, RowSettings(rows=1, block=16384, warps=8)),  # 94%
    (32768, RowSettings(rows=1, block=16384, warps=32)),  # in two chunks 92%; whole on 32 warps 84%
)
# Beyond, where rows are not split (float64, other vendors): two passes over the row, the second from L2. 61-63%.
FORWARD_WIDE = RowSettings(rows=1, block=8192, warps=16)
# 85% at 65536, 83% at 131072. 1 row ahead 81%, 8192 columns 83%; 3 to 5 stages make no difference.
FORWARD_SPLIT = SplitSettings(rows=1, block=4096, warps=4, per_sm=4, stages=3, lookahead=2)

# Backward in one pass. Few programs with many loads in flight beat many with few: 1 to 2 a multiprocessor and 3 to 5
# stages 93-95%, 2 to 4 programs and 3 stages 78-92%.
BACKWARD = (
    (16, PersistentSettings(rows=128, block=16, warps=4, per_sm=2, stages=4)),
    (32, PersistentSettings(rows=64, block=32, warps=4, per_sm=2, stages=4)),
    (64, PersistentSettings(rows=32, block=64, warps=4, per_sm=2, stages=4)),
    (128, PersistentSettings(rows=16, block=128, warps=4, per_sm=2, stages=4)),  # 94%
    (256, PersistentSettings(rows=8, block=256, warps=4, per_sm=2, stages=4)),
    (512, PersistentSettings(rows=8, block=512, warps=4, per_sm=2, stages=3)),  # 94%
    (1024, PersistentSettings(rows=1, block=1024, warps=4, per_sm=4, stages=4)),  # 94%
    (2048, PersistentSettings(rows=1, block=2048, warps=4, per_sm=2, stages=4)),  # 94%
    (4096, PersistentSettings(rows=1, block=4096, warps=16, per_sm=1, stages=5)),  # 94%
    (8192, PersistentSettings(rows=1, block=8192, warps=16, per_sm=1, stages=5)),  # 95% at 8192
    (
        16384,
        PersistentSettings(rows=1, block=16384, warps=16, per_sm=1, stages=3),
    ),  # 90% at 12288, 88% at 16384; 4 stages 83%
)
# 84% at 32768 and 65536, 80% at 131072. A second row of look-ahead, another stage, a narrow weight: no difference.
BACKWARD_SPLIT = SplitSettings(rows=1, block=2048, warps=4, per_sm=4, stages=3, lookahead=1)
# 83% at 131072.
BACKWARD_SPLIT_WIDEST = SplitSettings(rows=1, block=4096, warps=8, per_sm=2, stages=3, lookahead=1)

# Given the row's total, a chunk of columns needs nothing of the others: rows up to NARROW as above, wider ones in
# chunks.
NARROW = 1024
STATISTIC_WIDE = RowSettings(rows=1, block=4096, warps=8)
APPLY_WIDE = RowSettings(rows=1, block=4096, warps=4)
BACKWARD_APPLY_WIDE = PersistentSettings(rows=2, block=2048, warps=8, per_sm=2, stages=3)

# Partial dW rows are added 128 at a time; 16 columns a program, so that narrow rows still make some programs. 6 to 8 µs
# from 128 to 16384 columns; 32 rows by 32 columns 8 to 18.
SUM_PARTIALS = RowSettings(rows=128, block=16, warps=8)


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
    """None: the row is too wide for one program."""
    return _step(BACKWARD, n, dtype) if n <= _widest_backward(dtype) else None


def _widest_backward(dtype: torch.dtype) -> int:
    """x and dY of a row are held in their own dtype: half as many float32 fit into the registers of one program."""
    return BACKWARD[-1][0] // (1 if dtype.itemsize <= 2 else 2)


@functools.cache
def forward_split_settings(n: int) -> SplitSettings | None:
    """None: one program a row is as good."""
    return FORWARD_SPLIT if n > FORWARD[-1][0] else None


@functools.cache
def backward_split_settings(n: int, dtype: torch.dtype) -> SplitSettings | None:
    """None: one program a row is better, where the row fits into one."""
    if n <= _widest_backward(dtype):
        return None
    return BACKWARD_SPLIT if n <= 65536 else BACKWARD_SPLIT_WIDEST


@functools.cache
def backward_apply_settings(n: int, dtype: torch.dtype) -> PersistentSettings:
    return (_step(BACKWARD, n, dtype) if n <= NARROW else None) or BACKWARD_APPLY_WIDE
