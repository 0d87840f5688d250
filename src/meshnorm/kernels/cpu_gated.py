"""The gated norm in plain torch, one block of rows after another: see ``cpu``, whose ways of keeping a row's bits its
own hold here as well.

One more: the activation is made of steps that each round once wherever a number stands. (torch's own sigmoid and silu
are not: their vector bodies take another exponential than their scalar tails.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formula_gated import Gated, rounds_product
from .cpu import _Blocks, _fold_rows, _head, _rsqrt_of_mean, _scale


def forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, how: Gated, y: Tensor, rstd: Tensor | None) -> None:
    """y and rstd, or y alone where rstd is None."""
    blocks = _GatedBlocks(x, gate, how)
    finish = _Finish(weight, how, y.dtype)
    for rows in blocks:
        v, act = blocks.input(rows)
        total = blocks.group_sums(torch.mul(v, v, out=_head(blocks.work, rows)))
        group_rstd = _rsqrt_of_mean(total, how.group_size, how.eps, out=None if rstd is None else rstd[rows])
        finish(blocks.times(v, group_rstd, _head(blocks.work, rows)), act, y[rows])


def statistic(x: Tensor, gate: Tensor | None, how: Gated, total: Tensor) -> None:
    """total = Σ v² over the columns that x holds of each group."""
    blocks = _GatedBlocks(x, None if how.norm_before_gate else gate, how)
    for rows in blocks:
        v, _ = blocks.input(rows)
        total[rows] = blocks.group_sums(torch.mul(v, v, out=_head(blocks.work, rows)))


def apply(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    size: int,
    how: Gated,
    y: Tensor,
    rstd: Tensor,
) -> None:
    """y and rstd, given total = Σ v² over all ``size`` columns of each group, of which x may hold a slice."""
    blocks = _GatedBlocks(x, gate, how)
    finish = _Finish(weight, how, y.dtype)
    for rows in blocks:
        v, act = blocks.input(rows)
        group_rstd = _rsqrt_of_mean(total[rows], size, how.eps, out=rstd[rows])
        finish(blocks.times(v, group_rstd, _head(blocks.work, rows)), act, y[rows])


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
) -> None:
    """dX, dGate and dW, or those of them that are not None."""
    _gradients(dy, x, gate, weight, rstd, None, how.group_size, how, dx, d_gate, dw)


def backward_statistic(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, rstd: Tensor, how: Gated, total: Tensor
) -> None:
    """total = Σ E·(w + offset)·x̂ over the columns that x holds of each group."""
    blocks = _GatedBlocks(x, gate, how)
    scale = _scale(weight, how.offset, blocks.dtype)
    dy_values = blocks.buffer()
    for rows in blocks:
        v, act = blocks.input(rows)
        product = blocks.times(v, rstd[rows], _head(blocks.work, rows))
        product.mul_(blocks.read(dy, rows, dy_values))
        if act is not None:
            product.mul_(act)
        if scale is not None:
            product.mul_(scale)
        total[rows] = blocks.group_sums(product)


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
) -> None:
    """dX, dGate and dW, given total over all ``size`` columns of each group, of which x may hold a slice."""
    _gradients(dy, x, gate, weight, rstd, total, size, how, dx, d_gate, dw)


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
) -> None:
    """The loop of both backwards: without ``total`` the groups' sums are taken here."""
    blocks = _GatedBlocks(x, gate, how)
    scale = _scale(weight, how.offset, blocks.dtype)
    dy_values, slopes = blocks.buffer(), blocks.buffer()
    accumulator = None if dw is None else blocks.buffer().zero_()
    first = gate is not None and not how.norm_before_gate
    needs_dv = dx is not None or (first and d_gate is not None)
    for rows in blocks:
        x_block = blocks.read(x, rows, blocks.values)
        dy_block, work = blocks.read(dy, rows, dy_values), _head(blocks.work, rows)
        act = slope = None
        if gate is not None:
            act, slope = blocks.activation_and_slope(rows, slopes)
            if first:
                slope.mul_(x_block)
                x_block = torch.mul(x_block, act, out=_head(blocks.values, rows))
        group_rstd = rstd[rows]
        x_hat = blocks.times(x_block, group_rstd, _head(blocks.values, rows))
        if gate is not None and not first and d_gate is not None:
            assert slope is not None
            product = torch.mul(dy_block, x_hat, out=work)
            d_gate[rows] = (product if scale is None else product.mul_(scale)).mul_(slope)
        grad = dy_block if act is None or first else torch.mul(dy_block, act, out=act)
        if accumulator is not None or (needs_dv and total is None):
            torch.mul(grad, x_hat, out=work)
        if accumulator is not None:
            _head(accumulator, rows).add_(work)
        if not needs_dv:
            continue
        if total is not None:
            group_total = total[rows]
        else:
            group_total = blocks.group_sums(work if scale is None else work.mul_(scale))
        scaled = grad if scale is None else torch.mul(grad, scale, out=work)
        x_hat = blocks.times(x_hat, group_total / size, x_hat)
        dv = blocks.times(torch.sub(scaled, x_hat, out=work), group_rstd, work)
        if dx is not None:
            dx[rows] = torch.mul(dv, act, out=x_hat) if first and act is not None else dv
        if first and d_gate is not None and slope is not None:
            d_gate[rows] = dv.mul_(slope)
    if dw is not None and accumulator is not None:
        dw.copy_(_fold_rows(accumulator))


class _GatedBlocks(_Blocks):
    """Blocks of rows, and what is made of x and the gate of one. ``values``, ``work`` and one for the activation hold a
    block each; what ``input`` returns lies in them, but never in ``work``."""

    def __init__(self, x: Tensor, gate: Tensor | None, how: Gated) -> None:
        super().__init__(x)
        self.x, self.gate, self.how = x, gate, how
        self.groups = self.n // how.group_size
        self.values, self.work = self.buffer(), self.buffer()
        self.act = None if gate is None else self.buffer()

    def input(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """(v, the activation where it comes after the norm)."""
        x_block = self.read(self.x, rows, self.values)
        if self.gate is None or self.act is None:
            return x_block, None
        gate = self.read(self.gate, rows, self.work)
        act = torch.neg(gate, out=_head(self.act, rows)).exp_().add_(1)
        act = torch.div(gate, act, out=act) if self.how.activation == "silu" else act.reciprocal_()
        if self.how.norm_before_gate:
            return x_block, act
        return torch.mul(x_block, act, out=_head(self.values, rows)), None

    def activation_and_slope(self, rows: slice, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """(act(gate), act'(gate)), both to be written over. With e = exp(−gate), σ is 1 / (1 + e) and 1 − σ is
        e / (1 + e), without a cancellation; where e overflows σ is 0, and e is kept finite."""
        assert self.gate is not None and self.act is not None
        gate = self.read(self.gate, rows, self.work)
        slope, act = _head(slopes, rows), _head(self.act, rows)
        torch.neg(gate, out=slope).exp_()
        torch.add(slope, 1, out=act)
        slope.clamp_(max=torch.finfo(self.dtype).max).div_(act)
        if self.how.activation == "silu":
            slope.mul_(gate).add_(1).div_(act)
            torch.div(gate, act, out=act)
        else:
            slope.mul_(act.reciprocal_())
        return act, slope

    def group_sums(self, block: Tensor) -> Tensor:
        """Σ over each group of ``block``, which lies at the head of ``work``: (rows, groups). Of two sums at least."""
        groups = len(block) * self.groups
        sums = self.work.view(-1, self.how.group_size)[: max(2, groups)].sum(1)
        return sums[:groups].view(len(block), self.groups)

    def times(self, block: Tensor, each: Tensor, out: Tensor) -> Tensor:
        """``block`` times one number a row and group, in ``out``."""
        if self.groups == 1:
            return torch.mul(block, each, out=out)
        shape = (self.groups, self.how.group_size)
        torch.mul(block.unflatten(1, shape), each[:, :, None], out=out.unflatten(1, shape))
        return out


class _Finish:
    """y of a block's x̂, which is written over, rounded where the casting mode says (see ``formula_gated``)."""

    def __init__(self, weight: Tensor | None, how: Gated, dtype: torch.dtype) -> None:
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        self.scale = _scale(weight, how.offset, acc)
        narrow = dtype != acc
        self.rounds_x_hat = narrow and how.casting_mode != "gemma"
        self.rounds_act = narrow and how.casting_mode == "none"
        self.rounds_product = narrow and weight is not None and rounds_product(how.casting_mode, dtype, weight.dtype)
        if self.scale is not None and self.rounds_act:
            self.scale = self.scale.to(dtype).to(acc)

    def __call__(self, x_hat: Tensor, act: Tensor | None, y_block: Tensor) -> None:
        if self.rounds_x_hat:
            x_hat.copy_(y_block.copy_(x_hat))
        if self.scale is not None:
            x_hat.mul_(self.scale)
        if act is not None:
            if self.rounds_product:
                x_hat.copy_(y_block.copy_(x_hat))
            if self.rounds_act:
                act.copy_(y_block.copy_(act))
            x_hat.mul_(act)
        y_block.copy_(x_hat)
