"""Accelerate: norms swapped before ``prepare``, trained as they were, on CPU ranks and on GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate_ranks import LLAMA, STEPS, accelerator_for, trained
from tiny_models import error_of, model_of, train

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")
pytest.importorskip("transformers", reason="Transformers is not installed: pip install meshnorm[transformers]")

ULP = 2.0**-23


@pytest.mark.parametrize("way", ["ddp", "fsdp", "cp", "tp"])
def test_a_model_that_accelerate_prepares_trains_as_before_and_as_in_one_process(pool2, tmp_path, way) -> None:
    if way == "tp":
        pytest.importorskip("transformers.distributed.tensor_parallel", reason="this Transformers has another")
    model = model_of(LLAMA)
    model.save_pretrained(tmp_path)
    one = train(model, STEPS)
    own = pool2.run(trained, way, False, str(tmp_path))
    for (losses, gradients), (theirs, _) in zip(pool2.run(trained, way, True, str(tmp_path)), own, strict=True):
        assert all(abs(a - b) <= 4 * ULP * b for a, b in zip(losses, theirs, strict=True))
        assert all(abs(a - b) <= 8 * ULP * b for a, b in zip(losses, one.losses, strict=True))
        assert gradients.keys() == one.gradients.keys()
        for name, gradient in one.gradients.items():
            assert error_of({name: gradients[name]}, {name: gradient}) <= 64 * ULP, name


def _refused() -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState

    accelerator_for("ddp")
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match=r"only compatible DistributedType.FSDP .version 2. or DistributedType.Multi"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


def test_accelerate_refuses_parallelism_on_cpus(pool2) -> None:
    """If it no longer does, accelerator_for can ask it for what it sets by hand."""
    pool2.run(_refused)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, since NCCL takes one rank a GPU")
@pytest.mark.parametrize("way", ["tp", "cp"])
def test_parallelism_config_trains_a_converted_model_on_two_gpus(way) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(Path(__file__).parent / "accelerate_ranks.py"), way),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "converted" in found.stdout
