"""``benchmarks/tune.py``: what is tried, and that it runs the kernels that it is said to. Timing needs a GPU."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install meshnorm[triton]")
console = pytest.importorskip("rich.console", reason="rich is not installed: pip install meshnorm[cli]")

from fake_driver import Asked, what_an_h200_is_asked  # noqa: E402

from meshnorm.kernels.settings import ChunkSettings, PersistentSettings  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
WIDTHS = (1, 128, 512, 513, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 12288, 16384, 18432, 32768, 65536, 131072)
KERNELS = {
    ("forward", "whole"): "forward_kernel",
    ("forward", "read"): "forward_wide_kernel",
    ("forward", "split"): "forward_split_kernel",
    ("backward", "whole"): "backward_kernel",
    ("backward", "chunks"): "backward_chunks_kernel",
    ("backward", "clusters"): "backward_chunks_kernel",
    ("backward", "split"): "backward_split_kernel",
}


@pytest.fixture(scope="module")
def tune() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module("tune")
    sys.modules.pop("tune", None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return what_an_h200_is_asked(monkeypatch)


def launched(tune: ModuleType, asked: list[Asked], name: str, n: int, dtype: torch.dtype, chosen: Any) -> Asked:
    """The first launch of a pass over 300 rows."""
    x = torch.empty(1, 1, 1, dtype=dtype).expand(1, 300, n)
    tensors = SimpleNamespace(n=n, dtype=dtype, sms=132, x=x, dy=x, weight=torch.empty(n, dtype=dtype))
    tensors.y = tensors.dx = torch.empty(1, dtype=dtype)
    tensors.dw, tensors.own_rstd, tensors.rstd = torch.empty(n, dtype=dtype), torch.empty(1, 300), torch.empty(1, 300)
    asked.clear()
    tune.SUBJECTS[name].run(tensors, chosen)
    return asked[0]


def assert_runs(tune: ModuleType, seen: Asked, name: str, n: int, s: Any) -> None:
    said = tune.kernel_of(name, s, n)
    assert seen.kernel == KERNELS[name, said.split()[0]]
    assert seen.options["num_warps"] == s.warps
    if isinstance(s, ChunkSettings):
        assert seen.constants["CHUNK"] == s.chunk and seen.constants["STAGES"] == s.stages
        assert said == ("chunks" if seen.options["cluster"] == 1 else f"clusters of {seen.options['cluster']}")
    elif said.startswith("split"):
        assert said == f"split over {seen.constants['PARTS']}"
    else:
        assert seen.constants["BLOCK"] == s.block


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_present_settings_are_what_runs_by_itself(
    tune: ModuleType, asked: list[Asked], name: str, dtype: torch.dtype
) -> None:
    for n in WIDTHS:
        present = tune.SUBJECTS[name].present(n, dtype)
        assert_runs(tune, launched(tune, asked, name, n, dtype, None), name, n, present)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_candidate_runs_the_kernel_that_it_is_said_to(
    tune: ModuleType, asked: list[Asked], name: str, dtype: torch.dtype
) -> None:
    for n in WIDTHS:
        for each in tune.candidates(tune.SUBJECTS[name], n, dtype, 30):
            assert_runs(tune, launched(tune, asked, name, n, dtype, each), name, n, each)


@pytest.mark.parametrize(
    ("name", "n", "dtype", "kinds"),
    [
        ("forward", 8192, BF16, {"read twice", "whole row"}),
        ("forward", 32768, BF16, {"read twice", "whole row", "split over 8"}),
        ("forward", 131072, BF16, {"read twice", "split over 32"}),
        ("backward", 1024, BF16, {"whole row"}),
        ("backward", 1536, BF16, {"chunks", "whole row"}),
        ("backward", 16384, BF16, {"clusters of 2", "whole row", "split over 8"}),
        ("backward", 131072, BF16, {"split over 32", "clusters of 16"}),
        ("backward", 5120, F32, {"chunks", "whole row"}),
        ("backward", 16384, F32, {"clusters of 4", "split over 8"}),
    ],
)
def test_a_choice_is_held_against_the_other_kernels(
    tune: ModuleType, name: str, n: int, dtype: torch.dtype, kinds: set[str]
) -> None:
    found = tune.candidates(tune.SUBJECTS[name], n, dtype, 24)
    assert kinds <= {tune.kernel_of(name, each, n) for each in found}


def test_candidates_are_the_present_settings_and_others_that_fit(tune: ModuleType) -> None:
    for name, subject in tune.SUBJECTS.items():
        for n in WIDTHS:
            for dtype in (F32, BF16):
                first, *others = tune.candidates(subject, n, dtype, 24)
                assert first == subject.present(n, dtype) and first not in others
                assert len(set(others)) == len(others) <= 23
                assert all(tune.is_sensible(name, each, n, dtype) for each in others)
                assert others or n == 1
                assert all(0 <= getattr(each, "held", 0) <= 4 for each in others)  # the kernel counts to 4


@pytest.mark.parametrize(
    "refused",
    [
        ChunkSettings(chunk=1024, chunks=9, warps=8, per_sm=1, stages=2),  # the kernel counts to 8
        ChunkSettings(chunk=1024, chunks=8, warps=4, per_sm=3, stages=2),  # registers
        ChunkSettings(chunk=2048, chunks=4, warps=8, per_sm=2, stages=5),  # shared memory
        ChunkSettings(chunk=512, chunks=1, warps=4, per_sm=2, stages=2),  # too few elements to a thread
        ChunkSettings(chunk=512, chunks=4, warps=2, per_sm=8, stages=3),  # a cluster of 32
    ],
)
def test_what_cannot_run_is_no_candidate(tune: ModuleType, refused: ChunkSettings) -> None:
    assert not tune.is_sensible("backward", refused, 65536, BF16)
    assert tune.is_sensible("backward", ChunkSettings(chunk=2048, chunks=4, warps=8, per_sm=2, stages=4), 65536, BF16)


def test_the_list_needs_no_gpu(
    tune: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was asked for"))
    tune.main(["--list", "--dtypes", "bfloat16,float32"])
    lines = capsys.readouterr().out.splitlines()
    for shape in tune.SHAPES.split(","):
        rows, n = shape.split("x")
        for name in ("forward", "backward"):
            assert sum(line.startswith(f"{name} {rows} {n} bfloat16: ") for line in lines) == 1
            assert sum(line.startswith(f"{name} {int(rows) // 2} {n} float32: ") for line in lines) == 1
    assert any("now clusters of 8, ChunkSettings(" in line for line in lines)
    tune.main(["--list", "--present", "--shapes", "4096", "--passes", "forward,sum_partials"])
    assert capsys.readouterr().out.count(": 1 candidates") == 2


def test_a_faster_kernel_of_another_kind_is_a_change_and_a_wrong_one_is_not(tune: ModuleType) -> None:
    unit = tune.Unit("backward", 8192, 12288, "bfloat16")
    whole = PersistentSettings(rows=1, block=16384, warps=32, per_sm=1, stages=3)
    clusters = ChunkSettings(chunk=1024, chunks=6, warps=4, per_sm=3, stages=3)
    wrong = ChunkSettings(chunk=1024, chunks=6, warps=8, per_sm=2, stages=3)
    results = [
        tune.Timed(whole, 160.0),
        tune.Timed(clusters, 150.0),
        tune.Timed(wrong, float("inf"), "wrong: off by 1"),
    ]

    def shown(threshold: float, present: bool = False) -> tuple[str, list[tuple]]:
        out = io.StringIO()
        lines = tune.report(console.Console(file=out, width=180), {unit: results}, 4000.0, threshold, present)
        return out.getvalue(), lines

    text, lines = shown(threshold=1.5)
    changes = text.partition("what would change")[2]
    assert "whole row" in changes and "clusters of 2" in changes and "+6.7%" in changes
    assert "wrong: off by 1" in text and text.count("warps=8") == 1  # in no table
    assert [line[6] for line in lines] == [True, False, False]
    assert "94.4" in lines[0]  # 8192 · 12288 · 6 bytes in 160 µs, of 4000 GB/s
    assert "nothing would change" in shown(threshold=10)[0]
    assert "would change" not in shown(threshold=1.5, present=True)[0]


@pytest.mark.parametrize(
    ("name", "n", "ladder"),
    [
        ("backward", 65536, "BACKWARD_CHUNKS ≤ 65536"),
        ("backward", 8192, "BACKWARD ≤ 8192"),
        ("backward", 131072, "BACKWARD_SPLIT_WIDEST"),
        ("forward", 5120, "FORWARD ≤ 7168"),  # whose settings are those of 4096 too
        ("sum_partials", 4096, "sum_partials"),
    ],
)
def test_a_step_is_named_as_in_the_settings(tune: ModuleType, name: str, n: int, ladder: str) -> None:
    subject = tune.SUBJECTS[name]
    assert tune.ladder_of(subject, subject.present(n, BF16), n) == ladder
