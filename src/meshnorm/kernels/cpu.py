"""The norm in plain torch, one block of rows after another, so that a block's intermediates stay in the cache.

For CPUs, and for every device without Triton. What keeps a row's bits independent of its neighbours and of the number
of threads:

- Every elementwise step rounds once. (addcmul would not do: its vector body fuses the multiplication and the addition,
  its scalar tail does not.)
- A sum along rows always has two results or more. (torch splits a sum with a single result between the threads, and
  its order with it.)

dW is added up elementwise in an accumulator of the block's shape, whose rows are folded in halves at the end: its
order is fixed for a number of rows and of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formula import accumulation_dtype

# Elements of a work buffer for each thread: 1 MiB of float32. Each step over a block ends with the threads waiting for
# one another, which takes long where other processes keep the cores busy: so few and large blocks. 4096×4096 bf16 on 2
# idle cores with 1 MiB of L2 each and 32 MiB of L3, forward / backward in ms: 22 / 39 at 2^14, 15 / 24 at 2^15, 10 / 18
# at 2^16, 8.2 / 13.6 at 2^17, 7.5 / 12.4 at 2^18 (torch 2.13, whose F.rms_norm takes 92 / 185).
BLOCK_ELEMENTS = 1 << 18
# And all threads together: four buffers of 8 MiB.
BLOCK_ELEMENTS_OF_ALL_THREADS = 1 << 21
# On other devices a block is some ten launches: large enough for them not to count.
BLOCK_ELEMENTS_ACCELERATOR = 1 << 24


def forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor | None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> None:
    """y and rstd, or y alone where rstd is None; with a residual of what is then residual_out."""
    blocks = _Blocks(x)
    normalize = _Normalizer(weight, offset, mode, y.dtype)
    values, work = blocks.buffer(), blocks.buffer()
    for rows in blocks:
        x_block = blocks.read_sum(x, residual, residual_out, rows, values, work)
        total = _row_sums(torch.mul(x_block, x_block, out=_head(work, rows)), work)
        row_rstd = _rsqrt_of_mean(total, blocks.n, eps, out=None if rstd is None else rstd[rows])
        normalize(x_block, row_rstd, work, y[rows])


def statistic(x: Tensor, total: Tensor, residual: Tensor | None = None, residual_out: Tensor | None = None) -> None:
    """total = Σ x² over x's columns; with a residual Σ residual_out²."""
    blocks = _Blocks(x)
    values = blocks.buffer()
    work = values if residual is None else blocks.buffer()
    for rows in blocks:
        x_block = blocks.read_sum(x, residual, residual_out, rows, values, work)
        total[rows] = _row_sums(torch.mul(x_block, x_block, out=_head(values, rows)), values)


def apply(
    x: Tensor,
    weight: Tensor | None,
    total: Tensor,
    hidden_size: int,
    eps: float,
    offset: float,
    mode: str,
    y: Tensor,
    rstd: Tensor,
) -> None:
    """y and rstd, given total = Σ x² over all ``hidden_size`` columns, of which x may hold a slice."""
    blocks = _Blocks(x)
    normalize = _Normalizer(weight, offset, mode, y.dtype)
    values, work = blocks.buffer(), blocks.buffer()
    for rows in blocks:
        x_block = blocks.read(x, rows, values)
        row_rstd = _rsqrt_of_mean(total[rows], hidden_size, eps, out=rstd[rows])
        normalize(x_block, row_rstd, work, y[rows])


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    d_residual_out: Tensor | None = None,
    d_residual: Tensor | None = None,
) -> None:
    """dX and dW, or the one of them that is not None."""
    _gradients(dy, x, weight, rstd, None, x.shape[2], offset, dx, dw, d_residual_out, d_residual)


def backward_statistic(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, total: Tensor
) -> None:
    """total = Σ dY·(w+offset)·x̂ over x's columns."""
    blocks = _Blocks(x)
    scale = _scale(weight, offset, blocks.dtype)
    values, work = blocks.buffer(), blocks.buffer()
    for rows in blocks:
        x_hat = torch.mul(blocks.read(x, rows, values), rstd[rows, None], out=_head(values, rows))
        product = torch.mul(blocks.read(dy, rows, work), x_hat, out=_head(work, rows))
        if scale is not None:
            product.mul_(scale)
        total[rows] = _row_sums(product, work)


def backward_apply(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor,
    hidden_size: int,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    d_residual_out: Tensor | None = None,
    d_residual: Tensor | None = None,
) -> None:
    """dX and dW, given total = Σ dY·(w+offset)·x̂ over all ``hidden_size`` columns, of which x may hold a slice."""
    _gradients(dy, x, weight, rstd, total, hidden_size, offset, dx, dw, d_residual_out, d_residual)


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    total: Tensor | None,
    hidden_size: int,
    offset: float,
    dx: Tensor | None,
    dw: Tensor | None,
    d_residual_out: Tensor | None,
    d_residual: Tensor | None,
) -> None:
    """The loop of both backwards: without ``total`` the row sums are taken here."""
    blocks = _Blocks(x)
    scale = _scale(weight, offset, blocks.dtype)
    x_values, dy_values, work = blocks.buffer(), blocks.buffer(), blocks.buffer()
    accumulator = None if dw is None else blocks.buffer().zero_()
    for rows in blocks:
        row_rstd = rstd[rows, None]
        x_hat = torch.mul(blocks.read(x, rows, x_values), row_rstd, out=_head(x_values, rows))
        dy_block = blocks.read(dy, rows, dy_values)
        scratch = _head(work, rows)
        if accumulator is not None or total is None:
            torch.mul(dy_block, x_hat, out=scratch)
        if accumulator is not None:
            _head(accumulator, rows).add_(scratch)
        if dx is None:
            continue
        if total is not None:
            row_total = total[rows]
        else:
            row_total = _row_sums(scratch if scale is None else scratch.mul_(scale), work)
        scaled = dy_block if scale is None else torch.mul(dy_block, scale, out=scratch)
        x_hat.mul_((row_total / hidden_size)[:, None])
        gradient = torch.sub(scaled, x_hat, out=scratch).mul_(row_rstd)
        if d_residual_out is not None:
            gradient.add_(blocks.read(d_residual_out[None], rows, x_values))
        dx[rows] = gradient
        if d_residual is not None:
            d_residual[rows] = gradient
    if dw is not None and accumulator is not None:
        dw.copy_(_fold_rows(accumulator))


class _Blocks:
    """The blocks of rows that x is worked through in: iterating gives one slice of the M rows for each."""

    def __init__(self, x: Tensor) -> None:
        self.m, self.n = x.shape[0] * x.shape[1], x.shape[2]
        self.dtype = accumulation_dtype(x.dtype)
        self.device = x.device
        elements = BLOCK_ELEMENTS_ACCELERATOR
        if x.device.type == "cpu":
            elements = min(BLOCK_ELEMENTS * torch.get_num_threads(), BLOCK_ELEMENTS_OF_ALL_THREADS)
        self.rows = min(self.m, max(1, elements // self.n))

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.m, self.rows):
            yield slice(start, min(start + self.rows, self.m))

    def buffer(self) -> Tensor:
        """Room for one block in the accumulation dtype, two rows at least (see ``_row_sums``)."""
        return torch.empty(max(2, self.rows), self.n, dtype=self.dtype, device=self.device)

    def read(self, view: Tensor, rows: slice, buffer: Tensor) -> Tensor:
        """These rows of an (A, B, N) row view in the accumulation dtype: in place where they are that, else copied."""
        b_size = view.shape[1]
        if view.shape[0] == 1 or b_size == 1 or view.stride(0) == b_size * view.stride(1):
            block = view.view(-1, self.n)[rows]
            return block if view.dtype == self.dtype else _head(buffer, rows).copy_(block)
        start, begin = rows.start, 0
        while start < rows.stop:  # the rest of an a, then whole a's, then the start of the last one
            a, b = divmod(start, b_size)
            whole = (rows.stop - start) // b_size if b == 0 else 0
            part = view[a : a + whole] if whole else view[a : a + 1, b : b + rows.stop - start]
            length = part.shape[0] * part.shape[1]
            buffer[begin : begin + length].view(part.shape).copy_(part)
            start, begin = start + length, begin + length
        return buffer[:begin]

    def read_sum(
        self,
        x: Tensor,
        residual: Tensor | None,
        residual_out: Tensor | None,
        rows: slice,
        values: Tensor,
        work: Tensor,
    ) -> Tensor:
        """These rows of x; with a residual those of x + residual as residual_out, where they are written, holds
        them."""
        x_block = self.read(x, rows, values)
        if residual is None or residual_out is None:
            return x_block
        exact = torch.add(x_block, self.read(residual, rows, work), out=_head(values, rows))
        stored = residual_out[rows].copy_(exact)
        return exact if stored.dtype == exact.dtype else exact.copy_(stored)


class _Normalizer:
    """y of a block, rounded where the casting mode says (see ``formula``)."""

    def __init__(self, weight: Tensor | None, offset: float, mode: str, dtype: torch.dtype) -> None:
        acc = accumulation_dtype(dtype)
        self.scale = _scale(weight, offset, acc)
        self.rounds_x_hat = mode != "gemma" and dtype != acc
        # A scale that x's dtype holds exactly multiplies the rounded x̂ in that dtype: one pass instead of three.
        self.scales_rounded = self.rounds_x_hat and (
            mode == "none" or (weight is not None and weight.dtype == dtype and offset == 0)
        )
        if self.scale is not None and self.scales_rounded:
            self.scale = self.scale.to(dtype)

    def __call__(self, x_block: Tensor, row_rstd: Tensor, work: Tensor, y_block: Tensor) -> None:
        x_hat = torch.mul(x_block, row_rstd[:, None], out=work[: len(x_block)])
        if self.scale is None:
            y_block.copy_(x_hat)
        elif self.scales_rounded:
            y_block.copy_(x_hat).mul_(self.scale)
        elif self.rounds_x_hat:
            y_block.copy_(x_hat.copy_(y_block.copy_(x_hat)).mul_(self.scale))
        else:
            y_block.copy_(x_hat.mul_(self.scale))


def _scale(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """w + offset, added in ``dtype``."""
    if weight is None or (offset == 0 and weight.dtype == dtype):
        return weight
    return weight.to(dtype) + offset


def _rsqrt_of_mean(total: Tensor, hidden_size: int, eps: float, out: Tensor | None) -> Tensor:
    return torch.div(total, hidden_size, out=out).add_(eps).rsqrt_()


def _row_sums(block: Tensor, buffer: Tensor) -> Tensor:
    """Σ along each row of ``block``, which lies at the head of ``buffer``."""
    return buffer[: max(2, len(block))].sum(1)[: len(block)]


def _fold_rows(block: Tensor) -> Tensor:
    """Σ over the rows of ``block``, overwriting it: the lower half is added to the upper one until one row is left."""
    rows = len(block)
    while rows > 1:
        half = (rows + 1) // 2
        block[: rows - half].add_(block[half:rows])
        rows = half
    return block[0]


def _head(buffer: Tensor, rows: slice) -> Tensor:
    return buffer[: rows.stop - rows.start]
