"""``benchmarks/sanitize.py``: what is launched, and what is made of a tool's output. The tools need a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")

from fake_driver import Asked, what_an_h200_is_asked

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


SIX = ("forward", "statistic", "apply", "backward", "backward_statistic", "backward_apply")
SPLIT = ["split_forward", "split_backward"]
KINDS = ["forward", "forward_wide", "backward", "qk", "gated", "chunks", "clusters", "slices", *SPLIT]


def test_the_groups_are_those_that_are_tested_here(launching: ModuleType) -> None:
    assert sorted(launching.GROUPS) == sorted([*KINDS, "sums"])


@pytest.mark.parametrize("group", KINDS)
def test_a_group_has_masks_strides_frozen_tensors_and_missing_weights(launching: ModuleType, group: str) -> None:
    launches = list(launching.launches(group))
    assert len({launch.n for launch in launches}) >= 4 and any(launch.n % 2 for launch in launches)
    assert {"contiguous", "heads", "odd", "expanded"} <= {launch.x for launch in launches}
    assert {"dx dw", "dx", "dw"} == {launch.want for launch in launches}
    assert {"same", "float32", "none"} == {launch.weight for launch in launches}
    assert {"bfloat16", "float16", "float32"} <= {launch.dtype for launch in launches}


@pytest.fixture
def launched(launching: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Asked]]:
    """What a group launches where the device is an H200: nothing is run, and no result looked at."""
    asked = what_an_h200_is_asked(monkeypatch)
    monkeypatch.setattr(launching, "DEVICE", "cpu")
    monkeypatch.setattr(launching, "_check", lambda *arguments: None)
    monkeypatch.setattr(launching, "cpu", SimpleNamespace(**dict.fromkeys(SIX, lambda *arguments: None)))
    monkeypatch.setattr(launching, "cpu_gated", SimpleNamespace(**dict.fromkeys(SIX, lambda *arguments: None)))
    monkeypatch.setattr(torch, "randn", torch.empty)  # a tenth of the time

    def of(group: str) -> list[Asked]:
        asked.clear()
        launching.run(group, 0, 1)
        return list(asked)

    return of


def rows_and_groups(asked: Asked) -> tuple[int, int]:
    """M, and how many groups of programs share the rows: single programs, clusters, or those of a split row."""
    return asked.arguments["M"], asked.grid[0] // (asked.constants["PARTS"] if "split" in asked.kernel else 1)


OF_SLICES = {"statistic_kernel", "apply_kernel", "backward_statistic_kernel", "backward_apply_kernel"}
RUN = {
    "forward": {"forward_kernel"},
    "forward_wide": {"forward_wide_kernel"},
    "backward": {"backward_kernel", "sum_partials_kernel"},
    "chunks": {"backward_chunks_kernel", "sum_partials_kernel"},
    "clusters": {"backward_chunks_kernel", "sum_partials_kernel"},
    "slices": {*OF_SLICES, "sum_partials_kernel"},
    "qk": {
        *("qk_forward_kernel", "qk_forward_wide_kernel", "qk_statistic_kernel", "qk_apply_kernel"),
        *("qk_backward_kernel", "qk_backward_statistic_kernel", "qk_backward_apply_kernel"),
        *("qk_sum_partials_kernel",),
    },
    "gated": {
        *("gated_forward_kernel", "gated_forward_wide_kernel", "gated_statistic_kernel"),
        *("gated_backward_kernel", "sum_partials_kernel"),
    },
    "split_forward": {"forward_split_kernel"},
    # Where x is frozen a split row needs no exchange.
    "split_backward": {"backward_split_kernel", "backward_apply_kernel", "sum_partials_kernel"},
    "sums": {"sum_partials_kernel"},
}


@pytest.mark.parametrize("group", RUN)
def test_a_group_runs_its_kernels_and_no_others(launched: Callable[[str], list[Asked]], group: str) -> None:
    assert {each.kernel for each in launched(group)} == RUN[group]


def test_every_kernel_of_the_package_runs_in_some_group(sanitize: ModuleType) -> None:
    assert set.union(*RUN.values()) == set(sanitize.kernel_names()) - {"planted_kernel"}


def test_rows_in_chunks_run_in_one_program_and_in_clusters_of_every_kind(
    launched: Callable[[str], list[Asked]],
) -> None:
    found = {
        group: {each.options["cluster"] for each in launched(group) if "chunks" in each.kernel}
        for group in ("chunks", "clusters")
    }
    assert found["chunks"] == {1}
    assert {2, 3, 4, 8, 16} <= found["clusters"]


def test_gated_rows_run_in_clusters_in_both_orders_and_in_dtypes_of_both_sizes(
    launched: Callable[[str], list[Asked]],
) -> None:
    gradients = [each for each in launched("gated") if each.kernel == "gated_backward_kernel"]
    found = {
        (each.arguments["X"].dtype.itemsize, each.constants["FIRST"], each.options.get("cluster", 1) > 1)
        for each in gradients
    }
    assert {(size, first, spread) for size in (2, 4) for first in (False, True) for spread in (False, True)} <= found
    assert {1, 2, 3, 4, 5, 8} <= {each.options.get("cluster", 1) for each in gradients}


@pytest.mark.parametrize("group", ["qk", "gated"])
def test_gradients_of_two_norms_and_of_a_gated_one_go_through_several_tiles(
    launched: Callable[[str], list[Asked]], group: str
) -> None:
    counted = []
    for each in launched(group):
        if each.kernel == "qk_backward_kernel":
            counted.append((each.arguments["q_tiles"], each.arguments["q_programs"]))
        elif each.kernel == "gated_backward_kernel":
            parts = each.constants["GROUPS"] * each.constants["CHUNKS"] // each.options.get("cluster", 1)
            counted.append((each.arguments["tiles"], each.grid[0] // parts))
    assert counted and sum(tiles >= 2 * programs for tiles, programs in counted) > len(counted) / 2


def test_wide_rows_are_read_twice_whole_and_but_for_a_part(launched: Callable[[str], list[Asked]]) -> None:
    assert {0, 1, 2} <= {each.constants["HELD"] for each in launched("forward_wide")}


@pytest.mark.parametrize("group", ["backward", "chunks", "clusters", *SPLIT])
def test_programs_go_through_several_rows(launched: Callable[[str], list[Asked]], group: str) -> None:
    persistent = [rows_and_groups(each) for each in launched(group) if "M" in each.arguments]
    assert sum(rows >= 2 * groups for rows, groups in persistent) > len(persistent) / 2


def test_rows_keep_their_strides_on_the_way_to_the_device(
    launching: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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
