"""The launch settings as tables: what must hold of them whatever was measured. No kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshnorm.kernels import settings
from meshnorm.kernels.settings import ChunkSettings, PersistentSettings, RowSettings

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Of an H200's multiprocessor; in shared memory 227 KiB, of which a program takes 1 and something for its sums.
REGISTERS, SHARED_MEMORY = 65536, 220 * 1024
LADDERS = [settings.FORWARD, settings.FORWARD_32, settings.BACKWARD]
CHUNKS = [
    *(pytest.param(above, widest, s, BF16, id=f"bf16-{above}") for above, widest, s in settings.BACKWARD_CHUNKS),
    *(pytest.param(above, widest, s, F32, id=f"fp32-{above}") for above, widest, s in settings.BACKWARD_CHUNKS_32),
]


def is_power_of_2(n: int) -> bool:
    return n >= 1 and n & (n - 1) == 0


def widths() -> Iterator[int]:
    """About every step of every ladder, and between them."""
    ends = {end for ladder in LADDERS for end, _ in ladder}
    ends |= {
        end for table in (settings.BACKWARD_CHUNKS, settings.BACKWARD_CHUNKS_32) for *both, _ in table for end in both
    }
    ends |= {settings.NARROW, 131072, 2**20}
    for end in sorted(ends):
        yield from (end - 1, end, end + 1, end + 8, end * 5 // 4)


@pytest.mark.parametrize("ladder", LADDERS, ids=["forward", "forward fp32", "backward"])
def test_a_ladder_climbs(ladder: tuple[tuple[int, RowSettings | PersistentSettings], ...]) -> None:
    ends = [end for end, _ in ladder]
    assert ends == sorted(set(ends))
    blocks = [s.block for _, s in ladder]
    assert blocks == sorted(blocks)


@pytest.mark.parametrize(("above", "widest", "s", "dtype"), CHUNKS)
def test_chunks_can_be_launched(above: int, widest: int, s: ChunkSettings, dtype: torch.dtype) -> None:
    assert above < widest
    assert is_power_of_2(s.chunk) and is_power_of_2(s.warps) and s.chunk >= 32 * s.warps
    assert 1 <= s.chunks <= 8 and s.stages >= 2  # the kernel counts chunks to 8
    # Each program writes its sum into a box of 16; clusters of more than 8 not every GPU takes.
    assert settings.parts_of(widest, s) <= (8 if dtype.itemsize == 2 else 16)


@pytest.mark.parametrize(("above", "widest", "s", "dtype"), CHUNKS)
def test_as_many_programs_as_the_chunks_ask_for_fit_a_multiprocessor(
    above: int, widest: int, s: ChunkSettings, dtype: torch.dtype
) -> None:
    elements = s.chunk * s.chunks // (32 * s.warps)
    assert 8 <= elements <= 64
    assert 32 * s.warps * s.per_sm <= 2048  # threads
    # x, dY and w in their dtype, dW in float32, and what else a thread needs.
    registers = 40 + elements * (1 + 3 * dtype.itemsize / 4)
    assert 32 * s.warps * s.per_sm * registers <= REGISTERS
    assert (s.stages - 1) * s.chunk * s.chunks * 2 * dtype.itemsize * s.per_sm <= SHARED_MEMORY


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_of_the_chunks_for_a_width_those_are_taken_that_pad_least(dtype: torch.dtype) -> None:
    table = settings.BACKWARD_CHUNKS_32 if dtype == F32 else settings.BACKWARD_CHUNKS
    for n in widths():
        padded = {
            -(-n // (s.chunk * s.chunks)) * s.chunk * s.chunks: s for above, widest, s in table if above < n <= widest
        }
        chosen = settings.backward_chunk_settings(n, dtype)
        assert (chosen is None) == (not padded)
        if chosen is not None:
            assert -(-n // (chosen.chunk * chosen.chunks)) * chosen.chunk * chosen.chunks == min(padded)


def test_rows_are_split_over_as_many_programs_as_they_fill() -> None:
    """16384 columns are two programs of 8192, 18432 are three of 6144."""
    for n, parts, columns in ((1536, 1, 1536), (2560, 1, 2560), (16384, 2, 8192), (18432, 3, 6144), (65536, 8, 8192)):
        chosen = settings.backward_chunk_settings(n, BF16)
        assert chosen is not None
        assert (settings.parts_of(n, chosen), chosen.chunk * chosen.chunks) == (parts, columns)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_every_width_has_a_backward_in_one_pass_with_clusters_and_without(dtype: torch.dtype) -> None:
    for n in widths():
        chunks = settings.backward_chunk_settings(n, dtype)
        assert chunks is None or settings.parts_of(n, chunks) * chunks.chunk * chunks.chunks >= n
        split = settings.backward_split_settings(n, dtype)
        whole = settings.backward_settings(n, dtype)
        assert (split is None) != (whole is None)
        assert split is None or split.block < n
        assert whole is None or whole.block >= n


def test_a_wide_row_of_float64_is_left_to_the_kernels_that_need_the_row_s_total() -> None:
    for n in widths():
        whole = settings.backward_settings(n, F64)
        assert (whole is None) == (n > 8192)
        assert whole is None or whole.block >= n
        assert is_power_of_2(settings.backward_apply_settings(n, F64).block)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_the_forward_holds_a_narrow_row_whole_and_reads_a_wide_one_in_chunks(dtype: torch.dtype) -> None:
    for n in widths():
        chosen = settings.forward_settings(n, dtype)
        if n <= (256 if dtype.itemsize >= 4 else 512):
            assert n <= chosen.block
        else:
            assert chosen.rows == 1 and is_power_of_2(chosen.block)
            assert chosen.block < 2 * n
            assert 0 <= chosen.held <= 4 and chosen.held * chosen.block < n  # the kernel counts to 4; none only padding
        split = settings.forward_split_settings(n, dtype)
        assert split is None or split.block < n


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_few_rows_are_held_where_that_changes_no_sum(dtype: torch.dtype) -> None:
    held = set()
    for n in widths():
        many = settings.forward_settings(n, dtype)
        few = settings.held_settings(n, dtype, many)
        assert (few.rows, few.block, few.warps, few.registers) == (many.rows, many.block, many.warps, many.registers)
        if few != many:
            assert many.held == 0  # else other chunks would come first
            assert few.held * few.block >= n > (few.held - 1) * few.block and 2 <= few.held <= 4
            # x and the weight, and the squares of a chunk in what they are added in.
            taken = few.block * (2 * few.held * dtype.itemsize + max(4, dtype.itemsize)) // 4
            assert taken + 16 * 32 * few.warps <= REGISTERS
            held.add(n)
    assert {4096, 8192}.issubset(held) if dtype != F64 else 4096 in held


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_rows_that_leave_no_room_for_a_second_one_in_the_cache_keep_other_programs_out(
    dtype: torch.dtype, adds: bool
) -> None:
    for n in widths():
        chosen = settings.forward_settings(n, dtype, adds)
        if n * dtype.itemsize > 65536 and chosen.held:
            assert chosen.registers is not None
            assert REGISTERS // 2 < chosen.registers * 32 * chosen.warps <= REGISTERS


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_odd_rows_have_settings_of_their_own_around_what_was_timed(dtype: torch.dtype) -> None:
    for n, elements in ((3071, 1), (4097, 1), (8191, 1), (4098, 2), (8190, 2), (4100, 4), (5120, 8), (9001, 1)):
        forward, backward = settings.forward_settings(n, dtype), settings.backward_settings(n, dtype)
        odd = dtype.itemsize == 2 and elements <= 2 and 3072 < n <= 8192
        assert (forward.held > 0) == odd
        alone = dtype.itemsize == 2 and elements == 1 and 4096 < n <= 8192
        assert backward is None or (backward.stages == 1) == alone
        assert alone or settings.backward_settings(n, dtype, adds=True) == backward


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_with_a_residual_no_chunk_that_is_held_is_only_padding(dtype: torch.dtype) -> None:
    for n in widths():
        chosen = settings.forward_settings(n, dtype, adds=True)
        assert 0 <= chosen.held <= 4 and (chosen.held == 0 or chosen.held * chosen.block < n)


def test_the_sum_of_partial_rows_is_spread_over_enough_programs() -> None:
    before = 0
    for n in sorted(widths()):
        chosen = settings.sum_settings(n)
        assert is_power_of_2(chosen.block) and is_power_of_2(chosen.rows)
        assert 32 <= chosen.block <= 256 and chosen.block >= before
        before = chosen.block
        if 32 < chosen.block < 256:
            assert 512 <= -(-n // chosen.block) <= 1024
