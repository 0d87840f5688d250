"""``benchmarks/qk.py``: each way that needs no other library runs and is right. Timing needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def qk() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        import qk

        yield qk


def test_it_times_what_is_right(qk: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    arguments = ["--device", "cpu", "--shapes", "32:4:2:16,32:4:2:16:all", "--ways", "meshnorm,two,eager,quack"]
    rows = qk.main([*arguments, "--rep-ms", "1", "--csv", str(table)])
    assert [row[::2][:2] for row in rows] == [
        (f"32x4:2x16 {kind}", way) for kind in ("per head", "all heads") for way in ("meshnorm", "two", "eager")
    ]
    assert all(float(number) > 0 for row in rows for number in row[3:5])
    assert len(table.read_text().splitlines()) == 1 + len(rows)
    assert "GB/s" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(qk: ModuleType) -> None:
    given = qk.Given.drawn(qk.Shape(32, 4, 2, 16, False), torch.float32, "cpu")
    assert qk.fault(qk.ours, given) == ""
    assert qk.fault(lambda q, k, qw, kw: (qk.ours(q, k, qw, kw)[0], k * kw), given).startswith("y of k is off by")
