"""``meshnorm plan``: what a layout costs, on a mesh of any size, without running anything."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from meshnorm.checks import DTYPES, HIDDEN, WEIGHT_GRADS
from meshnorm.errors import OptionError

DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES} | {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def parse_shape(text: str) -> tuple[int, ...]:
    """ "8,8192,4096" or "8x8192x4096" as a tuple."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise OptionError(f"{text!r} is no shape: write its sizes as in 8,8192,4096")
    return tuple(map(int, parts))


def add_to(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "plan",
        help="what a layout costs, without running it",
        description="Placements and collectives of an RMSNorm, forward and backward, in words and bytes.",
        epilog="example: meshnorm plan --mesh dp=2,cp=4 --shape 8,8192,4096 --x 'S(0),S(1)'",
    )
    parser.add_argument("--mesh", required=True, help="dims and sizes, as in dp=2,cp=4")
    parser.add_argument("--shape", required=True, help="x's global shape, as in 8,8192,4096")
    parser.add_argument(
        "--x", required=True, help="x's placements, one a mesh dim: R, S(dim), P, P(op), SS(dim,split_factor)"
    )
    parser.add_argument("--residual", help="the residual's placements: the plan is that of add_rms_norm")
    parser.add_argument("--residual-dtype", choices=list(DTYPE_NAMES), metavar="DTYPE", help="defaults to x's")
    parser.add_argument("--gate", help="the gate's placements: the plan is that of gated_rms_norm")
    parser.add_argument("--gate-dtype", choices=list(DTYPE_NAMES), metavar="DTYPE", help="defaults to x's")
    parser.add_argument("--group-size", type=int, help="of gated_rms_norm: the numbers that are normalized together")
    parser.add_argument("--k", help="k's placements: the plan is that of qk_rms_norm, and x is q")
    parser.add_argument("--k-shape", help="k's global shape")
    parser.add_argument("--k-weight", default="replicated", help="as --weight, of k")
    parser.add_argument("--weight", default="replicated", help='"replicated" (default), "plain", "none" or placements')
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPE_NAMES), metavar="DTYPE", help="x's dtype")
    parser.add_argument("--weight-dtype", choices=list(DTYPE_NAMES), metavar="DTYPE", help="defaults to x's")
    parser.add_argument("--normalized-dims", type=int, default=1, help="how many dims are normalized (1)")
    parser.add_argument("--hidden", default="stats", choices=HIDDEN)
    parser.add_argument("--weight-grad", default="auto", choices=WEIGHT_GRADS)
    parser.add_argument("--output", help="y's placements, to choose how a partial x is reduced")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from meshnorm.notation import parse_mesh, parse_placements
    from meshnorm.planning import plan

    shape = parse_shape(options.shape)
    if not 1 <= options.normalized_dims <= len(shape):
        raise OptionError(f"--normalized-dims is {options.normalized_dims}, but the shape has {len(shape)} dims")
    print(
        plan(
            shape,
            parse_placements(options.x),
            parse_mesh(options.mesh),
            weight=_weight(options.weight),
            dtype=DTYPE_NAMES[options.dtype],
            weight_dtype=DTYPE_NAMES.get(options.weight_dtype),
            normalized_shape=shape[len(shape) - options.normalized_dims :],
            hidden=options.hidden,
            weight_grad=options.weight_grad,
            output_placements=parse_placements(options.output) if options.output else None,
            residual=parse_placements(options.residual) if options.residual else None,
            residual_dtype=DTYPE_NAMES.get(options.residual_dtype),
            gate=parse_placements(options.gate) if options.gate else None,
            gate_dtype=DTYPE_NAMES.get(options.gate_dtype),
            group_size=options.group_size,
            k=parse_placements(options.k) if options.k else None,
            k_shape=parse_shape(options.k_shape) if options.k_shape else None,
            k_weight=_weight(options.k_weight),
        )
    )
    return 0


def _weight(text: str) -> Any:
    """What ``plan`` takes for a weight."""
    from meshnorm.notation import parse_placements

    if text in ("replicated", "plain"):
        return text
    return None if text == "none" else parse_placements(text)
