"""Plain tensors need neither distributed nor Triton: in a fresh process, what is imported and what works without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshnorm

SOURCE = Path(meshnorm.__file__).parents[1]

# A torch built without distributed lacks these four; everything in torch that asks is_available() then does without.
WITHOUT_DISTRIBUTED = """
import sys

class Builder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                if hasattr(sys.modules["torch._C"], part):
                    delattr(sys.modules["torch._C"], part)

sys.meta_path.insert(0, Builder())
import torch

assert not torch.distributed.is_available()
before = set(sys.modules)

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch.distributed"):
            raise ImportError(f"{name} is not in this build")

sys.meta_path.insert(0, Refusal())
try:
    import torch.distributed.tensor
except ImportError:
    pass
else:
    raise AssertionError("the simulation does not hold")
"""

PLAIN_USE = """
import torch
import meshnorm
from meshnorm import RMSNorm, rms_norm
from meshnorm.formula import reference_backward, reference_forward

x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
dy = torch.randn(3, 4, 8, dtype=torch.float64)
y = rms_norm(x, weight, offset=1.0, casting_mode="gemma")
y.backward(dy)
with torch.no_grad():
    dx, dw = reference_backward(dy, x, weight, 1e-6, 1.0)
    pairs = [(y, reference_forward(x, weight, 1e-6, 1.0)), (x.grad, dx), (weight.grad, dw)]
    # torch.testing would import DTensor.
    assert all(torch.allclose(found, expected, rtol=1e-12, atol=1e-12) for found, expected in pairs)

norm, x = RMSNorm(8), torch.randn(3, 8, requires_grad=True)
norm(x).sum().backward()
assert torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (8,)))
assert norm.weight.grad.shape == (8,) and x.grad.shape == (3, 8)
try:
    rms_norm(x, torch.ones(7))
except meshnorm.errors.WeightShapeError:
    pass
else:
    raise AssertionError("a wrong weight was taken")
"""


def _run(program: str) -> str:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def without_distributed() -> str:
    """What a process prints that norms plain tensors where torch has no distributed."""
    asked = """
print("new:", *(name for name in set(sys.modules) - before if name.startswith("torch.distributed")))
from meshnorm.cli import main
main(["env"])
"""
    return _run(WITHOUT_DISTRIBUTED + PLAIN_USE + asked)


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """The modules of a fresh process: with torch, then with meshnorm, then after it normed plain tensors."""
    asked = "\nimport sys\nprint(*sys.modules)\n"
    lines = _run("import torch" + asked + "import meshnorm" + asked + PLAIN_USE + asked).splitlines()
    return [set(line.split()) for line in lines]


def test_plain_tensors_work_in_a_torch_without_distributed(without_distributed: str) -> None:
    assert without_distributed.startswith("new:\n")


def test_env_says_that_distributed_is_missing(without_distributed: str) -> None:
    assert "not in this build of torch: plain tensors only" in without_distributed


def test_plain_tensors_import_no_dtensor(imported: list[set[str]]) -> None:
    # DTensor takes most of a second to import, and those who norm plain tensors would pay for it in every process.
    before, with_meshnorm, used = imported
    assert "meshnorm.functional" in with_meshnorm - before
    assert not [name for name in used - before if name.startswith("torch.distributed")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, its kernels are Triton's")
def test_plain_tensors_on_a_cpu_import_no_triton(imported: list[set[str]]) -> None:
    before, _, used = imported
    assert not [name for name in used - before if name.partition(".")[0] == "triton"]


def test_plain_tensors_import_no_checks_and_no_command_line(imported: list[set[str]]) -> None:
    before, _, used = imported
    heavy = (
        "meshnorm.checking",
        "meshnorm.cli",
        "meshnorm.planning",
        "meshnorm.sharded",
        "rich",
        "hypothesis",
        "numpy",
    )
    assert not [name for name in used - before if name.startswith(heavy)]
