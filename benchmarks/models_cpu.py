"""Ten tiny models trained with their own norms and converted, for docs/models.md: bits, gradients, loss curves.

    python benchmarks/models_cpu.py [--out benchmarks/results/FILE.txt] [--families Llama Qwen3] [--steps 20]

Needs Transformers. The models, the text and the ranks are those of ``tests/test_models.py``: one process, FSDP2 over
dp 2 × cp 2 (dp 4 where a recurrence runs along the sequence), and Transformers' own tensor parallelism over 2 ranks.
Gradients: |found − exact| / |exact| of all parameters together in the first step. Curves: the largest difference of the
loss in any step. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from spread_models import train_data_and_context_parallel, train_tensor_parallel
from tiny_models import FAMILIES, STEPS, Family, Trained, converted, error_of, judge, model_of, train

from meshnorm.checking.ranks import RankPool

COLUMNS = (
    *("family", "dtype", "logits, same bits", "gradients: own", "converted", "loss", "curves apart"),
    *("own − float64", "converted − float64", "dp × cp, curves apart", "tp, curves apart"),
)


def apart(found: Trained, other: Trained) -> str:
    gap = max(abs(a - b) for a, b in zip(found.losses, other.losses, strict=True))
    return f"{gap:.1e}" if gap else "0"


def measured(family: Family, dtype: torch.dtype, steps: int, pools: tuple[RankPool, RankPool]) -> Iterator[str]:
    model = model_of(family, dtype)
    own, exact = train(copy.deepcopy(model), steps), train(judge(model), steps)
    found = train(converted(copy.deepcopy(model), family), steps)
    yield from (family.name, str(dtype).removeprefix("torch."))
    yield f"{(found.logits == own.logits).double().mean().item():.0%}"
    yield from (f"{error_of(each.gradients, exact.gradients):.1e}" for each in (own, found))
    yield f"{own.losses[0]:.2f} → {own.losses[-1]:.2f}"
    yield from (apart(found, own), apart(own, exact), apart(found, exact))
    spread = [pools[1].run(train_data_and_context_parallel, family, dtype, c, steps)[0] for c in (False, True)]
    yield apart(spread[1], spread[0])
    if not family.sharded:
        yield ""
        return
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        spread = [pools[0].run(train_tensor_parallel, family, dtype, c, steps, path)[0] for c in (False, True)]
    yield apart(spread[1], spread[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=[family.name for family in FAMILIES])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, help="write the table there too")
    options = parser.parse_args()

    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before the ranks start
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines = [
        f"CPU, torch {torch.__version__}, Transformers {transformers.__version__}, {datetime.date.today()}, "
        f"{options.steps} steps",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    print("\n".join(lines))
    with RankPool(2) as two, RankPool(4) as four:
        for family in FAMILIES:
            if options.families and family.name not in options.families:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                lines.append(f"| {' | '.join(measured(family, dtype, options.steps, (two, four)))} |")
                print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
