"""``meshnorm check``: every layout, forward and backward, against float64 and against its plan.

Under torchrun it uses the ranks that are there, on their GPUs where they have one; else it starts CPU ranks itself.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from meshnorm.cli.plan import DTYPE_NAMES, parse_shape
from meshnorm.errors import OptionError

if TYPE_CHECKING:
    from meshnorm.checking.case import Case, Outcome


def add_to(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "check",
        help="every layout against float64, and the collectives that ran against those planned",
        description="Runs every layout of a mesh, forward and backward, against float64 and against its plan. "
        "Exit status 1 where anything differs.",
        epilog="on GPUs: torchrun --nproc-per-node 2 -m meshnorm check --mesh tp=2",
    )
    parser.add_argument("--mesh", help="dims and sizes, as in dp=2,cp=2 (the default without torchrun: dp=2,cp=2)")
    parser.add_argument("--shape", default="5,6,18", help="x's global shape: batch, sequence, hidden (5,6,18)")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPE_NAMES), metavar="DTYPE")
    parser.add_argument("--casting-mode", default="llama", choices=("llama", "gemma", "none"))
    parser.add_argument("--offset", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from meshnorm.notation import parse_mesh

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
        mesh = parse_mesh(options.mesh) if options.mesh else {"mesh": ranks}
        _check_size(mesh, ranks)
        return _on_these_ranks(options, mesh)
    mesh = parse_mesh(options.mesh or "dp=2,cp=2")
    if math.prod(mesh.values()) > 64:
        raise OptionError(
            f"--mesh has {math.prod(mesh.values())} ranks: check starts at most 64 CPU ranks on one machine"
        )
    return _on_cpu_ranks(options, mesh)


def cases(options: argparse.Namespace, mesh: dict[str, int]) -> list[Case]:
    """Every product of placements over the mesh dims, with each kind of weight that behaves differently there."""
    from meshnorm.checking.case import Case

    shape = parse_shape(options.shape)
    each = ["R", *(f"S({dim})" for dim in range(len(shape))), "P"]
    hidden = f"S({len(shape) - 1})"
    found = []
    for placements in itertools.product(each, repeat=len(mesh)):
        variants: list[dict[str, Any]] = [{"weight": ""}, {"weight": "plain"}]
        if hidden in placements:
            own = ",".join("S(0)" if p == hidden else "R" for p in placements)
            variants += [{"weight": own}, {"weight": "", "hidden": "gather"}]
        if any(p.startswith("S") and p != hidden for p in placements):
            variants.append({"weight": "", "weight_grad": "reduced"})
        for variant in variants:
            found.append(
                Case(
                    tuple(mesh.items()),
                    shape,
                    ",".join(placements),
                    dtype=DTYPE_NAMES[options.dtype],
                    casting_mode=options.casting_mode,
                    offset=options.offset,
                    seed=options.seed + len(found),
                    **variant,
                )
            )
    return found


def _check_size(mesh: dict[str, int], ranks: int) -> None:
    if math.prod(mesh.values()) != ranks:
        raise OptionError(f"--mesh has {math.prod(mesh.values())} ranks, but torchrun started {ranks}")


def _on_cpu_ranks(options: argparse.Namespace, mesh: dict[str, int]) -> int:
    from meshnorm.checking.case import attempt_case
    from meshnorm.checking.ranks import RankPool

    with RankPool(math.prod(mesh.values())) as pool:
        return _report(
            mesh, ((case, pool.run(attempt_case, case)) for case in cases(options, mesh)), "CPU ranks over gloo"
        )


def _on_these_ranks(options: argparse.Namespace, mesh: dict[str, int]) -> int:
    import torch.distributed as dist

    from meshnorm.checking.case import attempt_case

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    try:

        def outcomes() -> Iterable[tuple[Case, list[Outcome]]]:
            for case in cases(options, mesh):
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, attempt_case(case, device))
                yield case, gathered

        quiet = dist.get_rank() != 0
        where = torch.cuda.get_device_name() + "s over NCCL" if device == "cuda" else "CPU ranks over gloo"
        status = _report(mesh, outcomes(), where, quiet)
        dist.barrier()  # or a rank that leaves early aborts the others' last messages
    except BaseException:
        dist.destroy_process_group()
        raise
    if device == "cpu":
        _leave(status)
    dist.destroy_process_group()
    return status


def _leave(status: int) -> None:
    """Ends this rank, whose work is done, at once. Taking gloo's groups apart now and then aborts a rank ("terminate
    called without an active exception", torch 2.13 under load), and torchrun then calls the whole run failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report(
    mesh: dict[str, int], outcomes: Iterable[tuple[Case, list[Outcome]]], where: str, quiet: bool = False
) -> int:
    """Prints the table and returns the exit status."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"RMSNorm on mesh {', '.join(f'{n}={s}' for n, s in mesh.items())}, {where}")
    for column in ("x", "weight", "hidden", "weight_grad", "y", "dX", "dW", "planned", "seen", ""):
        table.add_column(column, justify="right" if column in ("y", "dX") else "left", no_wrap=column == "x")
    faults: list[str] = []
    count = 0
    for case, found in outcomes:
        count += 1
        wrong = [f"rank {rank}: {fault}" for rank, outcome in enumerate(found) for fault in outcome.faults]
        errors = [max(outcome.relative.get(name, math.nan) for outcome in found) for name in ("y", "dX", "dW")]
        table.add_row(
            case.x,
            case.weight or "replicated",
            case.hidden,
            case.weight_grad,
            *(f"{error:.1e}" for error in errors),
            _words(found[0].planned),
            _words(found[0].seen),
            "✗" if wrong else "✓",
        )
        if wrong:
            faults.append(f"✗ {case}\n    " + "\n    ".join(wrong))
    if not quiet:
        console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
        console.print(table)
        for fault in faults:
            console.print(fault, markup=False)
        console.print(
            f"{count - len(faults)} of {count} layouts right; errors are the largest over the ranks, relative to the "
            f"largest value, against float64; collectives are those of the first rank, in bytes",
            markup=False,
        )
    return 1 if faults else 0


def _words(collectives: tuple) -> str:
    return "; ".join(f"{c.kind} {c.mesh_dim} {c.bytes}" for c in collectives) or "none"
