"""The six functions of a gated norm on Triton kernels. ``settings`` overrides the ladders; benchmarks pass it.

All tensors of a call are read and written in units of as many elements as 16 bytes hold of the widest of them, or of
what divides the group: so that which of them is wanted, and how the others lie, changes no row's sum
(``row_views.vector`` says why).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formula_gated import Gated, rounds_product
from .clusters import has_clusters
from .gpu_backward import MACHINE_SHARE, allowed_partials, sum_partials
from .gpu_chunks import REGISTERS
from .launching import has_ptx, launch, most_clusters, scratch
from .row_views import row_view, vector
from .settings import RowSettings
from .settings_gated import (
    HoldingSettings,
    gated_backward_chunk_settings,
    gated_backward_settings,
    gated_chunk_settings,
    gated_forward_settings,
    parts_of,
)
from .tiles import ceil_div, fitting_stages, launch_tile, multiprocessors, shared_memory_of
from .triton_gated import (
    gated_backward_kernel,
    gated_forward_kernel,
    gated_forward_wide_kernel,
    gated_statistic_kernel,
)


def forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    how: Gated,
    y: Tensor,
    rstd: Tensor | None,
    *,
    settings: RowSettings | None = None,
) -> None:
    """y and rstd, or y alone where rstd is None."""
    n, first = how.group_size, gate is not None and not how.norm_before_gate
    tile = settings or gated_forward_settings(n, _widest(x, gate), first)
    views = _Views(n, x, gate)
    whole = n <= tile.block
    m, groups = views.m, x.shape[2] // n
    outputs = (y, rstd, None) if whole else (y, rstd)
    strides = views.stride(y), 0 if rstd is None else rstd.stride(0), *((0,) if whole else ())
    launch_tile(
        gated_forward_kernel if whole else gated_forward_wide_kernel,
        (groups * (ceil_div(m, tile.rows) if whole else m),),
        tile,
        (x, gate, weight, *outputs, m, n, *views.where(x), *views.where(gate), *strides),
        (
            *views.how(x),
            *views.how(gate),
            views.unit_of(y),
            views.int64,
            groups,
            n,
            how.eps,
            how.offset,
            how.casting_mode,
            *_constants(x, gate, how),
            _rounds(x, weight, how),
            *((tile.rows, tile.block, 1) if whole else (tile.block, tile.held)),
            has_ptx(x.device),
        ),
    )


def apply(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    size: int,
    how: Gated,
    y: Tensor,
    rstd: Tensor,
    *,
    settings: RowSettings | None = None,
) -> None:
    """y and rstd, given total = Σ v² over all ``size`` columns of each group, of which x may hold a slice."""
    n = how.group_size
    tile = settings or gated_chunk_settings(n, _widest(x, gate))
    views = _Views(n, x, gate)
    groups, chunks = x.shape[2] // n, ceil_div(n, tile.block)
    launch_tile(
        gated_forward_kernel,
        (groups * chunks * ceil_div(views.m, tile.rows),),
        tile,
        (
            *(x, gate, weight, y, rstd, total, views.m, size),
            *(*views.where(x), *views.where(gate), views.stride(y), rstd.stride(0), total.stride(0)),
        ),
        (
            *views.how(x),
            *views.how(gate),
            views.unit_of(y),
            views.int64,
            groups,
            n,
            how.eps,
            how.offset,
            how.casting_mode,
            *_constants(x, gate, how),
            _rounds(x, weight, how),
            tile.rows,
            tile.block,
            chunks,
            has_ptx(x.device),
        ),
    )


def statistic(
    x: Tensor, gate: Tensor | None, how: Gated, total: Tensor, *, settings: RowSettings | None = None
) -> None:
    """total = Σ v² over the columns that x holds of each group."""
    _sums(None, x, None if how.norm_before_gate else gate, None, None, how, total, settings)


def backward_statistic(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    how: Gated,
    total: Tensor,
    *,
    settings: RowSettings | None = None,
) -> None:
    """total = Σ E·(w + offset)·x̂ over the columns that x holds of each group."""
    _sums(dy, x, gate, weight, rstd, how, total, settings)


def _sums(
    dy: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor | None,
    how: Gated,
    total: Tensor,
    settings: RowSettings | None,
) -> None:
    n = how.group_size
    tile = settings or gated_chunk_settings(n, _widest(x, gate, dy))
    views = _Views(n, x, gate, dy)
    x = _in_units(x, views)
    gate, dy = (None if tensor is None else _in_units(tensor, views) for tensor in (gate, dy))
    groups = x.shape[2] // n
    launch_tile(
        gated_statistic_kernel,
        (groups * ceil_div(views.m, tile.rows),),
        tile,
        (
            *(x, gate, weight, dy, rstd, total, views.m),
            *(*views.where(x), *views.where(gate), *views.where(dy)),
            *(0 if rstd is None else rstd.stride(0), total.stride(0)),
        ),
        (
            *(*views.how(x), *views.how(gate), *views.how(dy), views.int64, groups, n, how.offset),
            *(*_constants(x, gate, how), tile.rows, tile.block, has_ptx(x.device)),
        ),
    )


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    how: Gated,
    dx: Tensor | None,
    d_gate: Tensor | None,
    dw: Tensor | None,
    *,
    settings: HoldingSettings | None = None,
) -> None:
    """dX, dGate and dW, or those of them that are not None. One pass; for groups too wide for one program or a cluster
    the sums, then the rest."""
    n = how.group_size
    clusters = rstd.dtype == torch.float32 and has_clusters(x.device)
    first = gate is not None and not how.norm_before_gate
    tile = settings or gated_backward_settings(n, _widest(x, gate, dy), clusters, first)
    if tile is not None and _gradients(dy, x, gate, weight, rstd, None, n, how, dx, d_gate, dw, tile):
        return
    total = torch.empty_like(rstd)
    if dx is not None or (d_gate is not None and not how.norm_before_gate):
        backward_statistic(dy, x, gate, weight, rstd, how, total)
    backward_apply(dy, x, gate, weight, rstd, total, n, how, dx, d_gate, dw)


def backward_apply(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor,
    size: int,
    how: Gated,
    dx: Tensor | None,
    d_gate: Tensor | None,
    dw: Tensor | None,
    *,
    settings: HoldingSettings | None = None,
) -> None:
    """dX, dGate and dW, given total over all ``size`` columns of each group, of which x may hold a slice."""
    tile = settings or gated_backward_chunk_settings(how.group_size, _widest(x, gate, dy))
    _gradients(dy, x, gate, weight, rstd, total, size, how, dx, d_gate, dw, tile)


def _gradients(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor | None,
    size: int,
    how: Gated,
    dx: Tensor | None,
    d_gate: Tensor | None,
    dw: Tensor | None,
    tile: HoldingSettings,
) -> bool:
    """The kernel writes dX, dGate and P partial rows of dW; a second one adds those. False, and nothing is done, where
    a group takes larger clusters than the device has."""
    if dx is None and d_gate is None and dw is None:
        return True
    n, columns = how.group_size, x.shape[2]
    views = _Views(n, x, gate, dy)
    groups, chunks, tiles = columns // n, parts_of(n, tile), ceil_div(views.m, tile.rows)
    loaded = sum(tensor.element_size() for tensor in (x, gate, dy) if tensor is not None)
    stage = tile.rows * tile.block * tile.holds * loaded
    stages = fitting_stages(tile.stages, tile.per_sm, stage, shared_memory_of(x.device))
    strides = rstd.stride(0), 0 if total is None else total.stride(0), views.stride(dx), views.stride(d_gate)
    ptx = has_ptx(x.device)
    constants = (
        *(*views.how(x), *views.how(gate), *views.how(dy), views.unit_of(dx), views.unit_of(d_gate)),
        *(views.int64, groups, n, how.offset, *_constants(x, gate, how)),
        *(tile.rows, tile.block, tile.holds, tile.keeps, chunks, stages, ptx),
    )
    options = {"num_warps": min(tile.warps, 16) if torch.version.hip else tile.warps}
    if ptx:
        options["maxnreg"] = min(255, REGISTERS // (tile.warps * 32 * tile.per_sm) // 8 * 8)

    def arguments(partial: Tensor | None) -> tuple:
        return (
            *(dy, x, gate, weight, rstd, total, dx, d_gate, partial, views.m, tiles, size),
            *(*views.where(x), *views.where(gate), *views.where(dy), *strides),
        )

    cluster = chunks if total is None else 1
    allowed = allowed_partials(x, rstd) if dw is not None else tiles
    sms, per_sm, parts = multiprocessors(x.device), tile.per_sm, groups * chunks
    if cluster > 1:
        # How many clusters run at once depends on the kernel alone, for which one partial row is as good as many.
        one = None if dw is None else torch.empty(1, columns, dtype=rstd.dtype, device=x.device)
        sms = most_clusters(gated_backward_kernel, arguments(one), constants, cluster=cluster, **options)
        if sms == 0:
            return False
        per_sm, parts = 1, groups
    programs = program_count(tiles, parts, per_sm, sms, allowed)
    partial = dw
    if dw is not None and (programs > 1 or cluster > 1):
        partial = scratch((programs, columns), rstd.dtype, x.device)
    launch(gated_backward_kernel, (parts * programs,), arguments(partial), constants, **_clustered(cluster), **options)
    if dw is not None and partial is not None and partial is not dw:
        sum_partials(partial, dw)
    return True


def _clustered(cluster: int) -> dict[str, Any]:
    return {"cluster": cluster} if cluster > 1 else {}


def program_count(tiles: int, parts: int, per_sm: int, sms: int, allowed: int) -> int:
    """Programs that share the row tiles of each of ``parts``, the chunks of all groups: no more than run at once, since
    those that wait for others to end would take as long again; no more than there are tiles; and no more than the
    ``allowed`` partial rows of dW if these fill most of the device."""
    least = MACHINE_SHARE * sms / parts
    programs = min(sms * per_sm // parts, tiles, allowed if allowed >= least else ceil_div(sms, parts))
    return max(1, programs)


class _Views:
    """How a call's kernels see its tensors: rows at strides that count units, see above. Of a tensor that is None
    everything is 0 or 1, and read by no kernel."""

    def __init__(self, n: int, *inputs: Tensor | None) -> None:
        given = [tensor for tensor in inputs if tensor is not None]
        self.unit = min(vector(n, tensor.element_size()) for tensor in given)
        self.m = given[0].shape[0] * given[0].shape[1]
        self.int64 = row_view(given[0]).int64

    def _view(self, rows: Tensor) -> tuple[int, int, int, bool]:
        """(B, stride_a, stride_b, whether row r lies at r·stride_b), in elements."""
        a, b, _ = rows.shape
        stride_a, stride_b, _ = rows.stride()
        flat = b == 1 or a == 1 or stride_a == b * stride_b
        if flat:
            stride_a, stride_b = 0, stride_a if b == 1 else stride_b
        return b, stride_a, 0 if a * b == 1 else stride_b, flat

    def how(self, rows: Tensor | None) -> tuple[int, bool]:
        """(unit, flat) of a row view: constants of the kernel."""
        if rows is None:
            return 1, True
        _, stride_a, stride_b, flat = self._view(rows)
        return (1 if stride_a % self.unit or stride_b % self.unit else self.unit), flat

    def where(self, rows: Tensor | None) -> tuple[int, int, int]:
        """(B, stride_a, stride_b) of a row view, in its units."""
        if rows is None:
            return 1, 0, 0
        b, stride_a, stride_b, _ = self._view(rows)
        unit, _ = self.how(rows)
        return b, stride_a // unit, stride_b // unit

    def unit_of(self, rows: Tensor | None) -> int:
        """The unit of an (M, N) output."""
        return 1 if rows is None or rows.stride(0) % self.unit else self.unit

    def stride(self, rows: Tensor | None) -> int:
        return 0 if rows is None else rows.stride(0) // self.unit_of(rows)


def _in_units(rows: Tensor, views: _Views) -> Tensor:
    """A row view whose rows can be read in units, a copy where that takes one: for kernels that write no rows, whose
    order of summing would follow from how their inputs lie."""
    if views.how(rows)[0] == views.unit and (views.unit == 1 or rows.data_ptr() % 16 == 0):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _widest(*tensors: Tensor | None) -> torch.dtype:
    return max((tensor.dtype for tensor in tensors if tensor is not None), key=lambda dtype: dtype.itemsize)


def _constants(x: Tensor, gate: Tensor | None, how: Gated) -> tuple[Any, ...]:
    """(whether the gate comes first, its activation, whether the exponential is to be exact)."""
    first = gate is not None and not how.norm_before_gate
    return first, how.activation, _widest(x, gate).itemsize > 2


def _rounds(x: Tensor, weight: Tensor | None, how: Gated) -> bool:
    return weight is not None and rounds_product(how.casting_mode, x.dtype, weight.dtype)
