"""A small language model on a context-parallel × tensor-parallel mesh, beside the same model in one process.

    torchrun --standalone --nproc-per-node 4 examples/train_context_parallel.py

Four ranks (CPU cores with gloo, or GPUs with NCCL) form a mesh of cp=2 × tp=2. The residual stream
[batch, sequence, hidden] lies on it as (Shard(1), Shard(2)): cp splits the sequence, tp the hidden dim. So each norm
before attention and MLP sees both layouts at once: rows split over cp, which costs it nothing, and rows cut in two over
tp, for which it exchanges one number a row. The norms of queries and keys are per head, and tp splits the heads, not a
head: nothing is exchanged at all.

Rank 0 trains the same model a second time, in one process, on plain tensors, with torch's own RMSNorm, the same start
and the same batches. Each step prints both losses; where they part by more than rounding the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from tqdm import tqdm

import meshnorm
from meshnorm import Collective
from meshnorm.checking.collectives import Recorder

# Layouts on the mesh dims (cp, tp).
STREAM = (Shard(1), Shard(2))  # [batch, sequence, hidden] or [batch, sequence, heads, head_dim]
WHOLE_SEQUENCE = (Replicate(), Shard(2))  # keys and values, which every query may look at
WHOLE_ROWS = (Shard(1), Replicate())  # tokens and logits
MATRIX = (Replicate(), Shard(1))  # [out, in], cut along what it multiplies
NORM = (Replicate(), Shard(0))  # the weight of a norm whose rows are cut
HEAD_NORM = (Replicate(), Replicate())  # the weight of a norm within a head
SUMMED = (Partial(), Shard(1))  # the gradient of a MATRIX: each cp rank has that of its own tokens

# Rounding alone may part the losses, since the mesh adds in another order. Relative, over 100 steps: 3e-7. Where the
# norms' weight gradients lack one rank's part it is 1e-5 after 4 steps, 1e-3 after 16.
TOLERANCE = 1e-5


# --- the model: one text for plain tensors and for DTensors -------------------------------------------------


def local(x: Tensor, gradient: tuple[Placement, ...] | None = None) -> Tensor:
    """This rank's part of a DTensor. ``gradient`` says what its gradient is, where that is not placed as x is.

    A weight that is replicated over cp needs it: to_local() alone would call the gradient of each rank's own tokens
    replicated too, and all but one rank's would be lost without a word.
    """
    assert isinstance(x, DTensor)
    return x.to_local(grad_placements=gradient)


class Linear(nn.Linear):
    """y = x Wᵀ. On the mesh a rank has a slice of the input dim, and its product is one summand of the output."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return F.linear(x, self.weight)
        product = F.linear(local(x), local(self.weight, SUMMED))
        summands = DTensor.from_local(product, x.device_mesh, (Shard(1), Partial()), run_check=False)
        return summands.redistribute(placements=STREAM)


class Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        if not isinstance(tokens, DTensor):
            return F.embedding(tokens, self.weight)
        rows = F.embedding(local(tokens), local(self.weight, SUMMED))
        return DTensor.from_local(rows, tokens.device_mesh, STREAM, run_check=False)


def attention(q: Any, k: Any, v: Any) -> Tensor:
    """Causal attention. [batch, sequence, heads, head_dim] -> [batch, sequence, hidden].

    On the mesh each rank has all heads of its tp part and the queries of its cp part of the sequence. Keys and values
    are gathered over cp; their gradients are then partial sums over cp, one from each part's queries.
    """
    if not isinstance(q, DTensor):
        return causal_attention(q, k, v, first=0)
    mesh = q.device_mesh
    k, v = (local(t.redistribute(placements=WHOLE_SEQUENCE), (Partial(), Shard(2))) for t in (k, v))
    q = local(q)
    out = causal_attention(q, k, v, first=mesh.get_local_rank("cp") * q.shape[1])
    return DTensor.from_local(out, mesh, STREAM, run_check=False)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Attention of queries at positions ``first`` and on to keys at positions 0 and on."""
    q_position = torch.arange(first, first + q.shape[1], device=q.device)
    k_position = torch.arange(k.shape[1], device=q.device)
    q, k = rotate(q, q_position), rotate(k, k_position)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    visible = k_position <= q_position[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, sequence, heads, head_dim]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 1000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, norm: type[nn.RMSNorm]):
        super().__init__()
        self.heads = (heads, hidden // heads)
        self.attention_norm = norm(hidden, eps=1e-6)
        self.q_norm = norm(hidden // heads, eps=1e-6)
        self.k_norm = norm(hidden // heads, eps=1e-6)
        self.mlp_norm = norm(hidden, eps=1e-6)
        self.q, self.k, self.v, self.o = (Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (project(normed).unflatten(2, self.heads) for project in (self.q, self.k, self.v))
        x = x + self.o(attention(self.q_norm(q), self.k_norm(k), v))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """[batch, sequence] bytes -> [batch, sequence, 256] logits of the next byte."""

    def __init__(self, hidden: int, heads: int, layers: int, norm: type[nn.RMSNorm]):
        super().__init__()
        self.embedding = Embedding(256, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, norm) for _ in range(layers))
        self.final_norm = norm(hidden, eps=1e-6)
        self.output = Linear(hidden, 256)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.final_norm(x))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens; ``target`` [batch, sequence, 256] is one-hot."""
    if isinstance(logits, DTensor):
        logits = logits.redistribute(placements=WHOLE_ROWS)
    loss = -(F.log_softmax(logits, -1) * target).sum() / (target.shape[0] * target.shape[1])
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def on_mesh(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """The same model with meshnorm's norms and its weights spread over the mesh, in place."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            placements = NORM if module.weight.shape == model.final_norm.weight.shape else HEAD_NORM
        elif isinstance(module, Linear | Embedding):
            placements = MATRIX
        else:
            continue
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    return model


# --- training -----------------------------------------------------------------------------------------------


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, target: Tensor) -> float:
    loss = cross_entropy(model(tokens), target)
    loss.backward()
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):  # partial over cp: summed once, here
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def batches(steps: int, batch: int, sequence: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, the bytes that follow each) of random places in Python's own manual; the same on every rank."""
    text = "".join(pydoc_data.topics.topics.values()).encode()
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
        window = text[starts + torch.arange(sequence + 1)]
        yield window[:, :-1], window[:, 1:]


# --- what the norms communicate -----------------------------------------------------------------------------


class Watch:
    """Over one step: what each norm planned to communicate, what it did, and what one that gathers x would have.

    A norm's plan is asked for before its call. All collectives of the step are recorded in order, so that those of a
    norm are the ones between entering it and leaving it, in the forward and in the backward.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        self.planned: dict[str, list[Collective]] = {"forward": [], "backward": []}
        self.seen: dict[str, list[Collective]] = {"forward": [], "backward": []}
        self.gathering: list[Collective] = []
        self.norms, self.silent = 0, 0
        self.recorder = Recorder(mesh)
        self.entered_at = 0
        self.hooks = []
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                self.hooks += [
                    module.register_forward_pre_hook(self.plan),
                    module.register_forward_pre_hook(self.enter),
                    module.register_forward_hook(lambda *_: self.leave("forward")),
                    module.register_full_backward_pre_hook(self.enter),
                    module.register_full_backward_hook(lambda *_: self.leave("backward")),
                ]

    def plan(self, norm: nn.RMSNorm, inputs: tuple[Tensor]) -> None:
        plan = meshnorm.plan(inputs[0], weight=norm.weight)
        self.norms += 1
        self.silent += not plan.forward + plan.backward
        self.planned["forward"] += plan.forward
        self.planned["backward"] += plan.backward
        self.gathering += plan.gathering

    def enter(self, *_: object) -> None:
        self.entered_at = len(self.recorder.seen)

    def leave(self, direction: str) -> None:
        self.seen[direction] += self.recorder.seen[self.entered_at :]

    def __enter__(self) -> None:
        self.recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.recorder.__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    @property
    def kept_to_plan(self) -> bool:
        return all(Counter(self.seen[way]) == Counter(self.planned[way]) for way in ("forward", "backward"))

    def report(self) -> str:
        lines = [
            f"{self.norms} norms ran in the first step, {self.silent} of them without any communication (planned)."
        ]
        lines.append("Their collectives, with the bytes that one rank contributes:")
        for way in ("forward", "backward"):
            lines += table(f"{way}, planned", self.planned[way]) + table(f"{way}, seen", self.seen[way])
        lines += table("gathering x, forward alone", self.gathering)
        ours, theirs = (sum(c.bytes for c in found) for found in (self.seen["forward"], self.gathering))
        times = f", {theirs / ours:,.0f} times as much" if ours else ""
        lines.append(f"Forward, ours moved {ours:,} bytes; norms that gather x first move {theirs:,}{times}.")
        return "\n".join(lines)


def table(title: str, collectives: list[Collective]) -> list[str]:
    """A line for each kind of collective and mesh dim: how many there were, and their bytes in all."""
    lines = []
    for kind, dim in sorted({(c.kind, c.mesh_dim) for c in collectives}):
        sizes = [c.bytes for c in collectives if (c.kind, c.mesh_dim) == (kind, dim)]
        lines.append(f"  {title:<28}{len(sizes):>3} {kind} over {dim:<4}{sum(sizes):>14,} bytes")
    return lines or [f"  {title:<28}  0"]


# --- the run ------------------------------------------------------------------------------------------------


def mark(good: bool) -> str:
    return "✓" if good else "✗"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on a cp × tp mesh, beside one process.")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share the sequence")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share the hidden dim")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 4 " + sys.argv[0])
    if int(os.environ["WORLD_SIZE"]) != args.cp * args.tp:
        parser.error(f"--cp {args.cp} --tp {args.tp} needs {args.cp * args.tp} ranks, not {os.environ['WORLD_SIZE']}")
    if args.sequence % args.cp or args.heads % args.tp or args.hidden % (2 * args.heads):
        parser.error("cp must divide --sequence, tp --heads, and twice the heads --hidden")

    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (args.cp, args.tp), mesh_dim_names=("cp", "tp"))
    mesh._flatten("cp_tp")  # what is partial over both dims is then summed in one collective
    first = dist.get_rank() == 0

    def build(norm: type[nn.RMSNorm]) -> Decoder:
        torch.manual_seed(args.seed)
        return Decoder(args.hidden, args.heads, args.layers, norm).to(device)

    model = on_mesh(build(meshnorm.RMSNorm), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    alone = build(nn.RMSNorm)
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=args.lr, foreach=False)

    if first:
        count = sum(parameter.numel() for parameter in alone.parameters())
        print(f"{count:,} weights on a mesh of cp={args.cp} × tp={args.tp} {device} ranks, torch {torch.__version__}")
    worst, watch = 0.0, Watch(model, mesh)
    # Where nobody watches (no terminal), the lines alone.
    progress = tqdm(total=args.steps, unit="step", disable=None if first else True, dynamic_ncols=True)
    for step, (tokens, following) in enumerate(batches(args.steps, args.batch, args.sequence, args.seed), 1):
        tokens, target = tokens.to(device), F.one_hot(following.to(device), 256).float()
        shares = (distribute_tensor(whole, mesh, WHOLE_ROWS) for whole in (tokens, target))
        with watch if step == 1 else nullcontext():
            loss = train_step(model, optimizer, *shares)
        if first:
            one = train_step(alone, alone_optimizer, tokens, target)
            apart = abs(loss - one) / one
            worst = max(worst, apart) if apart == apart else float("inf")
            progress.write(
                f"step {step:>4}/{args.steps}   loss on the mesh {loss:.6f}   in one process {one:.6f}   "
                f"apart {apart:.1e}, at most {worst:.1e}"
            )
            progress.update()
    progress.close()
    dist.destroy_process_group()
    if not first:
        return 0

    print(f"\n{watch.report()}\n")
    same, kept = worst <= TOLERANCE, watch.kept_to_plan
    print(f"{mark(same)} the losses differ by {worst:.1e} of their size at most; {TOLERANCE:.0e} is allowed")
    print(f"{mark(kept)} the norms communicated {'exactly' if kept else 'something other than'} what they planned")
    return 0 if same and kept else 1


if __name__ == "__main__":
    sys.exit(main())
