"""Layouts on GPUs over NCCL: the same check that CPU ranks run, one process a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, since NCCL takes one rank a GPU")
@pytest.mark.parametrize(
    ("mesh", "shape", "dtype"),
    [
        ("cp=2", "3,7,128", "bfloat16"),
        ("tp=2", "3,7,130", "bfloat16"),
        ("tp=2", "2,5,4097", "float32"),
        ("one=1,tp=2", "2,5,1000", "float16"),
    ],
)
def test_every_layout_on_two_gpus(mesh, shape, dtype):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "meshnorm", "check", "--mesh", mesh, "--shape", shape, "--dtype", dtype),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "160"})
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "✓" in found.stdout and "✗" not in found.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, since NCCL takes one rank a GPU")
@pytest.mark.parametrize("mesh", [("1", "2"), ("2", "1")], ids=["tp", "cp"])
def test_the_demo_trains_on_two_gpus(mesh):
    example = Path(__file__).parent.parent / "examples" / "train_context_parallel.py"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(example), "--cp", mesh[0], "--tp", mesh[1], "--steps", "8"),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "cuda ranks" in found.stdout
