"""Two norms in one launch, and one more that adds up both dW, where both take the same tile; else one after the other.

A launch has one number of warps, and it, with the tile, decides in which order a row is summed. Where q and k would
have different ones alone, as norms over all heads have with fewer key heads, sharing a launch would give one of them
other bits than its norm alone has, and padding or too many threads. The same where one of them may be accessed more
widely than the other, or has more columns than one program holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import gpu
from .clusters import has_clusters
from .gpu_backward import LEAN_FROM, allowed_partials, loaded_bytes, program_count, sum_partials
from .launching import has_ptx, launch, scratch
from .qk import Halves, OneByOne
from .row_views import aligned, row_view, vector
from .settings import (
    PersistentSettings,
    apply_settings,
    backward_apply_settings,
    backward_chunk_settings,
    backward_settings,
    forward_settings,
    forward_split_settings,
    statistic_settings,
    sum_settings,
)
from .tiles import ceil_div, launch_tile, multiprocessors, shared_memory_of, stages_of
from .triton_qk import qk_apply_kernel, qk_forward_kernel, qk_forward_wide_kernel, qk_statistic_kernel
from .triton_qk_backward import (
    qk_backward_apply_kernel,
    qk_backward_kernel,
    qk_backward_statistic_kernel,
    qk_sum_partials_kernel,
)

_alone = OneByOne(gpu)


def forward(halves: Halves, eps: float, offset: float, mode: str) -> None:
    """y and rstd of each, or y alone where its rstd is None."""
    xs = [half[0] for half in halves]
    tile = _shared_tile(xs, forward_settings)
    if tile is None or any(forward_split_settings(x.shape[2], x.dtype) is not None for x in xs):
        _alone.forward(halves, eps, offset, mode)
        return
    whole = xs[0].shape[2] <= tile.block
    views = [row_view(x) for x in xs]
    programs = [ceil_div(view.m, tile.rows) if whole else view.m for view in views]
    launch_tile(
        qk_forward_kernel if whole else qk_forward_wide_kernel,
        (sum(programs),),
        tile,
        (*halves[0], *halves[1], programs[0], *_where(views[0], xs[0]), *_where(views[1], xs[1])),
        (
            *(*_how(views[0], xs[0]), *_how(views[1], xs[1]), eps, offset, mode),
            *((tile.rows, tile.block) if whole else (tile.block, tile.held)),
            has_ptx(xs[0].device),
        ),
    )


def statistic(halves: Halves) -> None:
    tile = _shared_tile([half[0] for half in halves], statistic_settings)
    if tile is None:
        _alone.statistic(halves)
        return
    xs, totals = [aligned(half[0]) for half in halves], [half[1] for half in halves]
    views = [row_view(x) for x in xs]
    programs = [ceil_div(view.m, tile.rows) for view in views]
    launch_tile(
        qk_statistic_kernel,
        (sum(programs),),
        tile,
        (xs[0], totals[0], xs[1], totals[1], programs[0], *views[0][:4], *views[1][:4]),
        (*_how(views[0], xs[0]), *_how(views[1], xs[1]), tile.rows, tile.block, has_ptx(xs[0].device)),
    )


def apply(halves: Halves, eps: float, offset: float, mode: str) -> None:
    """y and rstd of each, given their totals over all ``hidden_size`` columns."""
    xs = [half[0] for half in halves]
    tile = _shared_tile(xs, apply_settings)
    if tile is None:
        _alone.apply(halves, eps, offset, mode)
        return
    (q, qw, q_total, q_size, qy, q_rstd), (k, kw, k_total, k_size, ky, k_rstd) = halves
    views = [row_view(x) for x in xs]
    tiles = [ceil_div(view.m, tile.rows) for view in views]
    programs = [count * ceil_div(x.shape[2], tile.block) for count, x in zip(tiles, xs, strict=True)]
    launch_tile(
        qk_apply_kernel,
        (sum(programs),),
        tile,
        (
            *(q, qw, q_total, qy, q_rstd, k, kw, k_total, ky, k_rstd, programs[0], *tiles),
            *(*views[0][:4], q_size, *views[1][:4], k_size),
        ),
        (
            *(*_how(views[0], q), *_how(views[1], k), eps, offset, mode),
            *(tile.rows, tile.block, has_ptx(q.device)),
        ),
    )


def backward(halves: Halves, offset: float) -> None:
    """dX and dW of each, or those of them that are not None."""
    xs = [half[1] for half in halves]
    tile = _shared_tile(xs, backward_settings)
    chunked = any(backward_chunk_settings(x.shape[2], x.dtype) is not None for x in xs)
    if tile is None or chunked or _reads_narrow(halves):
        _alone.backward(halves, offset)
        return
    ptx = has_ptx(xs[0].device)
    lean = tile.block >= LEAN_FROM and ptx
    _launch_gradients(
        qk_backward_kernel, [(*half[:4], None, half[1].shape[2], *half[4:]) for half in halves], offset, tile, lean, ptx
    )


def backward_statistic(halves: Halves, offset: float) -> None:
    tile = _shared_tile([half[1] for half in halves], statistic_settings)
    if tile is None:
        _alone.backward_statistic(halves, offset)
        return
    tensors, numbers, constants, programs = [], [], [], []
    for dy, x, weight, rstd, total in halves:
        dy, x = aligned(dy), aligned(x)
        xv, dyv = row_view(x), row_view(dy)
        tensors += (dy, x, weight, rstd, total)
        numbers += (xv.m, *xv[1:4], *dyv[1:4])
        constants += (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, x.shape[2])
        programs.append(ceil_div(xv.m, tile.rows))
    launch_tile(
        qk_backward_statistic_kernel,
        (sum(programs),),
        tile,
        (*tensors, programs[0], *numbers),
        (*constants, offset, tile.rows, tile.block),
    )


def backward_apply(halves: Halves, offset: float) -> None:
    """dX and dW of each, or those of them that are not None, given their totals."""
    tile = _shared_tile([half[1] for half in halves], backward_apply_settings)
    if tile is None:
        _alone.backward_apply(halves, offset)
        return
    _launch_gradients(qk_backward_apply_kernel, halves, offset, tile)


def _launch_gradients(kernel: Any, halves: Halves, offset: float, tile: PersistentSettings, *lean: bool) -> None:
    """The persistent kernels, each half on the programs that it would have alone: ``gpu_backward``'s twice."""
    applies = kernel is qk_backward_apply_kernel
    tensors, numbers, constants, programs, each, unsummed = [], [], [], [], [], []
    for dy, x, weight, rstd, total, hidden_size, dx, dw in halves:
        n, xv, dyv = x.shape[2], row_view(x), row_view(dy)
        tiles, chunks = ceil_div(xv.m, tile.rows), ceil_div(n, tile.block)
        allowed = allowed_partials(x, rstd) if dw is not None else None
        count = program_count(tiles, chunks, tile.per_sm, multiprocessors(x.device), allowed)
        partial = dw
        if dw is not None and count > 1:
            partial = scratch((count, n), rstd.dtype, x.device)
            unsummed.append((partial, dw))
        tensors += (dy, x, weight, rstd, *((total,) if applies else ()), dx, partial)
        numbers += (xv.m, tiles, *xv[1:4], *dyv[1:4], hidden_size)
        constants += (xv.unit, xv.flat, dyv.unit, dyv.flat, xv.int64, n)
        each.append(count)
        programs.append(count * chunks)
    loaded = max(loaded_bytes(half[0], half[1]) for half in halves)
    stages = stages_of(tile, loaded, shared_memory_of(halves[0][1].device))
    launch_tile(
        kernel,
        (sum(programs),),
        tile,
        (*tensors, programs[0], *(each if applies else ()), *numbers),
        (*constants, offset, tile.rows, tile.block, stages, *lean),
    )
    _sum_partials(unsummed)


def _sum_partials(unsummed: list[tuple[Tensor, Tensor]]) -> None:
    """As ``gpu.sum_partials``, of both in one launch where they are summed alike."""
    tiles = [sum_settings(partial.shape[1]) for partial, _ in unsummed]
    if len(unsummed) < 2 or tiles[0] != tiles[1]:
        for partial, dw in unsummed:
            sum_partials(partial, dw)
        return
    ((q_partial, q_dw), (k_partial, k_dw)), tile = unsummed, tiles[0]
    columns = q_partial.shape[1], k_partial.shape[1]
    programs = [ceil_div(n, tile.block) for n in columns]
    dependent = {"launch_pdl": True} if has_clusters(q_partial.device) else {}
    launch(
        qk_sum_partials_kernel,
        (sum(programs),),
        (q_partial, q_dw, k_partial, k_dw, programs[0], q_partial.shape[0], k_partial.shape[0]),
        (*columns, tile.rows, tile.block, bool(dependent)),
        num_warps=tile.warps,
        **dependent,
    )


def _shared_tile(xs: list[Tensor], settings: Callable[[int, torch.dtype], Any]) -> Any:
    """The tile that both tensors' norms have, None where they differ, or there is one tensor only.

    Rows of as many columns, or in as many chunks of the same number: what makes a kernel of whole rows one of chunks
    follows from the tile.
    """
    if len(xs) < 2:
        return None
    (tile, other), (n, k_n) = (settings(x.shape[2], x.dtype) for x in xs), (x.shape[2] for x in xs)
    if tile is None or tile != other:
        return None
    size = xs[0].element_size()
    alike = vector(n, size) == vector(k_n, size) and (n <= tile.block) == (k_n <= tile.block)
    return tile if alike else None


def _reads_narrow(halves: Halves) -> bool:
    """Whether some dY is narrower than x: read, then, as ``gpu.backward`` does it."""
    return any(half[0].element_size() < half[1].element_size() for half in halves)


def _where(view: Any, x: Tensor) -> tuple[int, ...]:
    return *view[:4], x.shape[2]


def _how(view: Any, x: Tensor) -> tuple[Any, ...]:
    return view.unit, view.flat, view.int64, x.shape[2]
