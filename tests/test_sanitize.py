"""``benchmarks/sanitize.py``: what is launched, and what is made of a tool's output. The tools need a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("sanitize_launches", "sanitize")


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield tuple(importlib.import_module(name) for name in NAMES)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def launching(modules: tuple[ModuleType, ...]) -> ModuleType:
    return modules[0]


@pytest.fixture
def sanitize(modules: tuple[ModuleType, ...]) -> ModuleType:
    return modules[1]


def test_every_kernel_of_the_package_is_watched(sanitize: ModuleType) -> None:
    names = sanitize.kernel_names()
    package = Path(sys.modules["meshnorm"].__file__ or "").parent / "kernels"
    for file in package.glob("triton_*.py"):
        for line in file.read_text().splitlines():
            if line.startswith("def ") and line.split("(")[0].endswith("_kernel"):
                assert line.removeprefix("def ").split("(")[0] in names


@pytest.mark.parametrize("group", ["forward", "backward", "slices", "split_forward", "split_backward"])
def test_a_group_has_masks_strides_frozen_tensors_and_missing_weights(launching: ModuleType, group: str) -> None:
    launches = list(launching.launches(group))
    assert len({launch.n for launch in launches}) >= 4 and any(launch.n % 2 for launch in launches)
    assert {"contiguous", "heads", "odd", "expanded"} <= {launch.x for launch in launches}
    assert {"dx dw", "dx", "dw"} == {launch.want for launch in launches}
    assert {"same", "float32", "none"} == {launch.weight for launch in launches}
    assert {"bfloat16", "float16", "float32"} <= {launch.dtype for launch in launches}


def test_rows_keep_their_strides_on_the_way_to_the_device(
    launching: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(launching, "DEVICE", "cpu")
    for kind in ("contiguous", "heads", "transposed", "expanded", "one_row", "odd"):
        x = launching.rows(kind, 12, 10, torch.float32)
        assert x.shape[0] * x.shape[1] == 12 and x.stride(2) == 1
        there = launching.on_gpu(x)
        assert there.stride() == x.stride() and torch.equal(there, x)


@pytest.mark.parametrize(
    ("output", "status", "tool", "words"),
    [
        ("all launches done\n========= ERROR SUMMARY: 0 errors", 0, "memcheck", "clean"),
        ("all launches done\n========= ERROR SUMMARY: 3 errors", 0, "initcheck", "3 errors"),
        ("========= ERROR SUMMARY: 1 error", 1, "memcheck", "1 errors, and did not finish"),
        ("========= ERROR SUMMARY: 0 errors", 1, "memcheck", "failed: the launches did not finish"),
        (
            "all launches done\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            0,
            "racecheck",
            "clean",
        ),
        (
            "all launches done\n========= RACECHECK SUMMARY: 2 hazards displayed (1 errors, 1 warnings)",
            0,
            "racecheck",
            "1 errors, 1 warnings",
        ),
        ("all launches done", 0, "memcheck", "failed: the tool gave no summary"),
        ("========= Error: Device not supported", 1, "memcheck", "failed: the tool gave no summary"),
        ("forward: all launches done", 0, "none", "right"),
        ("Traceback", 1, "none", "failed"),
    ],
)
def test_only_a_finished_run_without_findings_is_clean(
    sanitize: ModuleType, output: str, status: int, tool: str, words: str
) -> None:
    assert sanitize.words_of(output, status, tool) == words
