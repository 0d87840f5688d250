"""Launch settings of the gated norm, by a group's width and the dtype: as ``settings``, whose reasons hold here too.

Those without a percentage are not timed. They are chosen so that, compiled for sm_90, next to nothing of a 16-bit or
float32 norm spills, and from what the norm without a gate measured: the backward loads three tensors for its two, and
computes an exponential, which costs as many instructions as all the rest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from .settings import PersistentSettings, RowSettings, forward_settings

# Whole groups in registers: what a gate before the norm is multiplied with is computed once, not twice.
FORWARD = (
    (16, RowSettings(rows=128, block=16, warps=4)),
    (32, RowSettings(rows=64, block=32, warps=4)),
    (64, RowSettings(rows=32, block=64, warps=4)),
    (128, RowSettings(rows=16, block=128, warps=4)),
    (256, RowSettings(rows=8, block=256, warps=4)),
    (512, RowSettings(rows=4, block=512, warps=4)),
    (1024, RowSettings(rows=1, block=1024, warps=4)),
    (2048, RowSettings(rows=1, block=2048, warps=4)),
    (4096, RowSettings(rows=1, block=4096, warps=8)),
    (8192, RowSettings(rows=1, block=8192, warps=8)),
    # Percent of copy bandwidth, gate first, benchmarks/results/h200_gated_sweep_2026-12-01.txt.
    (12288, RowSettings(rows=1, block=4096, warps=8, held=2)),  # 95%; all held 93%, padded to 16384 70%
    (16384, RowSettings(rows=1, block=4096, warps=16, held=4)),  # 91%
)
FORWARD_32 = RowSettings(rows=1, block=16384, warps=32)  # up to 16384 float32: 100% at 12288; in chunks 91%
FORWARD_16 = RowSettings(rows=1, block=8192, warps=32, held=4)  # up to 32768 16-bit numbers: 86%; none held 64%
FORWARD_WIDE = RowSettings(rows=1, block=8192, warps=16)
# Chunks of a group, given its statistic, or of the statistic itself.
CHUNK = RowSettings(rows=1, block=4096, warps=8)


@dataclass(frozen=True)
class HoldingSettings(PersistentSettings):
    """A persistent program's tile of up to ``holds`` blocks of columns; of the registers it has its share, so that
    ``per_sm`` are resident. A wider group is spread over the programs of a cluster. ``keeps``: with the sigmoid held
    through the group's sum, not computed again."""

    holds: int = 1
    keeps: bool = False


BACKWARD = (
    (16, HoldingSettings(rows=64, block=16, warps=4, per_sm=4, stages=3)),
    (32, HoldingSettings(rows=32, block=32, warps=4, per_sm=4, stages=3)),
    (64, HoldingSettings(rows=16, block=64, warps=4, per_sm=4, stages=3)),
    (128, HoldingSettings(rows=8, block=128, warps=4, per_sm=4, stages=3)),
    (256, HoldingSettings(rows=4, block=256, warps=4, per_sm=4, stages=3)),
    (512, HoldingSettings(rows=2, block=512, warps=4, per_sm=4, stages=3)),
    (1024, HoldingSettings(rows=1, block=1024, warps=4, per_sm=4, stages=3)),
    (2048, HoldingSettings(rows=1, block=1024, warps=4, per_sm=4, stages=3, holds=2)),
    (4096, HoldingSettings(rows=1, block=2048, warps=8, per_sm=2, stages=3, holds=2)),
    (6144, HoldingSettings(rows=1, block=2048, warps=8, per_sm=2, stages=3, holds=3)),
    (8192, HoldingSettings(rows=1, block=4096, warps=16, per_sm=1, stages=3, holds=2)),  # 98%; keeping 97%
    # 88% gate first, 90% norm first; keeping 68 and 72%.
    (12288, HoldingSettings(rows=1, block=4096, warps=16, per_sm=1, stages=3, holds=3)),
)
# Of 16-bit numbers beyond 8192 columns, where the gate comes first: 90%; as above 88%.
BACKWARD_GATE_FIRST = HoldingSettings(rows=1, block=2048, warps=8, per_sm=1, stages=3, holds=6, keeps=True)
# Of 4-byte numbers: beyond it, and beyond the ladder, groups are spread over clusters.
WIDEST_BACKWARD_32 = 8192
# Where there are none of that size, the group's sums are taken first.
# 80% at 16384; 3 blocks 71%, sums first 63%.
BACKWARD_CLUSTER = HoldingSettings(rows=1, block=2048, warps=8, per_sm=2, stages=3, holds=4)
# Beyond 16384: 72% at 32768; two programs to a multiprocessor, of 3 blocks each, 68%, sums first 63%.
BACKWARD_CLUSTER_WIDE = HoldingSettings(rows=1, block=2048, warps=8, per_sm=1, stages=4, holds=4, keeps=True)
# 91% at 12288; not keeping 89%, sums first 61%.
BACKWARD_CLUSTER_32 = HoldingSettings(rows=1, block=2048, warps=8, per_sm=2, stages=3, holds=2, keeps=True)
MOST_IN_A_CLUSTER = 8
# Given the sums a chunk of columns needs nothing of the others.
BACKWARD_CHUNK = HoldingSettings(rows=1, block=2048, warps=8, per_sm=2, stages=3)
NARROW = 1024


@functools.cache
def gated_forward_settings(n: int, dtype: torch.dtype, holds: bool) -> RowSettings:
    """For groups of ``n``; ``holds``: in registers, where they fit. A block narrower than n is one chunk of several."""
    if n <= NARROW or holds:
        found = _step(FORWARD, n, dtype) or (FORWARD_16 if dtype.itemsize == 2 and n <= 32768 else FORWARD_WIDE)
        if dtype == torch.float32 and 8192 < n <= FORWARD_32.block:
            found = FORWARD_32
        return replace(found, held=min(found.held, -(-n // found.block)))
    return forward_settings(n, dtype)


@functools.cache
def gated_chunk_settings(n: int, dtype: torch.dtype) -> RowSettings:
    return (_step(FORWARD, n, dtype) if n <= NARROW else None) or CHUNK


@functools.cache
def gated_backward_settings(n: int, dtype: torch.dtype, clusters: bool, first: bool) -> HoldingSettings | None:
    """Those for whole groups of ``n``; with ``clusters`` also those of wider ones, for the programs of a cluster. None:
    the group is too wide. ``dtype`` is the widest of x, the gate and dY; ``first``: the gate comes before the norm."""
    found = None if dtype.itemsize > 2 and n > WIDEST_BACKWARD_32 else _step(BACKWARD, n, dtype)
    if found is not None:
        found = BACKWARD_GATE_FIRST if first and dtype.itemsize <= 2 and n > 8192 else found
        return replace(found, holds=-(-n // found.block))
    narrow = BACKWARD_CLUSTER if n <= 16384 else BACKWARD_CLUSTER_WIDE
    spread = narrow if dtype.itemsize <= 2 else BACKWARD_CLUSTER_32
    return spread if clusters and parts_of(n, spread) <= MOST_IN_A_CLUSTER else None


def parts_of(n: int, settings: HoldingSettings) -> int:
    """Over how many programs a group of ``n`` is spread."""
    return -(-n // (settings.block * settings.holds))


@functools.cache
def gated_backward_chunk_settings(n: int, dtype: torch.dtype) -> HoldingSettings:
    return (_step(BACKWARD, n, dtype) if n <= NARROW else None) or BACKWARD_CHUNK


def _step(ladder, n: int, dtype: torch.dtype):
    """The ladder's first settings for groups of ``n``, or None where the widest is too narrow. A float64 is two
    registers wide."""
    registers = 2 if dtype == torch.float64 else 1
    for widest, settings in ladder:
        if n * registers <= widest:
            return replace(settings, block=max(1, settings.block // registers))
    return None
