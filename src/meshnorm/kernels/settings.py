"""Launch settings: a ladder over the row's width and dtype.

Never over the number of rows: a row's sum is added up in an order that follows from the tile, the block and the warps,
and a row's bits must not depend on the batch that it came in. What may depend on the number of rows, and on the device,
is decided in ``gpu``: the number of programs and of pipeline stages, and whether a row is held or read again, which
change no row's sum.

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
    in chunks of ``block`` columns, the first ``held`` of which stay in registers. ``registers``: so many to a thread,
    where the compiler is not to choose. ``sum_again``: with a residual, its sum with x is what is read again."""

    rows: int
    block: int
    warps: int
    held: int = 0
    registers: int | None = None
    sum_again: bool = False


@dataclass(frozen=True)
class PersistentSettings:
    """A tile of a persistent program, as of ``RowSettings``: up to ``per_sm`` programs a multiprocessor, up to
    ``stages`` tiles in flight."""

    rows: int
    block: int
    warps: int
    per_sm: int
    stages: int


@dataclass(frozen=True)
class SplitSettings(PersistentSettings):
    """A row split over programs of ``block`` columns each, ``lookahead`` rows of which wait for their sums."""

    lookahead: int


@dataclass(frozen=True)
class ChunkSettings:
    """Up to ``chunks`` tensors of ``chunk`` columns to a program, ``per_sm`` programs to a multiprocessor, ``stages``
    rows of each in flight. A wider row is split over the programs of a cluster."""

    chunk: int
    chunks: int
    warps: int
    per_sm: int
    stages: int


# Percentages are of the copy bandwidth measured in the same run: one H200, torch 2.11, Triton 3.6, bfloat16, cold L2,
# kernels alone, 2026-11-30 (benchmarks/results/h200_sweep_2026-11-30.txt); where it says so, 2026-12-01 (the file of
# that date).
FORWARD = (
    (16, RowSettings(rows=256, block=16, warps=4)),
    (32, RowSettings(rows=128, block=32, warps=4)),
    (64, RowSettings(rows=64, block=64, warps=4)),
    (128, RowSettings(rows=16, block=128, warps=2)),  # 97%; 32 rows on 4 warps 95%
    (256, RowSettings(rows=16, block=256, warps=4)),
    (512, RowSettings(rows=2, block=512, warps=1)),  # 97%, 99% without rstd; 8 rows on 4 warps 97% (12-01)
    # From here on a row is read twice, the second time from a cache: few registers, so that many programs are resident,
    # and no column that is only padding. Whole rows in registers: 96% from 4096 to 16384, 93% at 12288.
    (1024, RowSettings(rows=1, block=512, warps=2)),  # 99%; 4 warps 94%, two whole rows on 2 98% (12-01)
    (2048, RowSettings(rows=1, block=1024, warps=4)),  # 99%; whole 98%
    (3072, RowSettings(rows=1, block=1024, warps=4)),  # 99%; padded to 4096 93%
    (4096, RowSettings(rows=1, block=2048, warps=8)),  # 99%
    (7168, RowSettings(rows=1, block=2048, warps=8)),  # 99% at 7168
    (20480, RowSettings(rows=1, block=4096, warps=16)),  # 100% at 8192, 98-99% at 12288, 16384 and 18432
    (32768, RowSettings(rows=1, block=8192, warps=32)),  # 98%; 16 warps 90%
    # One program to a multiprocessor, whose L1 cache holds what the registers do not. With 32 registers to a thread two
    # programs would share it, and lose each other's rows (77% at 65536, float32 91% at 32768), so the number of
    # registers is given (12-01).
    (65536, RowSettings(rows=1, block=16384, warps=32, held=1, registers=64)),  # 96%; two held, or 32768 columns 95%
    (131072, RowSettings(rows=1, block=32768, warps=32, held=2, registers=64)),  # 90%; one held 89%, split 87%
)
# float32 rows from 12288 columns on: 101% at 16384 (4096 columns on 16 warps 94%), 98% at 32768, 92% at 65536 (split
# 89%; both 12-01).
FORWARD_32 = (
    (16384, RowSettings(rows=1, block=8192, warps=32)),
    (32768, RowSettings(rows=1, block=16384, warps=32, registers=64)),
    (65536, RowSettings(rows=1, block=16384, warps=32, held=2, registers=64)),
)
# And narrow ones, where they differ (12-01): at 512 99%, 8 whole rows on 4 warps 96%; at 1024 100%, on 2 warps 98%.
FORWARD_32_NARROW = (
    (256, 512, RowSettings(rows=1, block=256, warps=1)),
    (512, 1024, RowSettings(rows=1, block=512, warps=4)),
)
# 16-bit rows that start at any address, and are read number by number, or two at a time: by the width's largest power
# of two. Measured at 4097, 73% (2048 columns on 8 warps 40%), and 4098, 86% (70%; both 12-01).
FORWARD_ODD = {
    1: RowSettings(rows=1, block=512, warps=8, held=4),
    2: RowSettings(rows=1, block=1024, warps=4, held=4),
}
ODD = range(3073, 8193)
# Beyond, where rows are not split (float64, other vendors). 61-63% at 131072.
FORWARD_WIDE = RowSettings(rows=1, block=8192, warps=16)
# Rows wider still. At 131072 86-87%; over the programs of a cluster 85% at the most, read once or twice.
FORWARD_SPLIT = SplitSettings(rows=1, block=4096, warps=4, per_sm=4, stages=3, lookahead=2)
# 90% at 131072 (12-01). On 4 warps the registers do not suffice: 40%.
FORWARD_SPLIT_32 = SplitSettings(rows=1, block=4096, warps=8, per_sm=2, stages=3, lookahead=2)

# Of a row that is held whole where there are few: chunks, which the kernel counts to 4; and bytes, a quarter of the
# registers, as much again being the weight's and half of it the sum's (beyond, registers spill: 32768 float32).
MOST_HELD = 4
HELD_BYTES = 64 * 1024

# With a residual, where others than the settings above are best: (wider than, up to, bytes of a number, settings).
# All but the first and the last timed on 12-01, at the upper bound or as it says.
FORWARD_ADD = (
    (64, 128, 4, RowSettings(rows=16, block=128, warps=4)),  # nothing spills (Triton 3.6, sm_90)
    (4096, 6144, 2, RowSettings(rows=1, block=2048, warps=8, held=1)),  # 99% at 5120; none held 98%
    (8192, 12288, 2, RowSettings(rows=1, block=4096, warps=16, held=1, registers=64)),  # 98%; none held 95%
    (12288, 20480, 2, RowSettings(rows=1, block=4096, warps=16, held=1)),  # 98% at 16384; none held 97%
    (20480, 32768, 2, RowSettings(rows=1, block=16384, warps=32, held=1, registers=64)),  # 97%; chunks of 8192 85-96%
    (32768, 65536, 2, RowSettings(rows=1, block=32768, warps=32, held=1, registers=64)),  # 97%; of 16384 93-96%
    # The sum read again, 90%; x and the residual 80%.
    (65536, 131072, 2, RowSettings(rows=1, block=16384, warps=32, held=2, registers=64, sum_again=True)),
    (32768, 65536, 4, FORWARD_WIDE),  # not timed; what is best without a residual spills
)

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
    (4096, PersistentSettings(rows=1, block=4096, warps=16, per_sm=1, stages=5)),  # 97%
    (8192, PersistentSettings(rows=1, block=8192, warps=16, per_sm=1, stages=4)),  # 96% at 5120, 95% at 8192
    (16384, PersistentSettings(rows=1, block=16384, warps=32, per_sm=1, stages=3)),  # 93% at 12288
)
# Odd 16-bit rows from 4097 to 8192 columns, which nothing can load ahead: 73% at 4097; 16 warps 42-46% (12-01).
# Not with the gradient of a residual_out: two programs of 148 registers a thread are not resident at once.
BACKWARD_ODD = PersistentSettings(rows=1, block=8192, warps=8, per_sm=2, stages=1)
# Widths far below a power of two, and rows of several programs: in chunks. 16-bit types, (wider than, up to, settings).
BACKWARD_CHUNKS = (
    (1024, 1536, ChunkSettings(chunk=512, chunks=3, warps=2, per_sm=8, stages=3)),  # 91%; padded to 2048 88%
    (2048, 2560, ChunkSettings(chunk=512, chunks=5, warps=2, per_sm=5, stages=3)),  # 94%; padded to 4096 71%
    (2560, 3072, ChunkSettings(chunk=1024, chunks=3, warps=4, per_sm=3, stages=3)),  # 94-95%; padded 79-83%
    (20480, 24576, ChunkSettings(chunk=1024, chunks=8, warps=4, per_sm=2, stages=4)),  # 95%; the next one 92% (12-01)
    # At 18432 columns in clusters of 3 92%; with programs of 8192 columns 84%.
    # (next one) 94% at 16384, 92% at 32768, 91% at 65536. With one program of 16384 a multiprocessor 88, 88, 82%, one
    # of 8192 on 16 warps 74, 65, 60%, four of 4096 90, 90, 87%.
    (12288, 49152, ChunkSettings(chunk=1024, chunks=6, warps=4, per_sm=3, stages=3)),
    (12288, 65536, ChunkSettings(chunk=2048, chunks=4, warps=8, per_sm=2, stages=4)),
)
BACKWARD_CHUNKS_32 = (
    (4096, 5120, ChunkSettings(chunk=1024, chunks=5, warps=8, per_sm=2, stages=3)),  # 97%; padded to 8192 89%
    # 98-100% from 7168 to 32768, 93% at 65536; split over independent programs 82, 88, 85%.
    (5120, 65536, ChunkSettings(chunk=1024, chunks=4, warps=8, per_sm=2, stages=3)),
)
# With the gradient of a residual_out, which a whole row of up to 16384 columns has no registers left for.
BACKWARD_CHUNKS_ADD = (
    *BACKWARD_CHUNKS,
    (8192, 12288, ChunkSettings(chunk=1024, chunks=6, warps=4, per_sm=3, stages=3)),
    (65536, 131072, ChunkSettings(chunk=2048, chunks=4, warps=8, per_sm=2, stages=3)),  # 91%; in two passes 64% (12-01)
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

# Partial dW rows are added 32 at a time, over some 512 programs. 4 µs from 4096 to 131072 columns, 2.5 where the kernel
# is launched while the one before it ends; always 16 columns a program 4 to 18 µs.
SUM_ROWS = 32
SUM_PROGRAMS = 512
SUM_WARPS = 4


Settings = TypeVar("Settings", RowSettings, PersistentSettings)


def _step(ladder: tuple[tuple[int, Settings], ...], n: int, dtype: torch.dtype) -> Settings | None:
    """The ladder's first settings for rows of ``n``, or None where the widest is too narrow."""
    registers = 2 if dtype == torch.float64 else 1
    for widest, settings in ladder:
        if n * registers <= widest:
            return replace(settings, block=settings.block // registers)
    return None


@functools.cache
def forward_settings(n: int, dtype: torch.dtype, adds: bool = False) -> RowSettings:
    """With ``adds`` those for x + residual, ``dtype`` being the residual's."""
    for above, widest, size, lighter in FORWARD_ADD if adds else ():
        if above < n <= widest and dtype.itemsize == size:
            return lighter
    if dtype.itemsize == 2 and n in ODD and not adds and (n & -n) in FORWARD_ODD:
        return FORWARD_ODD[n & -n]
    for above, widest, narrow in FORWARD_32_NARROW if dtype == torch.float32 else ():
        if above < n <= widest:
            return narrow
    ladder = FORWARD_32 if dtype == torch.float32 and n > 12288 else FORWARD
    return _step(ladder, n, dtype) or FORWARD_WIDE


@functools.cache
def held_settings(n: int, dtype: torch.dtype, tile: RowSettings) -> RowSettings:
    """For few rows: ``tile``'s, or where a row is read twice and fits, those that hold all of it. The chunks are added
    in the order in which they would be read, so that a row's bits are the same."""
    chunks = -(-n // tile.block)
    fits = chunks <= MOST_HELD and chunks * tile.block * dtype.itemsize <= HELD_BYTES
    return replace(tile, held=chunks) if chunks > 1 and fits and not tile.held else tile


@functools.cache
def statistic_settings(n: int, dtype: torch.dtype) -> RowSettings:
    return (_step(FORWARD, n, dtype) if n <= NARROW else None) or STATISTIC_WIDE


@functools.cache
def apply_settings(n: int, dtype: torch.dtype) -> RowSettings:
    return (_step(FORWARD, n, dtype) if n <= NARROW else None) or APPLY_WIDE


@functools.cache
def backward_settings(n: int, dtype: torch.dtype, adds: bool = False) -> PersistentSettings | None:
    """With ``adds`` as in ``backward_chunk_settings``. None: the row is too wide for one program."""
    if not adds and dtype.itemsize == 2 and n % 2 and 4096 < n <= BACKWARD_ODD.block:
        return BACKWARD_ODD
    return _step(BACKWARD, n, dtype) if n <= _widest_backward(dtype) else None


def _widest_backward(dtype: torch.dtype) -> int:
    """x and dY of a row are held in their own dtype: half as many float32 fit into the registers of one program."""
    return BACKWARD[-1][0] // (1 if dtype.itemsize <= 2 else 2)


@functools.cache
def forward_split_settings(n: int, dtype: torch.dtype) -> SplitSettings | None:
    """None: one program a row is as good."""
    if dtype == torch.float32:
        return FORWARD_SPLIT_32 if n > FORWARD_32[-1][0] else None
    return FORWARD_SPLIT if n > FORWARD[-1][0] else None


def parts_of(n: int, settings: ChunkSettings) -> int:
    """Over how many programs a row of ``n`` is split."""
    return -(-n // (settings.chunk * settings.chunks))


@functools.cache
def backward_chunk_settings(n: int, dtype: torch.dtype, adds: bool = False) -> ChunkSettings | None:
    """Those that pad least; with ``adds`` for a dX that the gradient of a residual_out is added to. None: another
    kernel is better."""
    narrow = BACKWARD_CHUNKS_ADD if adds else BACKWARD_CHUNKS
    ladder = narrow if dtype.itemsize <= 2 else BACKWARD_CHUNKS_32
    fitting = [settings for above, widest, settings in ladder if above < n <= widest]
    return min(fitting, key=lambda s: parts_of(n, s) * s.chunk * s.chunks, default=None)


@functools.cache
def backward_split_settings(n: int, dtype: torch.dtype) -> SplitSettings | None:
    """None: one program a row is better, where the row fits into one."""
    if n <= _widest_backward(dtype):
        return None
    return BACKWARD_SPLIT if n <= 65536 else BACKWARD_SPLIT_WIDEST


@functools.cache
def sum_settings(n: int) -> RowSettings:
    """For the sum of dW's partial rows."""
    columns = min(256, max(32, 1 << (n // SUM_PROGRAMS).bit_length() - 1)) if n >= SUM_PROGRAMS else 32
    return RowSettings(rows=SUM_ROWS, block=columns, warps=SUM_WARPS)


@functools.cache
def backward_apply_settings(n: int, dtype: torch.dtype) -> PersistentSettings:
    return (_step(BACKWARD, n, dtype) if n <= NARROW else None) or BACKWARD_APPLY_WIDE
